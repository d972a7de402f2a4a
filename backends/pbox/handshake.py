"""The client's half of every handshake with a PBox: finding it, creating a job, the control
connection and the lanes. The server's half is in server.py."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from phub_collective.backends.native import load
from phub_collective.backends.pbox import protocol
from phub_collective.errors import ConfigError, PeerLost, PhubError, ProtocolError

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
class Welcome:
    """What the server tells a rank that has joined.

    Attributes:
        interfaces: address, port and cores of each interface.
        unix: name of the server's abstract Unix socket.
        pid: the server's process (meaningful on its host).
    """

    workers: int
    cores: int
    chunk_bytes: int
    interfaces: list[tuple[str, int, list[int]]]
    unix: str
    pid: int

    @staticmethod
    def from_json(message: protocol.Message) -> Welcome:
        return Welcome(
            int(message["workers"]),
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


def create_job(address: str, job: str, workers: int, chunk_bytes: int, admin_token: str) -> str:
    """Ask for a new job; its token. `admin_token` is proved when the server asks."""
    with _tcp(*parse_address(address)) as talk, talk.sock:
        talk.say(op="create", name=job, workers=workers, chunk_bytes=chunk_bytes)
        answer = talk.hear()
        if "nonce" in answer:
            proof = protocol.proof(admin_token, str(answer["nonce"]), "create", job)
            talk.say(proof=proof)
            answer = talk.hear()
    return str(answer["token"])


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
