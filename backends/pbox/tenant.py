"""One job on a PBox, as the control plane sees it: its members, its tables, how it ended."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from phub_collective.backends.operations import first_difference
from phub_collective.backends.pbox import protocol
from phub_collective.backends.pbox.keytable import (
    TableIds,
    TableSpec,
    chunk_count,
    native_table,
    require_equal,
)
from phub_collective.backends.pbox.quota import (
    JobSpec,
    Need,
    Quota,
    check_table,
    description_need,
    memory_need,
)
from phub_collective.errors import (
    AuthError,
    ConfigError,
    DuplicateName,
    MismatchError,
    PeerLost,
    PhubError,
    ProtocolError,
    rank_of,
    to_code,
)

log = logging.getLogger(__name__)

MAX_REFUSALS = 64  # of one name, that a rank has yet to be told


class Member:
    """A worker's control connection."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank, self.sock = rank, sock
        self.transports: dict[int, str] = {}  # core -> "shm" | "tcp"
        self._sending = threading.Lock()

    def send(self, message: protocol.Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send without ever waiting: whoever does not read must not hold up the server, and loses
        its connection. That a connection is gone is noticed by its reader, not here."""
        with self._sending, contextlib.suppress(OSError):
            if not protocol.send_now(self.sock, message, descriptors):
                self.sock.shutdown(socket.SHUT_RDWR)


@dataclass
class Registered:
    """A table that all ranks have."""

    spec: TableSpec
    ids: TableIds
    table: Any  # native Table
    local: bool  # all workers share memory with the server
    need: Need  # its memory's
    closed: set[int] = field(default_factory=set)


@dataclass
class Refusal:
    """Why a table was not made, and the ranks that are told when they register it."""

    error: PhubError
    spec: TableSpec
    untold: set[int]


class Tenant:
    """See the module. Thread-safe; `native` is the data plane that carries out what is agreed."""

    def __init__(
        self,
        native: Any,
        number: int,
        spec: JobSpec,
        quota: Quota,
        cores: int,
        interfaces: int,
    ) -> None:
        self.number, self.name = number, spec.name
        self.workers, self.chunk_bytes = spec.workers, spec.chunk_bytes
        self.shard, self.shards = spec.shard, spec.shards
        self.token = protocol.new_token()
        self._native, self._quota = native, quota
        self._cores, self._interfaces = cores, interfaces
        self._lock = threading.RLock()
        self._members: dict[int, Member] = {}
        self._left: set[int] = set()
        self._tables: dict[str, Registered] = {}
        self._waiting: dict[str, dict[int, TableSpec]] = {}
        self._refused: dict[str, list[Refusal]] = {}
        self._next = TableIds(0, 0, 0, 0)
        self._error: PhubError | None = None
        self._ended = False
        self._made = time.monotonic()
        native.add_job(number, self.workers)

    # --- members ---

    def join(self, member: Member) -> None:
        """Raises ConfigError when the rank is out of range or taken, or what ended the job."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise AuthError(f"[pbox] job {self.name!r} has ended")
            if not 0 <= member.rank < self.workers:
                raise ConfigError(
                    f"[pbox] job {self.name!r} has ranks 0..{self.workers - 1}, "
                    f"got rank {member.rank}"
                )
            if member.rank in self._members or member.rank in self._left:
                raise ConfigError(
                    f"[pbox] rank {member.rank} of job {self.name!r} is connected already"
                )
            self._members[member.rank] = member

    def expire(self, seconds: float) -> bool:
        """End a job that nobody has joined within so many seconds. True: it has ended by this."""
        with self._lock:
            if self._members or self._ended or time.monotonic() - self._made < seconds:
                return False
            self._ended = True
        log.warning("job %s: nobody joined within %g s", self.name, seconds)
        return True

    def open_lane(self, rank: int, core: int, transport: str, need: Need) -> Member:
        """The member that gets a lane to a core; `need`: what it takes.

        Raises:
            ConfigError: it has no control connection, or such a lane already, or the job may not
                have so much.
        """
        with self._lock:
            member = self._members.get(rank)
            if member is None:
                raise ConfigError(f"[pbox] rank {rank} opened a lane before its control connection")
            if core in member.transports:
                raise ConfigError(f"[pbox] rank {rank} has a lane to core {core} already")
            self._quota.take(self.number, need, "a lane")
            member.transports[core] = transport
            return member

    def leave(self, member: Member, why: PhubError | None) -> bool:
        """A control connection has ended, in good order (why=None) or not. True when it was the
        last one: the job is over."""
        who = f"[pbox] rank {member.rank} of job {self.name!r}"
        if isinstance(why, ProtocolError):
            self.fail(ProtocolError(f"{who} broke the protocol: {why}"))
        elif why is not None:
            self.fail(PeerLost(f"{who} was lost: {why}", member.rank))
        with self._lock:
            self._members.pop(member.rank, None)
            self._left.add(member.rank)
            if self._waiting:
                name = next(iter(self._waiting))
                self.fail(PeerLost(f"{who} has ended, others register {name!r}", member.rank))
            self._ended = not self._members
            return self._ended

    def fail(self, error: PhubError) -> None:
        """End the job with this error on every rank; later calls change nothing."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            waiting, self._waiting = self._waiting, {}
        log.warning("job %s: %s", self.name, error)
        self._native.fail_job(self.number, to_code(error), rank_of(error), str(error))
        for name, specs in waiting.items():
            self._refuse(name, list(specs), error)

    # --- tables ---

    def register(self, member: Member, spec: TableSpec, again: bool = False) -> None:
        """Note that a rank wants this table; the last of them makes it, and all get the answer.
        `again`: the rank is done with the table that the name has meant so far."""
        with self._lock:
            old = self._tables.get(spec.name)
            if again and old is not None:
                self._retire(member.rank, old, spec)
            try:
                self._check(member, spec)
            except PhubError as error:
                return self._refuse(spec.name, [member.rank], error)
            specs = self._waiting.setdefault(spec.name, {})
            specs[member.rank] = spec
            first, theirs = next(iter(specs.items()))
            try:
                require_equal(theirs, first, spec, member.rank)
                specs[member.rank] = theirs  # one copy is enough
                if len(specs) < self.workers:
                    return None
                registered = self._make(spec)
            except PhubError as error:
                del self._waiting[spec.name]
                self._remember(Refusal(error, theirs, set(range(self.workers)) - specs.keys()))
                return self._refuse(spec.name, list(specs), error)
            del self._waiting[spec.name]
            self._tables[spec.name] = registered
            for rank in specs:
                self._answer(rank, registered)
            for memory in _shared_memories(registered):
                memory.release_fd()  # everybody has it mapped, or on its way
        return None

    def _check(self, member: Member, spec: TableSpec) -> None:
        """Raise what is wrong with this rank's wish, whatever the others want."""
        if self._error is not None:
            raise self._error
        if self._left:
            gone = min(self._left)
            raise PeerLost(
                f"[pbox] rank {member.rank} registers {spec.name!r}, but rank {gone} has ended",
                gone,
            )
        refused = self._refusal(spec.name, member.rank)
        if refused is not None:
            raise refused
        check_table(spec)
        old = self._tables.get(spec.name)
        if member.rank in self._waiting.get(spec.name, {}) or (
            old is not None and member.rank not in old.closed
        ):
            raise DuplicateName(
                f"[pbox] rank {member.rank} registers {spec.name!r} twice; "
                "give every exchange of a job a name of its own"
            )
        if spec.name not in self._waiting:
            self._quota.take(self.number, description_need(spec), f"table {spec.name!r}")

    def _remember(self, refusal: Refusal) -> None:
        """Keep it for the ranks that have yet to register."""
        if not refusal.untold:
            return self._quota.give(self.number, description_need(refusal.spec))
        kept = self._refused.setdefault(refusal.spec.name, [])
        kept.append(refusal)
        if len(kept) > MAX_REFUSALS:
            self.fail(refusal.error)  # some ranks try again and again, others never come
        return None

    def _refusal(self, name: str, rank: int) -> PhubError | None:
        """What a rank has yet to be told about a name."""
        kept = self._refused.get(name, [])
        refusal = next((refusal for refusal in kept if rank in refusal.untold), None)
        if refusal is None:
            return None
        refusal.untold.discard(rank)
        if not refusal.untold:
            kept.remove(refusal)
            self._quota.give(self.number, description_need(refusal.spec))
        if not kept:
            del self._refused[name]
        return refusal.error

    def _make(self, spec: TableSpec) -> Registered:
        if spec.chunk_bytes > self.chunk_bytes:
            raise ConfigError(
                f"[pbox] chunks of {spec.chunk_bytes} bytes; "
                f"job {self.name!r} was made for {self.chunk_bytes}"
            )
        local = self._all_share_memory()
        if spec.shared and not local:
            raise ConfigError(
                "[pbox] shared_model=True needs one PBox, and every worker on its host with shm "
                "lanes; use the server optimizer without it"
            )
        need = memory_need(spec, self.workers, local, self.shards)
        self._quota.take(self.number, need, f"table {spec.name!r}")
        ids, extent = self._next, (self.workers, self._cores, self._interfaces)
        try:
            info = native_table(spec, ids, *extent, local, self.shards, self.shard)
            table = self._native.add_table(self.number, info, self.workers)
        except BaseException:
            self._quota.give(self.number, need)
            raise
        self._next = TableIds(
            ids.id + 1,
            ids.first_key + max(len(spec.keys), 1),
            ids.first_chunk + max(chunk_count(spec.keys, spec.chunk_bytes), 1),
            ids.first_group + (spec.groups if spec.server else 0),
        )
        return Registered(spec, ids, table, local, need)

    def _all_share_memory(self) -> bool:
        """Of several shards each would need an arena of its own in every worker's memory."""
        lanes = [member.transports for member in self._members.values()]
        return (
            self.shards == 1
            and len(lanes) == self.workers
            and all(len(cores) == self._cores and set(cores.values()) == {"shm"} for cores in lanes)
        )

    def _answer(self, rank: int, registered: Registered) -> None:
        ids = registered.ids
        message = {
            "op": "registered",
            "name": registered.spec.name,
            "ids": [ids.id, ids.first_key, ids.first_chunk, ids.first_group],
            "local": registered.local,
        }
        shared = tuple(memory.fd for memory in _shared_memories(registered, rank))
        self._members[rank].send(message, shared)

    def _refuse(self, name: str, ranks: Any, error: PhubError) -> None:
        message = {"op": "registered", "name": name, **protocol.error_message(error)}
        message["over"] = self._error is not None  # the job, not only this table
        for rank in ranks:
            if rank in self._members:
                self._members[rank].send(message)

    def close(self, member: Member, name: str) -> None:
        """A rank is done with a table; the last one frees it."""
        with self._lock:
            registered = self._tables.get(name)
            if registered is not None:
                text = f"[pbox] rank {member.rank} has closed {name!r}, other ranks exchange it"
                self._close(member.rank, registered, PeerLost(text, member.rank))

    def _retire(self, rank: int, old: Registered, new: TableSpec) -> None:
        """`close`, for another use of the name: who goes on with the old one differs from it."""
        others = set(range(self.workers)) - old.closed - {rank}
        where = first_difference(
            old.spec.describe(), new.describe(), f"rank {min(others, default=-1)}", f"rank {rank}"
        )
        error = MismatchError(f"[pbox] {new.name!r} is used differently: {where}; make them equal")
        self._close(rank, old, error)

    def _close(self, rank: int, registered: Registered, error: PhubError) -> None:
        """`error` is for those who go on with the table."""
        registered.closed.add(rank)
        if len(registered.closed | self._left) < self.workers:
            return self._end(registered, error)
        del self._tables[registered.spec.name]
        self._quota.give(self.number, registered.need + description_need(registered.spec))
        if self._error is None:
            self._native.drop_table(self.number, registered.ids.id)
        return None

    def _end(self, registered: Registered, error: PhubError) -> None:
        """Whoever pushes this table from now on, or waits for its answer, gets `error`."""
        self._native.end_table(
            self.number,
            registered.ids.id,
            to_code(error),
            rank_of(error),
            str(error),
        )

    # --- questions ---

    def stalled(self) -> list[tuple[str, list[int]]]:
        """What some ranks wait for, and the ranks that have not come."""
        with self._lock:
            found = [
                (f"registration of {name!r}", sorted(set(range(self.workers)) - specs.keys()))
                for name, specs in self._waiting.items()
            ]
            tables = list(self._tables.values())
        for key, missing in self._native.stalled(self.number):
            for registered in tables:
                index = key - registered.ids.first_key
                if 0 <= index < len(registered.spec.keys):
                    found.append((registered.spec.keys[index].name, missing))
        return found

    def destroy(self) -> None:
        """Free everything; the token is worthless from now on."""
        self._native.drop_job(self.number)
        self._tables.clear()
        self._quota.end(self.number)


def _shared_memories(registered: Registered, rank: int | None = None) -> list[Any]:
    """The memory files of a table that go to `rank` (None: to anyone): its arena, then the
    weights, or the answers."""
    table = registered.table
    arenas = table.arenas if rank is None else table.arenas[rank : rank + 1]
    answers = table.answers if registered.local and not registered.spec.model else []
    return [memory for memory in [*arenas, *table.weights, *answers] if memory is not None]
