"""The exchange of a model as MXNet does it: each key is pushed as soon as autograd has it, in
pieces of at most 4 MiB, and its new value pulled as soon as the server has it.

MXNet pulls in a message of its own, after the push is acknowledged; here a push asks for the
answer, as in ps-lite's ZPushPull, which saves a round trip for each key.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from phub_collective.backends.base import (
    SGD,
    Context,
    Counters,
    Exchange,
    ExchangeSpec,
    Hyper,
    KeyState,
    ReduceOp,
    layout,
)
from phub_collective.backends.buckets import compare_tables
from phub_collective.backends.compression import NO_COMPRESSION
from phub_collective.backends.waiting import Missing, Waiter
from phub_collective.backends.zmq_ps.client import Client
from phub_collective.backends.zmq_ps.latch import Latch
from phub_collective.backends.zmq_ps.pieces import MODELS, of_model
from phub_collective.backends.zmq_ps.wire import Flag, Header, MessageKind, pack_hyper
from phub_collective.errors import ConfigError


class ZmqExchange(Exchange):
    """See `Exchange`."""

    backend = "zmq_ps"

    def __init__(
        self,
        context: Context,
        client: Client,
        waiter: Waiter,
        spec: ExchangeSpec,
        table: int,
        piece_bytes: int,
    ) -> None:
        """`table`: rank 0's choice counts; unique among the exchanges of the job."""
        _check(spec)
        compare_tables(context, spec)
        tables = context.rendezvous.all_gather(
            f"zmq_ps/{spec.name}", str(table).encode(), context.config.stall_timeout
        )
        self._context, self._client, self._waiter, self._spec = context, client, waiter, spec
        self._table = MODELS + int(tables[0])
        self._pieces = of_model(spec.keys, piece_bytes, client.servers)
        self._optimize = spec.place == "server"
        self.offsets, size = layout(spec.keys)
        self.arena = self.result = np.zeros(size, np.uint8)
        self.counters = Counters()
        self._latches: list[Latch | None] = [None] * len(spec.keys)
        self._exchanges = 0  # steps, and initializations
        self._groups: list[Hyper] = []
        self._closed = False

    def initialize(self, root: int = 0, state: Sequence[KeyState] | None = None) -> None:
        if state is not None:
            raise ConfigError("[zmq_ps] no state is moved to this baseline; use the pbox backend")
        if not 0 <= root < self._context.size:
            raise ConfigError(f"[zmq_ps] root {root} is no rank of 0..{self._context.size - 1}")
        flags = Flag.ADOPT if root == self._context.rank else Flag.ADOPT | Flag.EMPTY
        for key in range(len(self._spec.keys)):
            self._start(key, flags)
        self._finish()

    def push(self, key: int, no_grad: bool = False) -> None:
        self._start(key, Flag.EMPTY if no_grad else Flag(0))
        if not no_grad:
            self.counters.pushed += self._spec.keys[key].nbytes

    def _start(self, key: int, flags: Flag) -> None:
        entry, spec = self._spec.keys[key], self._spec
        if self._latches[key] is not None:
            raise ConfigError(f"[zmq_ps] key {entry.name!r} was pushed twice in one step")
        header = Header(
            MessageKind.PUSH,
            entry.dtype,
            spec.op,
            flags | Flag.OPTIMIZE if self._optimize else flags,
            entry.group,
            self._table,
            0,
            self._exchanges,
            0,
            spec.prescale,
            spec.postscale,
        )
        if flags & Flag.ADOPT:  # values, which are not scaled
            header = header._replace(op=ReduceOp.SUM, prescale=1.0, postscale=1.0)
        latch = self._latches[key] = Latch(len(self._pieces[key]))
        for piece in self._pieces[key]:
            part = self.arena[piece.begin : piece.end]
            self._client.push(
                piece.server,
                header._replace(piece=piece.number, nbytes=part.size),
                None if flags & Flag.EMPTY else part,
                part,
                latch,
            )

    def wait(self, timeout: float | None = None) -> None:
        keys = self._spec.keys
        missing = [keys[i].name for i, latch in enumerate(self._latches) if latch is None]
        if missing:
            raise ConfigError(f"[zmq_ps] wait() before these keys were pushed: {missing[:3]}")
        self._finish(timeout)
        self.counters.steps += 1

    def _finish(self, timeout: float | None = None) -> None:
        begin = time.monotonic()
        for key in range(len(self._latches)):
            # The timeout is that of all keys together.
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begin))
            self.wait_key(key, left)
        self._latches = [None] * len(self._latches)
        self._exchanges += 1

    def wait_key(self, key: int, timeout: float | None = None) -> None:
        latch = self._latches[key]
        if latch is not None:
            if not latch.wait(0.0):
                what = f"key {self._spec.keys[key].name!r} of {self._spec.name!r}"
                self._waiter.wait(latch.wait, what, lambda s: self._missing(key, s), timeout)
            latch.check()

    def _missing(self, key: int, seconds: float) -> Missing:
        """Whom the servers wait for with a key."""
        deadline = time.monotonic() + seconds
        ranks: set[int] = set()
        for piece in self._pieces[key]:
            left = max(0.0, deadline - time.monotonic())
            ranks |= set(self._client.missing(piece.server, self._table, piece.number, left))
            if ranks:
                break
        return Missing(tuple(sorted(ranks - {self._context.rank})))

    def set_hyper(self, groups: Sequence[Hyper]) -> None:
        if not self._optimize:
            return super().set_hyper(groups)
        expected = 1 + max((key.group for key in self._spec.keys), default=0)
        if len(groups) != expected:
            raise ConfigError(f"[zmq_ps] expected {expected} parameter groups, got {len(groups)}")
        if any(latch is not None for latch in self._latches):
            raise ConfigError(
                "[zmq_ps] hyperparameters are read at a step's first push; set them before it"
            )
        for index, hyper in enumerate(groups):
            if not isinstance(hyper, SGD):
                raise ConfigError(f"[zmq_ps] no {hyper} in this baseline; use the pbox backend")
            if index < len(self._groups) and self._groups[index] == hyper:
                continue
            header = Header(MessageKind.HYPER, group=index, table=self._table)
            for server in range(self._client.servers):
                self._client.tell(server, header, pack_hyper(hyper))
        self._groups = [dataclasses.replace(hyper) for hyper in groups]
        return None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for server in range(self._client.servers):
                self._client.tell(server, Header(MessageKind.DROP, table=self._table))


def _check(spec: ExchangeSpec) -> None:
    if spec.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ConfigError(f"[zmq_ps] gradients are summed or averaged, not {spec.op.name}")
    if spec.place not in ("worker", "server"):
        raise ConfigError(f"[zmq_ps] place={spec.place!r}; expected 'worker' or 'server'")
    for name, wanted in (
        ("shared_model", spec.shared_model),
        ("deterministic", spec.deterministic),
        ("staleness", spec.staleness != 0),
        ("compression", spec.compression != NO_COMPRESSION),
    ):
        if wanted:
            raise ConfigError(f"[zmq_ps] no {name} in this baseline; use the pbox backend")
    if spec.place == "server":
        for key in spec.keys:
            if not key.dtype.is_floating:
                raise ConfigError(
                    f"[zmq_ps] no optimizer for {key.name!r} of {key.dtype.name.lower()}"
                )
