"""The PBox as a backend: ad-hoc operations and model exchanges through one connection."""

from __future__ import annotations

import functools
import json
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
from phub_collective.backends.pbox.launch import LocalServer, start_server
from phub_collective.backends.pbox.protocol import error_message, new_token, raise_error
from phub_collective.backends.pbox.service import create_service
from phub_collective.errors import ConfigError, DuplicateName, PhubError

MAX_NAMES = 65536  # ad-hoc names of one job; each keeps two answers' memory on the server


@dataclass
class AdHoc:
    """The table of one ad-hoc name, from its first announcement on."""

    spec: TableSpec
    registered: threading.Event = field(default_factory=threading.Event)
    ids: TableIds | None = None
    error: PhubError | None = None
    work: PboxWork | None = None  # the latest use


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

    def start(self) -> None:
        """Push; the table is registered."""
        assert self._table.ids is not None
        try:
            self._connection.client.push(self._table.ids.id, 0, self._flags, self._memory)
        except PhubError as error:
            self._table.error = error

    def done(self) -> bool:
        table = self._table
        if self._finished or table.error is not None:
            return True
        if not table.registered.is_set():
            return False
        assert table.ids is not None
        self._finished = bool(self._connection.client.done(table.ids.id, 0))
        return self._finished

    def wait(self, timeout: float | None = None) -> None:
        table, client = self._table, self._connection.client
        name = self._operation.name
        if not table.registered.is_set():
            self._connection.wait(table.registered.wait, f"all ranks to submit {name!r}", timeout)
        if table.error is not None:
            raise table.error
        ids = table.ids
        assert ids is not None
        if not self._finished or table.work is self:
            self._connection.wait(lambda s: bool(client.wait(ids.id, 0, s)), f"{name!r}", timeout)
        self._finished = True


class PboxBackend(Backend):
    """See `Backend`.

    Attributes:
        server_pid: process of the PBox, for measurements on its host.
    """

    name = "pbox"
    server_optimizer = True

    def __init__(
        self, context: Context, connection: Connection, server: LocalServer | None
    ) -> None:
        self.context = context
        self.connection = connection
        self.server_pid = connection.server_pid
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
            table, known = self._table(spec)
            work = PboxWork(
                self.connection, table, operation, memory, 0 if send else self._core.NO_GRAD
            )
            table.work = work
        if known:
            work.start()
        return work

    def _table(self, spec: TableSpec) -> tuple[AdHoc, bool]:
        """The table of a name, announced now unless it is known with this shape."""
        table = self._tables.get(spec.name)
        if table is not None and table.work is not None and not table.work.done():
            raise DuplicateName(
                f"[pbox] rank {self.context.rank} submitted {spec.name!r} again before its last "
                "use was finished; wait for it, or give the two different names"
            )
        if table is not None and table.error is None and table.spec == spec:
            return table, True
        if table is None and len(self._tables) >= MAX_NAMES:
            raise ConfigError(
                f"[pbox] {MAX_NAMES} different names were used; "
                "give an operation the same name each time"
            )
        known = table.ids if table is not None else None
        table = self._tables[spec.name] = AdHoc(spec)
        self.connection.register(spec, functools.partial(self._on_registered, table), known)
        return table, False

    def _on_registered(
        self, table: AdHoc, registered: RegisteredTable | None, error: PhubError | None
    ) -> None:
        with self._lock:  # submit() has set the work
            table.error = error
            if registered is not None:
                table.ids = registered.ids
                assert table.work is not None
                table.work.start()
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
        return PboxExchange(self.connection, spec, self._chunk_bytes)

    def close(self) -> None:
        self.connection.close()
        if self._server is not None:
            self._server.stop()


def create(context: Context) -> Backend:
    """Connect to the PBox of PHUB_PBOX, or to one that rank 0 starts on its host. Collective."""
    server: LocalServer | None = None
    invitation: dict[str, object] = {}
    if context.rank == 0:
        try:
            server, invitation = _invite(context)
        except PhubError as error:
            invitation = error_message(error)
    value = json.dumps(invitation).encode()
    shared = json.loads(context.rendezvous.all_gather("pbox", value)[0])
    try:
        raise_error(shared)
        connection = Connection(
            shared["address"], shared["job"], shared["token"], context.rank, context.config
        )
    except BaseException:
        if server is not None:
            server.stop()
        raise
    return PboxBackend(context, connection, server)


def _invite(context: Context) -> tuple[LocalServer | None, dict[str, object]]:
    """Rank 0: where the PBox is, and the job on it."""
    config, server = context.config, None
    address = config.pbox
    job = config.job or f"job-{new_token()[:12]}"
    if config.token:
        if not (config.pbox and config.job):
            raise ConfigError("[pbox] PHUB_TOKEN needs PHUB_PBOX and PHUB_JOB too")
        return None, {"address": address, "job": job, "token": config.token}
    if not address:
        server = start_server(config, all_local=context.local_size == context.size)
        address = server.address
    try:
        token = create_service(address, job, context.size, config.chunk_bytes)
    except BaseException:
        if server is not None:
            server.stop()
        raise
    return server, {"address": address, "job": job, "token": token}
