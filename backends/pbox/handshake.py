"""The client's half of every handshake with a PBox: finding it, creating a job, the control
connection and the lanes. The server's half is in server.py."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TypeVar

from phub_collective.backends.native import load
from phub_collective.backends.pbox import protocol
from phub_collective.backends.pbox.quota import JobSpec
from phub_collective.errors import AuthError, ConfigError, PeerLost, PhubError, ProtocolError

HANDSHAKE_SECONDS = 10.0  # for each message, on both ends

T = TypeVar("T")


@dataclass(frozen=True)
class Identity:
    """Who wants to join: a rank of a job on the PBox at `address`, and the job's token."""

    address: str
    job: str
    token: str
    rank: int


@dataclass(frozen=True)
class Invitation:
    """What it takes to join a job on one PBox.

    Attributes:
        addresses: HOST:PORT, each a way to it that may lead there from a worker's host or not.
        job, token: the job's name and token on that PBox.
    """

    addresses: Sequence[str]
    job: str
    token: str


@dataclass(frozen=True)
class Welcome:
    """What the server tells a rank that has joined.

    Attributes:
        shard, shards: which part of the job's chunks it has, of how many.
        cores: of this server.
        interfaces: address, port and cores of each interface.
        unix: name of the server's abstract Unix socket.
        pid: the server's process (meaningful on its host).
    """

    workers: int
    shard: int
    shards: int
    cores: int
    chunk_bytes: int
    interfaces: list[tuple[str, int, list[int]]]
    unix: str
    pid: int

    @staticmethod
    def from_json(message: protocol.Message) -> Welcome:
        return Welcome(
            int(message["workers"]),
            int(message["shard"]),
            int(message["shards"]),
            int(message["cores"]),
            int(message["chunk_bytes"]),
            [(str(host), int(port), list(cores)) for host, port, cores in message["interfaces"]],
            str(message["unix"]),
            int(message["pid"]),
        )


class Talk:
    """A connection to what is supposed to be a PBox. What the server reports is raised as it is;
    silence, nonsense and a closed connection are PeerLost."""

    def __init__(self, connect: Callable[[], socket.socket], where: str) -> None:
        self._where = where
        try:
            self.sock = connect()
        except OSError as error:
            raise PeerLost(f"[pbox] no PBox at {where}: {error}; start one: phub serve") from None
        self.sock.settimeout(HANDSHAKE_SECONDS)

    def say(self, **message: object) -> None:
        self._guard(lambda: protocol.send(self.sock, message))

    def hear(self) -> protocol.Message:
        message = self._guard(lambda: protocol.receive(self.sock))
        protocol.raise_error(message)
        return message

    def hear_with_descriptors(self) -> tuple[protocol.Message, list[int]]:
        message, descriptors = self._guard(lambda: protocol.receive_with_descriptors(self.sock))
        try:
            protocol.raise_error(message)
        except PhubError:
            protocol.close_all(descriptors)
            raise
        return message, descriptors

    def prove(self, token: str, *claims: object) -> None:
        """Answer the server's challenge."""
        nonce = str(self.hear().get("nonce"))
        self.say(proof=protocol.proof(token, nonce, *claims))

    def _guard(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except (OSError, PeerLost, ProtocolError) as error:
            raise PeerLost(f"[pbox] no PBox answers at {self._where}: {error}") from None

    def __enter__(self) -> Talk:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:  # else the socket was handed on
            self.sock.close()


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT".

    Raises:
        ConfigError: it is something else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"[pbox] expected HOST:PORT of a PBox, got {address!r}")
    return host, int(port)


def split_list(text: str) -> list[str]:
    """The parts of "A,B,..."; at least one, which may be empty."""
    return [part.strip() for part in text.split(",")]


def invitations(addresses: str, job: str, tokens: str) -> list[Invitation]:
    """To a job on the PBox at HOST:PORT, or on its shards at HOST:PORT,..., each of which has a
    token of its own.

    Raises:
        ConfigError: there are not as many tokens as addresses.
    """
    places, secrets = split_list(addresses), split_list(tokens)
    if len(places) != len(secrets):
        raise ConfigError(
            f"[pbox] expected a token for each of {len(places)} shards, got {len(secrets)}; give "
            "those that creating the job returned, in the same order"
        )
    return [Invitation([place], job, secret) for place, secret in zip(places, secrets, strict=True)]


def create_job(address: str, spec: JobSpec, admin_token: str) -> str:
    """Ask for a new job; its token. `admin_token` is proved when the server asks."""
    with _tcp(*parse_address(address)) as talk, talk.sock:
        talk.say(op="create", **asdict(spec))
        answer = talk.hear()
        if "nonce" in answer:
            proof = protocol.proof(admin_token, str(answer["nonce"]), "create", spec.name)
            talk.say(proof=proof)
            answer = talk.hear()
    return str(answer["token"])


def accept(
    invitation: Invitation, rank: int, lane: str
) -> tuple[Identity, socket.socket, Welcome, str]:
    """`join` at the first of the addresses at which the job is known, and as whom."""
    failures: list[PhubError] = []
    for address in invitation.addresses:
        who = Identity(address, invitation.job, invitation.token, rank)
        try:
            return who, *join(who, lane)
        except (PeerLost, AuthError) as error:  # not there, or another PBox is
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    raise PeerLost(
        f"[pbox] rank {rank} found the job's PBox at none of its host's addresses; "
        "open one of them, or start phub serve and set PHUB_PBOX: " + "; ".join(map(str, failures))
    )


def join(who: Identity, lane: str) -> tuple[socket.socket, Welcome, str]:
    """The control connection, blocking from now on, and "shm" or "tcp": what lanes will be.
    `lane`: as in Config."""
    host, port = parse_address(who.address)
    with _tcp(host, port) as talk, talk.sock:
        talk.say(op="where")
        unix = str(talk.hear().get("unix"))
    transport = "shm" if _choose_shm(unix, lane) else "tcp"
    with _unix(unix) if transport == "shm" else _tcp(host, port) as talk:
        talk.say(op="connect", job=who.job, rank=who.rank)
        talk.prove(who.token, "connect", who.job, who.rank)
        welcome = Welcome.from_json(talk.hear())
        talk.sock.settimeout(None)
        return talk.sock, welcome, transport


def open_lane(
    who: Identity, welcome: Welcome, core: int, transport: str, congestion: str = ""
) -> tuple[socket.socket, list[int]]:
    """The socket of a lane to a core, and for shm the descriptor of its rings."""
    host, port, _ = next(item for item in welcome.interfaces if core in item[2])
    shared = transport == "shm"
    with _unix(welcome.unix) if shared else _tcp(host, port, congestion) as talk:
        talk.say(op="lane", job=who.job, rank=who.rank, core=core, transport=transport)
        talk.prove(who.token, "lane", who.job, who.rank, core, transport)
        if not shared:
            talk.hear()
            return talk.sock, []
        _, descriptors = talk.hear_with_descriptors()
        return talk.sock, descriptors


def _tcp(host: str, port: int, congestion: str = "") -> Talk:
    return Talk(lambda: connect(host, port, congestion), f"{host}:{port}")


def connect(host: str, port: int, congestion: str) -> socket.socket:
    """As socket.create_connection, but the congestion control is chosen before connecting: a
    connection that began with BBR goes on pacing by timer."""
    failure = OSError(f"{host} has no address")
    for family, kind, number, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, number)
        try:
            load().choose_congestion(sock.fileno(), congestion)
            sock.settimeout(HANDSHAKE_SECONDS)
            sock.connect(address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
        except PhubError:  # no such congestion control
            sock.close()
            raise
    raise failure


def _unix(name: str) -> Talk:
    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect("\0" + name)
        except OSError:
            sock.close()
            raise
        return sock

    return Talk(connect, f"the Unix socket @{name}")


def _choose_shm(unix: str, lane: str) -> bool:
    """Whoever can connect to the abstract Unix socket shares the server's host and its memory."""
    try:
        _unix(unix).sock.close()
    except PeerLost:
        if lane == "shm":
            raise ConfigError(
                "[pbox] PHUB_LANE=shm, but the PBox is on another host (or network namespace)"
            ) from None
        return False
    return lane != "tcp"
