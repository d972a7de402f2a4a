"""A rank's connection to the PBox of its job, or to all of its shards: the control connections, the
lanes, the tables that are registered with all of them, and waiting with a limit."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phub_collective.backends.base import layout
from phub_collective.backends.native import load
from phub_collective.backends.pbox import protocol
from phub_collective.backends.pbox.control import Control
from phub_collective.backends.pbox.handshake import HANDSHAKE_SECONDS, Invitation, Welcome
from phub_collective.backends.pbox.keytable import TableIds, TableSpec, native_table
from phub_collective.backends.waiting import Missing, Waiter
from phub_collective.config import Config
from phub_collective.errors import (
    ConfigError,
    DuplicateName,
    PeerTimeout,
    PhubError,
    rank_of,
    to_code,
)

log = logging.getLogger(__name__)


@dataclass
class RegisteredTable:
    """The servers' answer to a registration, already known to the native client.

    Attributes:
        ids: those of the first shard; its table's number is the client's, too.
    """

    ids: TableIds
    arena: bool
    descriptors: list[int]  # memory files: this rank's arena, then the shared weights, if any


# Called on a reader's thread with the table, or with what was wrong.
OnRegistered = Callable[[RegisteredTable | None, PhubError | None], None]


@dataclass
class Registration:
    """A table that is not registered with all shards yet, and what they have answered."""

    spec: TableSpec
    callback: OnRegistered
    answers: dict[int, protocol.Message] = field(default_factory=dict)


class Connection:
    """Everything between one rank and the PBoxes of its job. Thread-safe.

    Attributes:
        client: the native PboxClient.
        workers: of the job.
        shards: number of PBoxes that share the job's chunks.
        server_pids: their processes (meaningful on their hosts).
    """

    def __init__(self, invitations: Sequence[Invitation], rank: int, config: Config) -> None:
        """Connect and open a lane to every core. `invitations`: by shard, in the same order on
        every rank.

        Raises:
            AuthError: wrong token. PeerLost: nobody listens there.
            ConfigError: the lane asked for cannot be had, or the servers are no shards of one job.
        """
        self._core = load()
        self.rank, self.config = rank, config
        self.engine = self._core.Engine(config.spin_us)
        self._lock = threading.Lock()
        self._callbacks: dict[str, Registration] = {}
        self._memories: dict[int, object] = {}
        self._stalled: dict[int, list[tuple[str, list[int]]]] = {}
        self._news = threading.Condition(self._lock)
        self._lanes_ready: set[tuple[int, int]] = set()
        self._closed = False
        self._error: PhubError | None = None
        self._controls: list[Control] = []
        try:
            for shard, invitation in enumerate(invitations):
                control = Control(invitation, rank, config, shard, self._handle, self._fail)
                self._controls.append(control)
            self.shards = len(self._controls)
            self._welcome = _common([control.welcome for control in self._controls])
            self.client = self._core.PboxClient(self.engine, rank, self._welcome.cores)
        except BaseException:
            for control in self._controls:
                control.close()
            raise
        self.workers, self.chunk_bytes = self._welcome.workers, self._welcome.chunk_bytes
        self.server_pids = [control.welcome.pid for control in self._controls]
        try:
            self._open_lanes()
        except BaseException:
            self.close()
            raise

    # --- set-up ---

    def _open_lanes(self) -> None:
        cores = self._welcome.cores
        for control in self._controls:
            control.start()
            for core in range(cores):
                self._open_lane(control, core)
        lanes = cores * self.shards
        self._await(lambda: len(self._lanes_ready) == lanes, HANDSHAKE_SECONDS, "its lanes")

    def _open_lane(self, control: Control, core: int) -> None:
        sock, descriptors = control.open_lane(core)
        payload = protocol.lane_payload(self.chunk_bytes)
        carrier = control.transport
        cores = self._welcome.cores
        lane = control.shard * cores + core
        if carrier == "tcp":
            config = self.config
            options = self._core.TcpOptions(
                config.congestion,
                config.socket_buffer,
                max(1, int(config.timeout)),
                protocol.lane_unsent(cores * self.shards),
            )
            fd = sock.detach()
            self.client.attach_tcp(lane, fd, options, payload)
            carrier = f"tcp ({self._core.congestion_control(fd)})"
        else:
            (memory,) = descriptors
            self.client.attach_shm(lane, sock.detach(), memory, protocol.NO_BELL, payload)
        log.info("[pbox] rank %d: %s to core %d of %s", self.rank, carrier, core, control.name)

    # --- the control connections ---

    def _handle(self, shard: int, message: protocol.Message, descriptors: list[int]) -> None:
        op = message.get("op")
        if op == "registered":
            self._registered(shard, message, descriptors)
            return
        protocol.close_all(descriptors)
        protocol.raise_error(message)
        with self._news:
            if op == "lane":
                self._lanes_ready.add((shard, int(message["core"])))
            elif op == "stalled":
                found = [(str(name), list(ranks)) for name, ranks in message["found"]]
                self._stalled[shard] = found
            self._news.notify_all()

    def _registered(self, shard: int, message: protocol.Message, descriptors: list[int]) -> None:
        """Tell the callback what became of its table, when the last shard has answered. Whatever is
        wrong with the answers, it is told here, or is still there for `_fail` to tell."""
        name = str(message["name"])
        try:
            if message.get("over"):
                protocol.raise_error(message)  # the connection ends, as the job has on that shard
            with self._lock:
                expected = self._callbacks.get(name)
                # None: another rank's mismatch, before this rank registered: said again when it
                # does. Or the answer to a registration that was given up.
                if expected is None:
                    return
                expected.answers[shard] = message
                is_last = len(expected.answers) == self.shards
            if is_last:
                self._settle(name, expected, descriptors)
        finally:
            protocol.close_all(descriptors)  # those that nobody has taken

    def _settle(self, name: str, expected: Registration, descriptors: list[int]) -> None:
        table: RegisteredTable | None = None
        error: PhubError | None = None
        try:
            table = self._adopt(expected, descriptors)
        except PhubError as refused:
            error = refused
        with self._lock:
            untold = self._callbacks.pop(name, None) is not None  # by `_fail`, meanwhile
        if untold:
            expected.callback(table, error)
        elif table is not None:
            protocol.close_all(table.descriptors)

    def _adopt(self, registration: Registration, descriptors: list[int]) -> RegisteredTable:
        """Make the native client know a table. Takes the descriptors that it uses off the list."""
        spec = registration.spec
        messages = [registration.answers[shard] for shard in range(self.shards)]
        refusals = [message for message in messages if "error" in message]
        if refusals:
            made = [shard for shard, one in enumerate(messages) if "error" not in one]
            self._tell_closed(spec.name, made)
            protocol.raise_error(refusals[0])
        ids = [TableIds(*message["ids"]) for message in messages]
        local = all(bool(message["local"]) for message in messages)
        answers = []
        try:
            while local and not spec.model and descriptors:
                size, read_only = layout(spec.keys)[1], self._core.Access.READ_ONLY
                answers.append(self._core.Memory.attach(descriptors.pop(0), size, read_only))
            extent = self.workers, self._welcome.cores, len(self._welcome.interfaces)
            info = native_table(spec, ids[0], *extent, local, self.shards)
            on_wire = [(one.first_key, one.first_chunk, one.first_group) for one in ids]
            self.client.add(info, answers, on_wire)
        except PhubError:
            self.close_table(spec.name, ids[0])  # the others shall not wait for this rank
            raise
        kept, descriptors[:] = list(descriptors), []
        return RegisteredTable(ids[0], spec.in_place(local), kept)

    def _fail(self, error: PhubError) -> None:
        self.client.fail(to_code(error), rank_of(error), str(error))
        with self._news:
            self._error = self._error or error
            registrations, self._callbacks = list(self._callbacks.values()), {}
            self._news.notify_all()
        for registration in registrations:
            registration.callback(None, error)

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
            self._callbacks[spec.name] = Registration(spec, callback)
        if instead_of is not None:
            self.client.drop(instead_of.id)
        again = instead_of is not None
        message = {"op": "register", "table": spec.to_json(), "again": again}
        for control in self._controls:
            control.send(message)

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
        self._tell_closed(name, range(self.shards))

    def _tell_closed(self, name: str, shards: Sequence[int]) -> None:
        # Of a job that is over nobody needs to hear; and whoever has not heard why it is over, must
        # not hear this first.
        if self._closed or self._error is not None or self.client.failed():
            return
        for shard in shards:
            with contextlib.suppress(PhubError):
                self._controls[shard].send({"op": "close", "name": name})

    # --- waiting ---

    def stalled(self, seconds: float) -> tuple[dict[str, set[int]], list[str]]:
        """What the job waits for, and which ranks have not come; and the servers that are silent
        about it for so long."""
        deadline = time.monotonic() + seconds
        with self._lock:
            self._stalled = {}

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        for control in self._controls:
            with contextlib.suppress(PhubError):
                control.send({"op": "stalled"}, left())
        with contextlib.suppress(PhubError):
            self._await(lambda: len(self._stalled) == self.shards, left(), "an answer")
        with self._lock:
            answers = dict(self._stalled)
        found: dict[str, set[int]] = {}
        for name, ranks in (entry for answer in answers.values() for entry in answer):
            found.setdefault(name, set()).update(ranks)
        return found, [one.name for one in self._controls if one.shard not in answers]

    def wait(self, step: Callable[[float], bool], what: str, timeout: float | None = None) -> None:
        """See `Waiter.wait`; it is the PBox that knows what is missing from whom."""
        Waiter("pbox", self.rank, self.config).wait(step, what, self._missing, timeout)

    def _missing(self, seconds: float) -> Missing:
        found, silent = self.stalled(seconds)
        texts = [f"{name} does not answer: is it stopped, or overloaded?" for name in silent[:1]]
        if found:
            shown = list(found.items())[:8]
            names = ", ".join(f"{name} from ranks {sorted(ranks)}" for name, ranks in shown)
            texts.append(f"missing: {names}")
        missing = sorted({rank for ranks in found.values() for rank in ranks})
        return Missing(tuple(missing), "; ".join(texts) or "nothing is missing at the PBox")

    def close(self) -> None:
        """Leave the job in good order; idempotent."""
        if self._closed:
            return
        self._closed = True
        self.client.close()
        self._fail(ConfigError(f"[pbox] rank {self.rank} has left the job"))
        self._memories.clear()
        for control in self._controls:
            control.close()


def _common(welcomes: Sequence[Welcome]) -> Welcome:
    """What all shards have in common, as the first one says it.

    Raises:
        ConfigError: they are not the shards of one job, in their order, or differ in size.
    """
    for place, one in enumerate(welcomes):
        if (one.shard, one.shards) != (place, len(welcomes)):
            raise ConfigError(
                f"[pbox] expected shard {place} of {len(welcomes)}, got shard {one.shard} of "
                f"{one.shards}; name all shards of a job, in the order in which it was created"
            )
        sizes = {
            "workers": (welcomes[0].workers, one.workers),
            "chunk_bytes": (welcomes[0].chunk_bytes, one.chunk_bytes),
            "cores": (welcomes[0].cores, one.cores),
            "interfaces": (len(welcomes[0].interfaces), len(one.interfaces)),
        }
        for what, (first, other) in sizes.items():
            if first != other:
                raise ConfigError(
                    f"[pbox] shard 0 has {what} {first}, shard {place} has {other}; start all "
                    "shards alike"
                )
    return welcomes[0]
