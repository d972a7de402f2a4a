"""Collectives between the workers themselves: what ring and halving_doubling share.

A `MeshBackend` connects every rank with every other and gives each operation, with its plan from
schedule.py, to the native executor (native/mesh.h), which moves and reduces the bytes.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from phub_collective.backends import schedule
from phub_collective.backends.base import (
    Backend,
    Buffer,
    Context,
    DType,
    Kind,
    Operation,
    Work,
)
from phub_collective.backends.mesh_lanes import connect_all
from phub_collective.backends.native import load
from phub_collective.backends.operations import check
from phub_collective.backends.waiting import Missing, Waiter
from phub_collective.errors import ConfigError

log = logging.getLogger(__name__)

Allreduce = Callable[[int, int, int], list[schedule.Step]]  # rank, size, count

FRAME_BYTES = 128 << 10
RING_BYTES = 1 << 20
PART_BYTES = 1 << 20
WINDOW = 4  # parts of one operation in flight
ALIGNMENT = 16  # elements; pieces of parts begin at multiples of it
SWEEP_AT = 64  # works that are kept before those that are done are dropped
MAX_NAMES = 1 << 20  # kMaxNames in native/mesh.cpp: other ranks take no more
CLOSE_S = 5.0

KINDS = {Kind.ALLREDUCE: 0, Kind.BROADCAST: 1, Kind.BARRIER: 2}  # CollectiveKind in operation.h


class MeshWork:
    """See `Work`. Keeps the buffer alive while lanes use it."""

    def __init__(self, backend: MeshBackend, name: str, native: Any, buffer: Buffer) -> None:
        self._backend, self._name, self._native, self._buffer = backend, name, native, buffer

    def done(self) -> bool:
        return bool(self._backend.native.done(self._native))

    def wait(self, timeout: float | None = None) -> None:
        native, operation = self._backend.native, self._native

        def step(seconds: float) -> bool:
            return bool(native.wait(operation, seconds))

        def missing(_: float) -> Missing:
            return Missing(tuple(native.missing(operation)))

        self._backend.waiter.wait(step, repr(self._name), missing, timeout)


class MeshBackend(Backend):
    """See `Backend`.

    Attributes:
        native: the executor, for counters.
        waiter: how this rank waits.
    """

    def __init__(self, context: Context, name: str, allreduce: Allreduce) -> None:
        self.context, self.name = context, name
        self.waiter = Waiter(name, context.rank, context.config)
        self._allreduce = allreduce
        self._core = load()
        self._engine = self._core.Engine(context.config.spin_us)
        self.native = self._core.Mesh(self._engine, context.rank, context.size, FRAME_BYTES, WINDOW)
        self._plan = functools.lru_cache(1024)(self._make_plan)
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._works: list[MeshWork] = []  # that may be in flight
        self._sweep_at = SWEEP_AT
        self._connect()

    def _connect(self) -> None:
        config = self.context.config
        options = self._core.TcpOptions(
            config.congestion, config.socket_buffer, max(1, int(config.timeout))
        )
        bell = self._engine.bell()
        for link in connect_all(self.context, self.name, self._core, bell, RING_BYTES):
            fd, carrier = link.sock.detach(), "shm"
            if link.memory < 0:
                self.native.attach_tcp(link.peer, fd, options, FRAME_BYTES)
                carrier = f"tcp ({self._core.congestion_control(fd)})"
            else:
                self.native.attach_shm(
                    link.peer, fd, link.memory, link.bell, link.first, FRAME_BYTES
                )
            log.info(
                "[%s] rank %d: %s to rank %d", self.name, self.context.rank, carrier, link.peer
            )

    def submit(self, operation: Operation) -> Work:
        check(operation, self.context.size, self.name)
        self._note(operation.name)
        buffer = operation.buffer
        if buffer is None or operation.kind is Kind.BARRIER:
            buffer = Buffer(np.zeros(1, np.uint8), DType.UINT8)
        part = part_count(buffer.count, buffer.dtype, self.context.size)
        last = buffer.count - (max(1, -(-buffer.count // part)) - 1) * part
        spec = self._core.MeshSpec(
            kind=KINDS[operation.kind],
            dtype=int(buffer.dtype),
            op=int(operation.op),
            root=operation.root,
            count=buffer.count,
            part_count=part,
            algorithm=fingerprint(self.name),
            prescale=operation.prescale,
            postscale=operation.postscale,
        )
        whole = self._plan(operation.kind, operation.root, min(part, buffer.count))
        tail = self._plan(operation.kind, operation.root, last)
        native = self.native.submit(operation.name, spec, buffer.bytes, whole, tail)
        work = MeshWork(self, operation.name, native, buffer)
        self._keep(work)
        return work

    def _note(self, name: str) -> None:
        """Names are never forgotten; the one too many is refused here, not by the other ranks."""
        with self._lock:
            if len(self._names) >= MAX_NAMES and name not in self._names:
                raise ConfigError(
                    f"[{self.name}] rank {self.context.rank} submitted {name!r} after {MAX_NAMES} "
                    "other names; give an operation the same name each time"
                )
            self._names.add(name)

    def _make_plan(self, kind: Kind, root: int, count: int) -> Any:
        rank, size = self.context.rank, self.context.size
        if kind is Kind.BROADCAST:
            steps = schedule.broadcast(rank, size, count, root)
        elif kind is Kind.BARRIER:  # the fewest rounds
            steps = schedule.halving_doubling(rank, size, count)
        else:
            steps = self._allreduce(rank, size, count)
        tuples = [(s.send_to, *s.send, s.recv_from, *s.recv, s.reduce) for s in steps]
        return self._core.Plan(count, tuples, kind is not Kind.BROADCAST)

    def _keep(self, work: MeshWork) -> None:
        """Keep `work` until it is done, also when the caller drops it."""
        with self._lock:
            if len(self._works) >= self._sweep_at:
                self._works = [one for one in self._works if not one.done()]
                # Twice what is left, so that many in flight are not all asked at every submit.
                self._sweep_at = max(SWEEP_AT, 2 * len(self._works))
            self._works.append(work)

    def close(self) -> None:
        self.native.close(CLOSE_S)
        self._works.clear()


def part_count(count: int, dtype: DType, size: int) -> int:
    """Elements of a part: at most about PART_BYTES, all parts of nearly the same size, and pieces
    for `size` ranks aligned."""
    parts = max(1, -(-count * dtype.itemsize // PART_BYTES))
    unit = ALIGNMENT * size
    return max(1, -(-count // (parts * unit))) * unit


def fingerprint(name: str) -> int:
    """64 bits that tell algorithms apart."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
