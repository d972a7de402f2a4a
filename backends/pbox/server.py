"""The PBox server: listens, authenticates, and hands lanes to the native cores."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import secrets
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from phub_collective.backends.native import load
from phub_collective.backends.pbox import protocol
from phub_collective.backends.pbox.handshake import HANDSHAKE_SECONDS
from phub_collective.backends.pbox.keytable import TableSpec
from phub_collective.backends.pbox.listener import Listener
from phub_collective.backends.pbox.placement import cores_of
from phub_collective.backends.pbox.quota import JobSpec, Need, Quota, lane_need
from phub_collective.backends.pbox.tenant import Member, Tenant
from phub_collective.errors import (
    AuthError,
    ConfigError,
    PeerLost,
    PhubError,
    ProtocolError,
    from_code,
)

log = logging.getLogger(__name__)

MAX_JOBS = 1024
WATCH_SECONDS = 1.0  # between two looks for jobs that nobody joins


@dataclass(frozen=True)
class ServerOptions:
    """How to run a PBox.

    Attributes:
        interfaces: addresses to listen on, each served by its own share of the cores.
        port: TCP port on all of them; 0: any free one.
        cores: aggregator threads, at least one per interface.
        admin_token: who creates a job must prove it; required beyond loopback.
        congestion, socket_buffer, keepalive: of tcp lanes (see Config).
        start_timeout: seconds until the first rank must have joined a job.
        spin_us: how long a core looks for more before it sleeps, in microseconds.
    """

    interfaces: Sequence[str] = ("127.0.0.1",)
    port: int = 0
    cores: int = 1
    admin_token: str = ""
    congestion: str = ""
    socket_buffer: int = 0
    keepalive: int = 30
    start_timeout: float = 120.0
    spin_us: int = 0

    def check(self) -> None:
        """Raise ConfigError for numbers out of range, and for a listener beyond loopback that
        has no admin token."""
        if not self.interfaces or self.cores < len(self.interfaces):
            raise ConfigError(
                f"[pbox] expected at least one core for each of {len(self.interfaces)} interfaces, "
                f"got {self.cores}; raise --cores or PHUB_PBOX_CORES"
            )
        if not 0 <= self.port < 65536:
            raise ConfigError(f"[pbox] expected a port of 0..65535, got {self.port}")
        exposed = [address for address in self.interfaces if not is_loopback(address)]
        if exposed and not self.admin_token:
            raise ConfigError(
                f"[pbox] {exposed[0]} is reachable by others: set PHUB_ADMIN_TOKEN, which creating "
                f"a job will require (for example {protocol.new_token()})"
            )


def is_loopback(address: str) -> bool:
    """Only this host can connect to it."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


class PBoxServer:
    """A running PBox. `close` ends all jobs."""

    def __init__(self, options: ServerOptions) -> None:
        """Raises ConfigError: see `ServerOptions.check`, or an address cannot be listened on."""
        options.check()
        self._options = options
        # First, since it may fail: nothing else is running yet.
        self._listener = Listener(options.interfaces, options.port, options.congestion, self._serve)
        self._core = load()
        self._native = self._core.Server(options.cores, options.spin_us)
        self._tcp = self._core.TcpOptions(
            options.congestion,
            options.socket_buffer,
            options.keepalive,
            protocol.lane_unsent(options.cores),
        )
        self._lock = threading.Lock()
        self._jobs: dict[str, Tenant] = {}
        self._next_job = 1
        self._quota = Quota()
        self._closing = threading.Event()
        # It calls the native core, so `close` joins it before the interpreter ends.
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        self._listener.start()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """(address, port) of each interface."""
        return self._listener.addresses

    def close(self) -> None:
        """End all jobs with an error, close all sockets. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._listener.stop()
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.fail(PeerLost("[pbox] the server was stopped"))
        self._native.close_events()
        self._watcher.join()
        self._listener.end()

    def jobs(self) -> list[str]:
        """Names of the jobs that have not ended."""
        with self._lock:
            return sorted(self._jobs)

    # --- connections ---

    def _serve(self, connection: socket.socket) -> None:
        """One connection, from its first message to its end; whatever it sends, only it suffers."""
        connection.settimeout(HANDSHAKE_SECONDS)
        try:
            message = protocol.receive(connection, protocol.MAX_GREETING)
            handlers = {
                "where": self._where,
                "create": self._create,
                "connect": self._connect,
                "lane": self._lane,
            }
            handler = handlers.get(str(message.get("op")))
            if handler is None:
                raise ProtocolError(f"[pbox] unknown request {message.get('op')!r}")
            handler(connection, message)
        except Exception as error:  # whatever its bytes bring about
            with contextlib.suppress(OSError):
                protocol.send(connection, protocol.error_message(_typed(error)))

    def _where(self, connection: socket.socket, message: protocol.Message) -> None:
        """Tell the abstract Unix socket: who can connect to it shares this host's memory."""
        protocol.send(connection, {"unix": self._listener.unix})

    def _create(self, connection: socket.socket, message: protocol.Message) -> None:
        """CreateService: make a job, return its token."""
        spec, options = JobSpec.from_json(message), self._options
        if options.admin_token:
            protocol.challenge(connection, options.admin_token, "create", spec.name)
        spec.check(self._core.MAX_WORKERS, self._core.MAX_PAYLOAD)
        with self._lock:
            if spec.name in self._jobs:
                raise ConfigError(f"[pbox] a job {spec.name!r} exists already; choose another name")
            if len(self._jobs) >= MAX_JOBS:
                raise ConfigError(
                    f"[pbox] there are {MAX_JOBS} jobs, which is the most; wait for one to end "
                    f"(one that nobody joins ends after {options.start_timeout:g} s)"
                )
            number, self._next_job = self._next_job, self._next_job + 1
            interfaces = len(options.interfaces)
            job = Tenant(self._native, number, spec, self._quota, options.cores, interfaces)
            self._jobs[spec.name] = job
        protocol.send(connection, {"token": job.token})

    def _authenticate(
        self, connection: socket.socket, message: protocol.Message, *claims: object
    ) -> Tenant:
        name = str(message.get("job", ""))
        with self._lock:
            job = self._jobs.get(name)
        # An unknown job fails like a wrong token: who has none learns no names.
        token = job.token if job else secrets.token_hex(protocol.TOKEN_BYTES)
        protocol.challenge(connection, token, message.get("op"), name, message.get("rank"), *claims)
        if job is None:
            raise AuthError(f"[pbox] there is no job {name!r}")
        self._listener.authenticated()
        return job

    def _connect(self, connection: socket.socket, message: protocol.Message) -> None:
        """ConnectService: a rank's control connection, until it ends."""
        job = self._authenticate(connection, message)
        connection.settimeout(None)  # `Member.send` does not block
        protocol.keep_alive(connection, self._options.keepalive, self._options.keepalive)
        member = Member(int(message["rank"]), connection)
        job.join(member)
        why: PhubError | None = None
        try:
            member.send(self._welcome(connection, job))
            while self._request(job, member, protocol.receive(connection)):
                pass
        except Exception as error:
            why = _typed(error)
            member.send(protocol.error_message(why))
        if job.leave(member, why):
            self._remove(job)

    def _remove(self, job: Tenant) -> None:
        """A job has ended."""
        with self._lock:
            if self._jobs.get(job.name) is job:
                del self._jobs[job.name]
        job.destroy()

    def _welcome(self, connection: socket.socket, job: Tenant) -> protocol.Message:
        here = connection.getsockname()[0] if connection.family != socket.AF_UNIX else ""
        interfaces = []
        for index, (address, port) in enumerate(self.addresses):
            # A wildcard address is reached where the worker has reached us.
            shown = here if address in ("0.0.0.0", "::") else address
            cores = cores_of(index, len(self.addresses), self._options.cores)
            interfaces.append([shown, port, list(cores)])
        return {
            "workers": job.workers,
            "shard": job.shard,
            "shards": job.shards,
            "cores": self._options.cores,
            "chunk_bytes": job.chunk_bytes,
            "interfaces": interfaces,
            "unix": self._listener.unix,
            "pid": os.getpid(),
        }

    def _request(self, job: Tenant, member: Member, message: protocol.Message) -> bool:
        """One message on a control connection; False when it was the last one."""
        op = message.get("op")
        if op == "bye":
            return False
        if op == "register":
            spec = TableSpec.from_json(message.get("table"))
            job.register(member, spec, again=bool(message.get("again")))
        elif op == "close":
            job.close(member, str(message.get("name")))
        elif op == "stalled":
            member.send({"op": "stalled", "found": job.stalled()})
        else:
            raise ProtocolError(f"[pbox] unknown request {op!r}")
        return True

    def _lane(self, connection: socket.socket, message: protocol.Message) -> None:
        """A lane's connection: authenticated here, then moved to its core."""
        core, transport = int(message.get("core", -1)), str(message.get("transport"))
        job = self._authenticate(connection, message, core, transport)
        rank, options = int(message["rank"]), self._options
        if not 0 <= core < options.cores:
            raise ConfigError(f"[pbox] there are cores 0..{options.cores - 1}, got {core}")
        shared = transport == "shm" and connection.family == socket.AF_UNIX
        if not shared and transport != "tcp":
            raise ConfigError(
                f"[pbox] unknown transport {transport!r}; expected shm (same host) or tcp"
            )
        payload = protocol.lane_payload(job.chunk_bytes)
        ring = ring_bytes(payload, options.cores)
        member = job.open_lane(rank, core, transport, lane_need(ring) if shared else Need())
        if shared:
            memory = self._core.make_ring_memory(ring)
            try:
                protocol.send(connection, {"ok": True}, (memory,))
            except BaseException:
                os.close(memory)
                raise
            # No bells: who holds an eventfd of a core could drain it, and let other jobs sleep.
            self._native.attach_shm(
                job.number, rank, core, connection.detach(), memory, protocol.NO_BELL, payload
            )
        else:
            protocol.send(connection, {"ok": True})
            self._native.attach_tcp(job.number, rank, core, connection.detach(), self._tcp, payload)
        member.send({"op": "lane", "core": core})

    def _watch(self) -> None:
        """Spread what one core found wrong to the whole job; end jobs that nobody joins."""
        while not self._closing.is_set():
            event = self._native.next_event(WATCH_SECONDS)
            with self._lock:
                jobs = list(self._jobs.values())
            for job in jobs:
                if event is not None and job.number == event.job:
                    job.fail(from_code(event.code, event.text, event.rank))
                if job.expire(self._options.start_timeout):
                    self._remove(job)


def _typed(error: Exception) -> PhubError:
    """What the other end is told about an exception that its bytes brought about."""
    if isinstance(error, PhubError):
        return error
    if isinstance(error, OSError):
        return PeerLost(f"[pbox] the connection broke: {error}")
    return ProtocolError(f"[pbox] a malformed request: {error!r}")


def ring_bytes(payload: int, cores: int) -> int:
    """Bytes of one direction of a shm lane: small enough for the cache, a few chunks at least, of
    large chunks two."""
    frame = payload + 64
    wanted = max(min(4 * frame, 1 << 20), 2 * frame, min(1 << 20, (8 << 20) // cores))
    return 1 << (wanted - 1).bit_length()
