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
from phub_collective.backends.pbox.placement import cores_of
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

NO_BELL = -1  # wake over the lane's Unix socket
MAX_NAME = 200  # characters of a job's name
ACCEPT_PAUSE = 0.1  # seconds, when there are no descriptors or threads left for a connection


@dataclass(frozen=True)
class ServerOptions:
    """How to run a PBox.

    Attributes:
        interfaces: addresses to listen on, each served by its own share of the cores.
        port: TCP port on all of them; 0: any free one.
        cores: aggregator threads, at least one per interface.
        admin_token: who creates a job must prove it; required beyond loopback.
        congestion, socket_buffer, keepalive: of tcp lanes (see Config).
    """

    interfaces: Sequence[str] = ("127.0.0.1",)
    port: int = 0
    cores: int = 1
    admin_token: str = ""
    congestion: str = ""
    socket_buffer: int = 0
    keepalive: int = 30

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
        self._listeners = _listen_on(options.interfaces, options.port)
        self._core = load()
        self._native = self._core.Server(options.cores)
        self._tcp = self._core.TcpOptions(
            options.congestion, options.socket_buffer, options.keepalive
        )
        self._lock = threading.Lock()
        self._jobs: dict[str, Tenant] = {}
        self._next_job = 1
        self._closing = threading.Event()
        self._serving: dict[threading.Thread, socket.socket] = {}
        # Abstract: no file, and visible only to workers in the same network namespace.
        self._unix_name = f"phub-{secrets.token_hex(8)}"
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind("\0" + self._unix_name)
        self._unix.listen(128)
        self._acceptors = [
            threading.Thread(target=self._accept, args=(listener,), daemon=True)
            for listener in [*self._listeners, self._unix]
        ]
        # These threads call the native core, so `close` joins them before the interpreter ends.
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        for thread in [*self._acceptors, self._watcher]:
            thread.start()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """(address, port) of each interface."""
        return [listener.getsockname()[:2] for listener in self._listeners]

    def close(self) -> None:
        """End all jobs with an error, close all sockets. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        for listener in [*self._listeners, self._unix]:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            jobs = list(self._jobs.values())
        for job in jobs:
            job.fail(PeerLost("[pbox] the server was stopped"))
        self._native.close_events()
        for thread in [*self._acceptors, self._watcher]:
            thread.join()
        with self._lock:
            serving = dict(self._serving)
        for thread, connection in serving.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(HANDSHAKE_SECONDS)

    def jobs(self) -> list[str]:
        """Names of the jobs that have not ended."""
        with self._lock:
            return sorted(self._jobs)

    # --- connections ---

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    log.warning("cannot take connections: %s", error)
                    self._closing.wait(ACCEPT_PAUSE)
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            with self._lock:
                self._serving[thread] = connection
            thread.start()

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
        finally:
            connection.close()
            with self._lock:
                del self._serving[threading.current_thread()]

    def _where(self, connection: socket.socket, message: protocol.Message) -> None:
        """Tell the abstract Unix socket: who can connect to it shares this host's memory."""
        protocol.send(connection, {"unix": self._unix_name})

    def _create(self, connection: socket.socket, message: protocol.Message) -> None:
        """CreateService: make a job, return its token."""
        name, workers = str(message.get("name", "")), int(message.get("workers", 0))
        chunk_bytes = int(message.get("chunk_bytes", 0))
        if self._options.admin_token:
            protocol.challenge(connection, self._options.admin_token, "create", name)
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise ConfigError(f"[pbox] a job's name has 1 to {MAX_NAME} printable characters")
        if not 1 <= workers <= self._core.MAX_WORKERS:
            raise ConfigError(
                f"[pbox] a job has 1 to {self._core.MAX_WORKERS} workers, got {workers}"
            )
        if not 64 <= chunk_bytes <= self._core.MAX_PAYLOAD:
            raise ConfigError(
                f"[pbox] chunks of {chunk_bytes} bytes; expected 64 to {self._core.MAX_PAYLOAD}"
            )
        with self._lock:
            if name in self._jobs:
                raise ConfigError(f"[pbox] a job {name!r} exists already; choose another name")
            options = self._options
            job = Tenant(
                self._native,
                self._next_job,
                name,
                workers,
                chunk_bytes,
                options.cores,
                len(options.interfaces),
            )
            self._next_job += 1
            self._jobs[name] = job
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
            cores = cores_of(index, len(self._listeners), self._options.cores)
            interfaces.append([shown, port, list(cores)])
        return {
            "workers": job.workers,
            "cores": self._options.cores,
            "chunk_bytes": job.chunk_bytes,
            "interfaces": interfaces,
            "unix": self._unix_name,
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
        member = job.member(int(message["rank"]))
        if not 0 <= core < self._options.cores:
            raise ConfigError(f"[pbox] there are cores 0..{self._options.cores - 1}, got {core}")
        payload = lane_payload(job.chunk_bytes)
        if transport == "tcp":
            protocol.send(connection, {"ok": True})
            self._native.attach_tcp(
                job.number, member.rank, core, connection.detach(), self._tcp, payload
            )
        elif transport == "shm" and connection.family == socket.AF_UNIX:
            memory = self._core.make_ring_memory(ring_bytes(payload, self._options.cores))
            try:
                protocol.send(connection, {"ok": True}, (memory,))
            except OSError:
                os.close(memory)
                raise
            # No bells: who holds an eventfd of a core could drain it, and let other jobs sleep.
            self._native.attach_shm(
                job.number, member.rank, core, connection.detach(), memory, NO_BELL, payload
            )
        else:
            raise ConfigError(
                f"[pbox] unknown transport {transport!r}; expected shm (same host) or tcp"
            )
        member.transports[core] = transport
        member.send({"op": "lane", "core": core})

    def _watch(self) -> None:
        """Spread what one core found wrong to the whole job."""
        while not self._closing.is_set():
            event = self._native.next_event(1.0)
            if event is None:
                continue
            with self._lock:
                found = [job for job in self._jobs.values() if job.number == event.job]
            for job in found:
                job.fail(from_code(event.code, event.text, event.rank))


def _listen_on(addresses: Sequence[str], port: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    for address in addresses:
        listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        listeners.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
        except OSError as error:
            for opened in listeners:
                opened.close()
            raise ConfigError(
                f"[pbox] cannot listen on {address} port {port}: {error.strerror}; "
                "choose a free port, or 0 for any"
            ) from None
        listener.listen(128)
    return listeners


def _typed(error: Exception) -> PhubError:
    """What the other end is told about an exception that its bytes brought about."""
    if isinstance(error, PhubError):
        return error
    if isinstance(error, OSError):
        return PeerLost(f"[pbox] the connection broke: {error}")
    return ProtocolError(f"[pbox] a malformed request: {error!r}")


def lane_payload(chunk_bytes: int) -> int:
    """Largest payload of a lane, in bytes: a chunk, or an error's text."""
    return max(chunk_bytes, 16 << 10)


def ring_bytes(payload: int, cores: int) -> int:
    """Bytes of one direction of a shm lane: small enough for the cache, a few chunks at least."""
    wanted = max(4 * (payload + 64), min(1 << 20, (8 << 20) // cores))
    return 1 << (wanted - 1).bit_length()
