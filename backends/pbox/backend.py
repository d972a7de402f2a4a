"""The PBox, or its shards, as a backend: ad-hoc operations and exchanges through one connection."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field

import numpy as np

from phub_collective.backends.base import (
    Backend,
    Buffer,
    Context,
    DType,
    Exchange,
    ExchangeSpec,
    Key,
    Kind,
    Operation,
    ReduceOp,
    Work,
)
from phub_collective.backends.native import load
from phub_collective.backends.operations import check
from phub_collective.backends.pbox.connection import Connection, RegisteredTable
from phub_collective.backends.pbox.exchange import PboxExchange
from phub_collective.backends.pbox.keytable import TableIds, TableSpec
from phub_collective.backends.pbox.launch import LocalServer
from phub_collective.errors import DuplicateName, PhubError


@dataclass
class AdHoc:
    """The table of one ad-hoc name, from its first announcement on."""

    spec: TableSpec
    registered: threading.Event = field(default_factory=threading.Event)  # or refused
    ids: TableIds | None = None
    error: PhubError | None = None  # why it was refused
    work: PboxWork = field(init=False)  # the latest use


class PboxWork:
    """See `Work`. Until all ranks have announced the name, its push is still to come."""

    def __init__(
        self,
        connection: Connection,
        table: AdHoc,
        operation: Operation,
        memory: np.ndarray,
        flags: int,
    ) -> None:
        self._connection, self._table, self._operation = connection, table, operation
        self._memory, self._flags = memory, flags
        self._finished = False
        self._error: PhubError | None = None

    def start(self) -> None:
        """Push; the table is registered. What goes wrong is for `wait`."""
        assert self._table.ids is not None
        try:
            self._connection.client.push(self._table.ids.id, 0, self._flags, self._memory)
        except PhubError as error:
            self._error = error

    def done(self) -> bool:
        table = self._table
        if self._finished or self._error is not None or table.error is not None:
            return True
        if not table.registered.is_set():
            return False
        assert table.ids is not None
        return bool(self._connection.client.done(table.ids.id, 0))

    def wait(self, timeout: float | None = None) -> None:
        table, client = self._table, self._connection.client
        name = self._operation.name
        if not table.registered.is_set():
            self._connection.wait(table.registered.wait, f"all ranks to submit {name!r}", timeout)
        error = self._error or table.error
        if error is not None:
            raise error
        ids = table.ids
        assert ids is not None
        if not self._finished:
            self._connection.wait(lambda s: bool(client.wait(ids.id, 0, s)), f"{name!r}", timeout)
        self._finished = True

    def settle(self) -> None:
        """Note how it ended (it is done): the next use of the name has the same key."""
        try:
            self.wait(0.0)
        except PhubError as error:
            self._error = error


class PboxBackend(Backend):
    """See `Backend`.

    Attributes:
        server_pids: processes of the PBox or of its shards, for measurements on their hosts.
    """

    def __init__(
        self, name: str, context: Context, connection: Connection, server: LocalServer | None
    ) -> None:
        """`server`: one that this rank has started, which ends with the backend."""
        self.name, self.context = name, context
        self.connection = connection
        self.server_pids = connection.server_pids
        self._server = server
        self._core = load()
        self._lock = threading.Lock()
        self._tables: dict[str, AdHoc] = {}
        self._chunk_bytes = min(context.config.chunk_bytes, connection.chunk_bytes)

    def submit(self, operation: Operation) -> Work:
        spec = self._spec(operation)
        buffer = operation.buffer
        memory = buffer.bytes if buffer is not None else np.zeros(1, np.uint8)
        send = operation.kind is not Kind.BROADCAST or operation.root == self.context.rank
        with self._lock:
            known = self._known(spec.name)
            table = known if known is not None and known.spec == spec else AdHoc(spec)
            self._tables[spec.name] = table
            flags = 0 if send else self._core.NO_GRAD
            work = table.work = PboxWork(self.connection, table, operation, memory, flags)
            if table is known:
                work.start()
        if table is not known:
            self._announce(table, known.ids if known is not None else None)
        return work

    def _known(self, name: str) -> AdHoc | None:
        """The table that a name has meant so far; its last use is over."""
        table = self._tables.get(name)
        if table is None:
            return None
        if not table.work.done():
            raise DuplicateName(
                f"[pbox] rank {self.context.rank} submitted {name!r} again before its last "
                "use was finished; wait for it, or give the two different names"
            )
        table.work.settle()
        return table

    def _announce(self, table: AdHoc, instead_of: TableIds | None) -> None:
        """Register a table. Without the lock, since sending takes long when the PBox does."""
        told = functools.partial(self._on_registered, table)
        try:
            self.connection.register(table.spec, told, instead_of)
        except PhubError as error:
            told(None, error)
            raise

    def _on_registered(
        self, table: AdHoc, registered: RegisteredTable | None, error: PhubError | None
    ) -> None:
        with self._lock:
            if registered is not None:
                table.ids = registered.ids
                table.work.start()
            elif self._tables.get(table.spec.name) is table:
                table.error = error
                del self._tables[table.spec.name]
        table.registered.set()

    def _spec(self, operation: Operation) -> TableSpec:
        check(operation, self.context.size, self.name)
        buffer, op = operation.buffer, operation.op
        if buffer is None:  # a barrier
            buffer = Buffer(np.zeros(1, np.uint8), DType.UINT8)
        prescale, postscale = operation.prescale, operation.postscale
        if operation.kind is not Kind.ALLREDUCE:
            op, prescale, postscale = ReduceOp.SUM, 1.0, 1.0  # of the one contribution that counts
        # The kind and root are part of the description that is compared between ranks.
        label = f"{operation.kind.value} root {operation.root}"
        key = Key(f"{operation.name} ({label})", (buffer.count,), buffer.dtype)
        return TableSpec(
            operation.name, (key,), op, prescale, postscale, self._chunk_bytes, model=False
        )

    def open_exchange(self, spec: ExchangeSpec) -> Exchange:
        return PboxExchange(self.connection, spec, self._chunk_bytes, self.name)

    def close(self) -> None:
        self.connection.close()
        if self._server is not None:
            self._server.stop()
