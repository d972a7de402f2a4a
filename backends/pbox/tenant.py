"""One job on a PBox, as the control plane sees it: its members, its tables, how it ended."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
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
from phub_collective.backends.pbox.quota import check_memory, check_numbers
from phub_collective.errors import (
    AuthError,
    ConfigError,
    DuplicateName,
    MismatchError,
    PeerLost,
    PhubError,
    ProtocolError,
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
    closed: set[int] = field(default_factory=set)


@dataclass
class Refusal:
    """Why a table was not made, and the ranks that are told when they register it."""

    error: PhubError
    untold: set[int]


class Tenant:
    """See the module. Thread-safe; `native` is the data plane that carries out what is agreed."""

    def __init__(
        self,
        native: Any,
        number: int,
        name: str,
        workers: int,
        chunk_bytes: int,
        cores: int,
        interfaces: int,
    ) -> None:
        self.number, self.name, self.workers, self.chunk_bytes = number, name, workers, chunk_bytes
        self.token = protocol.new_token()
        self._native, self._cores, self._interfaces = native, cores, interfaces
        self._lock = threading.RLock()
        self._members: dict[int, Member] = {}
        self._left: set[int] = set()
        self._tables: dict[str, Registered] = {}
        self._waiting: dict[str, dict[int, TableSpec]] = {}
        self._refused: dict[str, list[Refusal]] = {}  # the oldest first
        self._next = TableIds(0, 0, 0, 0)
        self._error: PhubError | None = None
        self._ended = False
        native.add_job(number, workers)

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

    def member(self, rank: int) -> Member:
        """The member of a lane's rank; ConfigError when it has no control connection."""
        with self._lock:
            if rank not in self._members:
                raise ConfigError(f"[pbox] rank {rank} opened a lane before its control connection")
            return self._members[rank]

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
                self.fail(PeerLost(f"{who} has left, others register {name!r}", member.rank))
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
        self._native.fail_job(self.number, to_code(error), getattr(error, "rank", -1), str(error))
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
            try:
                for other, theirs in specs.items():
                    require_equal(theirs, other, spec, member.rank)
                if len(specs) < self.workers:
                    return None
                registered = self._make(spec)
            except PhubError as error:
                del self._waiting[spec.name]
                untold = set(range(self.workers)) - specs.keys()
                if untold:
                    self._refused.setdefault(spec.name, []).append(Refusal(error, untold))
                if len(self._refused.get(spec.name, ())) > MAX_REFUSALS:
                    self.fail(error)  # some ranks try again and again, others never come
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
                f"[pbox] rank {member.rank} registers {spec.name!r}, but rank {gone} has left", gone
            )
        refusals = self._refused.get(spec.name, [])
        for refusal in refusals:
            if member.rank in refusal.untold:
                refusal.untold.discard(member.rank)
                if not refusal.untold:
                    refusals.remove(refusal)
                    if not refusals:
                        del self._refused[spec.name]
                raise refusal.error
        check_numbers(spec)
        old = self._tables.get(spec.name)
        if member.rank in self._waiting.get(spec.name, {}) or (
            old is not None and member.rank not in old.closed
        ):
            raise DuplicateName(
                f"[pbox] rank {member.rank} registers {spec.name!r} twice; "
                "give every exchange of a job a name of its own"
            )

    def _make(self, spec: TableSpec) -> Registered:
        if spec.chunk_bytes > self.chunk_bytes:
            raise ConfigError(
                f"[pbox] chunks of {spec.chunk_bytes} bytes; "
                f"job {self.name!r} was made for {self.chunk_bytes}"
            )
        local = self._all_share_memory()
        if spec.shared and not local:
            raise ConfigError(
                "[pbox] shared_model=True needs every worker on the PBox's host with shm lanes; "
                "use the server optimizer without it"
            )
        check_memory(spec, self.workers, local)
        ids = self._next
        info = native_table(spec, ids, self.workers, self._cores, self._interfaces, local)
        table = self._native.add_table(self.number, info, self.workers)
        self._next = TableIds(
            ids.id + 1,
            ids.first_key + max(len(spec.keys), 1),
            ids.first_chunk + max(chunk_count(spec.keys, spec.chunk_bytes), 1),
            ids.first_group + (spec.groups if spec.server else 0),
        )
        return Registered(spec, ids, table, local)

    def _all_share_memory(self) -> bool:
        lanes = [member.transports for member in self._members.values()]
        return len(lanes) == self.workers and all(
            len(cores) == self._cores and set(cores.values()) == {"shm"} for cores in lanes
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
        if self._error is None:
            self._native.drop_table(self.number, registered.ids.id)
        return None

    def _end(self, registered: Registered, error: PhubError) -> None:
        """Whoever pushes this table from now on, or waits for its answer, gets `error`."""
        self._native.end_table(
            self.number,
            registered.ids.id,
            to_code(error),
            getattr(error, "rank", -1),
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


def _shared_memories(registered: Registered, rank: int | None = None) -> list[Any]:
    """The memory files of a table that go to `rank` (None: to anyone): its arena, then the
    weights, or the answers."""
    table = registered.table
    arenas = table.arenas if rank is None else table.arenas[rank : rank + 1]
    answers = table.answers if registered.local and not registered.spec.model else []
    return [memory for memory in [*arenas, *table.weights, *answers] if memory is not None]
