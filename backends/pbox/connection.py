"""A worker's connection to a PBox: the control connection, the lanes, and waiting with a limit."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from phub_collective.backends.base import layout
from phub_collective.backends.native import load
from phub_collective.backends.pbox import protocol
from phub_collective.backends.pbox.handshake import HANDSHAKE_SECONDS, Identity, join, open_lane
from phub_collective.backends.pbox.keytable import TableIds, TableSpec, native_table
from phub_collective.backends.waiting import Missing, Waiter
from phub_collective.config import Config
from phub_collective.errors import (
    ConfigError,
    DuplicateName,
    PeerLost,
    PeerTimeout,
    PhubError,
    ProtocolError,
    rank_of,
    to_code,
)

log = logging.getLogger(__name__)


@dataclass
class RegisteredTable:
    """The server's answer to a registration, already known to the native client."""

    ids: TableIds
    arena: bool
    descriptors: list[int]  # memory files: this rank's arena, then the shared weights, if any


# Called on the reader's thread with the table, or with what was wrong.
OnRegistered = Callable[[RegisteredTable | None, PhubError | None], None]


class Connection:
    """Everything between one rank and one PBox. Thread-safe.

    Attributes:
        client: the native PboxClient.
        transport: "shm" or "tcp", of all lanes.
        workers, cores: of the job, of the server.
        server_pid: process of the server (meaningful on its host).
    """

    def __init__(self, address: str, job: str, token: str, rank: int, config: Config) -> None:
        """Connect and open a lane to every core.

        Raises:
            AuthError: wrong token. ConfigError: the lane asked for cannot be had.
            PeerLost: nobody listens at `address` ("HOST:PORT").
        """
        self._core = load()
        self.rank, self.config = rank, config
        self._who = Identity(address, job, token, rank)
        self.engine = self._core.Engine(config.spin_us)
        self.client = self._core.PboxClient(self.engine, rank)
        self._sending = threading.Lock()
        self._lock = threading.Lock()
        self._callbacks: dict[str, tuple[TableSpec, OnRegistered]] = {}
        self._memories: dict[int, object] = {}
        self._stalled: list[tuple[str, list[int]]] | None = None
        self._news = threading.Condition(self._lock)
        self._lanes_ready: set[int] = set()
        self._closed = False
        self._error: PhubError | None = None
        self._control, welcome, self.transport = join(self._who, config.lane)
        protocol.limit_sending(self._control, config.stall_timeout)  # ends first
        unread_s = int(config.stall_timeout + config.timeout) + 1
        protocol.keep_alive(self._control, max(1, int(config.timeout)), unread_s)
        self._welcome = welcome
        self.workers, self.cores = welcome.workers, welcome.cores
        self.server_pid, self.chunk_bytes = welcome.pid, welcome.chunk_bytes
        self._reader = threading.Thread(target=self._read, name=f"phub-control-{rank}", daemon=True)
        self._reader.start()
        try:
            for core in range(self.cores):
                self._open_lane(core)
            self._await(
                lambda: len(self._lanes_ready) == self.cores, HANDSHAKE_SECONDS, "its lanes"
            )
        except BaseException:
            self.close()
            raise

    # --- set-up ---

    def _open_lane(self, core: int) -> None:
        sock, descriptors = open_lane(
            self._who, self._welcome, core, self.transport, self.config.congestion
        )
        payload = protocol.lane_payload(self.chunk_bytes)
        carrier = self.transport
        if self.transport == "tcp":
            config = self.config
            options = self._core.TcpOptions(
                config.congestion,
                config.socket_buffer,
                max(1, int(config.timeout)),
                protocol.lane_unsent(self.cores),
            )
            fd = sock.detach()
            self.client.attach_tcp(core, fd, options, payload)
            carrier = f"tcp ({self._core.congestion_control(fd)})"
        else:
            (memory,) = descriptors
            self.client.attach_shm(core, sock.detach(), memory, protocol.NO_BELL, payload)
        log.info("[pbox] rank %d: %s to core %d", self.rank, carrier, core)

    # --- the control connection ---

    def _read(self) -> None:
        """The reader's thread: answers to registrations and questions, and the end."""
        try:
            while True:
                self._handle(*self._receive())
        except (PeerLost, OSError) as error:
            if not self._closed:
                self._fail(PeerLost(f"[pbox] rank {self.rank} lost the PBox server: {error}"))
        except PhubError as error:
            self._fail(error)
        except Exception as error:  # whatever the server sends, those who wait must be told
            text = f"[pbox] rank {self.rank} got a malformed message from the server: {error!r}"
            self._fail(ProtocolError(text))

    def _receive(self) -> tuple[protocol.Message, list[int]]:
        if self._control.family == socket.AF_UNIX:
            return protocol.receive_with_descriptors(self._control)
        return protocol.receive(self._control), []

    def _handle(self, message: protocol.Message, descriptors: list[int]) -> None:
        op = message.get("op")
        if op == "registered":
            self._registered(message, descriptors)
            return
        protocol.close_all(descriptors)
        protocol.raise_error(message)
        with self._news:
            if op == "lane":
                self._lanes_ready.add(int(message["core"]))
            elif op == "stalled":
                self._stalled = [(str(name), list(ranks)) for name, ranks in message["found"]]
            self._news.notify_all()

    def _registered(self, message: protocol.Message, descriptors: list[int]) -> None:
        """Tell the callback what became of its table. Whatever is wrong with the answer, the
        callback is told here, or is still there for `_fail` to tell."""
        name = str(message["name"])
        with self._lock:
            expected = self._callbacks.get(name)
        if expected is None:
            # Another rank's mismatch, before this rank registered: said again when it does. Or the
            # answer to a registration that was given up.
            protocol.close_all(descriptors)
            return
        table: RegisteredTable | None = None
        error: PhubError | None = None
        try:
            protocol.raise_error(message)
            table = self._adopt(expected[0], message, descriptors)
        except PhubError as refused:
            error = refused
        finally:
            protocol.close_all(descriptors)  # those that nobody has taken
        with self._lock:
            untold = self._callbacks.pop(name, None) is not None  # by `_fail`, meanwhile
        if untold:
            expected[1](table, error)
        elif table is not None:
            protocol.close_all(table.descriptors)

    def _adopt(
        self, spec: TableSpec, message: protocol.Message, descriptors: list[int]
    ) -> RegisteredTable:
        """Make the native client know a table. Takes the descriptors that it uses off the list."""
        ids, local = TableIds(*message["ids"]), bool(message["local"])
        answers = []
        try:
            while local and not spec.model and descriptors:
                size, read_only = layout(spec.keys)[1], self._core.Access.READ_ONLY
                answers.append(self._core.Memory.attach(descriptors.pop(0), size, read_only))
            interfaces = len(self._welcome.interfaces)
            info = native_table(spec, ids, self.workers, self.cores, interfaces, local)
            self.client.add(info, answers)
        except PhubError:
            self.close_table(spec.name, ids)  # the others shall not wait for this rank
            raise
        kept, descriptors[:] = list(descriptors), []
        return RegisteredTable(ids, local and spec.model, kept)

    def _fail(self, error: PhubError) -> None:
        self.client.fail(to_code(error), rank_of(error), str(error))
        with self._news:
            self._error = self._error or error
            callbacks, self._callbacks = list(self._callbacks.values()), {}
            self._news.notify_all()
        for _, callback in callbacks:
            callback(None, error)

    def _send(self, message: protocol.Message, patience: float | None = None) -> None:
        """`patience`: seconds for the messages of other threads to leave (None: stall_timeout)."""
        limit = self.config.stall_timeout
        silent = f"[pbox] the PBox has taken nothing of rank {self.rank} for {limit:g} s"
        if not self._sending.acquire(timeout=limit if patience is None else patience):
            raise PeerTimeout(f"{silent}; is it stopped?")
        try:
            return protocol.send(self._control, message)
        except BlockingIOError:
            lost: PhubError = PeerTimeout(f"{silent}; is it stopped?")
        except OSError as error:
            lost = PeerLost(f"[pbox] rank {self.rank} lost the PBox server: {error}")
        finally:
            self._sending.release()
        self._fail(lost)
        with contextlib.suppress(OSError):  # a part may have left: no other message can follow it
            self._control.shutdown(socket.SHUT_RDWR)
        raise lost

    def _await(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        with self._news:
            if not self._news.wait_for(lambda: self._error is not None or condition(), seconds):
                raise PeerTimeout(f"[pbox] rank {self.rank} waited {seconds:g} s for {what}")
            if self._error is not None:
                raise self._error

    # --- tables ---

    def register(
        self, spec: TableSpec, callback: OnRegistered, instead_of: TableIds | None = None
    ) -> None:
        """Announce a table; `callback` is called once all ranks have (or with the error).
        `instead_of`: the name's table so far, which this rank is done with."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if spec.name in self._callbacks:
                raise DuplicateName(
                    f"[pbox] rank {self.rank} registers {spec.name!r}, which it is registering "
                    "already; give every exchange a name of its own"
                )
            self._callbacks[spec.name] = (spec, callback)
        if instead_of is not None:
            self.client.drop(instead_of.id)
        again = instead_of is not None
        self._send({"op": "register", "table": spec.to_json(), "again": again})

    def give_up(self, name: str) -> bool:
        """Wait no longer for the answer to a registration. False: its callback is being called."""
        with self._lock:
            return self._callbacks.pop(name, None) is not None

    def hold(self, ids: TableIds, memory: object) -> None:
        """Keep what a table's gradients are sent from, at least until the table is closed."""
        self._memories[ids.id] = memory

    def close_table(self, name: str, ids: TableIds, in_flight: bool = False) -> None:
        """This rank is done with a table. What is in flight is sent on from its memory."""
        self.client.drop(ids.id)
        if not in_flight:
            self._memories.pop(ids.id, None)
        # Of a job that is over nobody needs to hear; and whoever has not heard why it is over, must
        # not hear this first.
        if not self._closed and self._error is None and not self.client.failed():
            with contextlib.suppress(PhubError):
                self._send({"op": "close", "name": name})

    # --- waiting ---

    def stalled(self, seconds: float) -> list[tuple[str, list[int]]] | None:
        """What the job waits for and which ranks have not come; None when the server is silent."""
        with self._lock:
            self._stalled = None
        with contextlib.suppress(PhubError):
            self._send({"op": "stalled"}, seconds)
            self._await(lambda: self._stalled is not None, seconds, "an answer")
        return self._stalled

    def wait(self, step: Callable[[float], bool], what: str, timeout: float | None = None) -> None:
        """See `Waiter.wait`; it is the PBox that knows what is missing from whom."""
        Waiter("pbox", self.rank, self.config).wait(step, what, self._missing, timeout)

    def _missing(self, seconds: float) -> Missing:
        found = self.stalled(seconds)
        if found is None:
            return Missing(text="the PBox does not answer: is it stopped, or overloaded?")
        if not found:
            return Missing(text="nothing is missing at the PBox")
        names = ", ".join(f"{name} from ranks {ranks}" for name, ranks in found[:8])
        ranks = {rank for _, some in found for rank in some}
        return Missing(tuple(sorted(ranks)), f"missing: {names}")

    def close(self) -> None:
        """Leave the job in good order; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.client.close()
        self._fail(ConfigError(f"[pbox] rank {self.rank} has left the job"))
        self._memories.clear()
        with contextlib.suppress(PhubError, OSError):
            protocol.limit_sending(self._control, HANDSHAKE_SECONDS)  # a silent server is left
            self._send({"op": "bye"}, HANDSHAKE_SECONDS)
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join(HANDSHAKE_SECONDS)
        self._control.close()
