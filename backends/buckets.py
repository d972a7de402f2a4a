"""The exchange of a model over any backend's `submit`: gradients grouped into buckets."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from phub_collective.backends.base import (
    Backend,
    Buffer,
    Context,
    Counters,
    DType,
    Exchange,
    ExchangeSpec,
    KeyState,
    Kind,
    Operation,
    Work,
    layout,
)
from phub_collective.backends.operations import first_difference
from phub_collective.errors import ConfigError, MismatchError


@dataclass
class Bucket:
    """Neighbouring keys of one dtype that are reduced together."""

    keys: list[int]
    begin: int  # bytes in the arena
    end: int
    dtype: DType
    missing: set[int] = field(default_factory=set)
    work: Work | None = None


def plan(
    dtypes: Sequence[DType], offsets: Sequence[int], ends: Sequence[int], limit: int
) -> list[Bucket]:
    """Cut the key table, last key first (the order in which backward makes gradients), into
    buckets of one dtype and at most `limit` bytes (a larger key is a bucket of its own)."""
    buckets: list[Bucket] = []
    for key in reversed(range(len(dtypes))):
        last = buckets[-1] if buckets else None
        if last and last.dtype is dtypes[key] and last.end - offsets[key] <= limit:
            last.keys.append(key)
            last.begin = offsets[key]
        else:
            buckets.append(Bucket([key], offsets[key], ends[key], dtypes[key]))
    return buckets


class BucketExchange(Exchange):
    """See `Exchange`. A bucket is submitted when its last key was pushed."""

    def __init__(self, backend: Backend, context: Context, spec: ExchangeSpec) -> None:
        if spec.place != "worker" or spec.shared_model or spec.staleness != 0:
            raise ConfigError(
                f"[{backend.name}] cannot run the optimizer (place={spec.place!r}, "
                f"shared_model={spec.shared_model}, staleness={spec.staleness}); use the pbox "
                "backend or place='worker'"
            )
        self._backend, self._spec = backend, spec
        self.backend = backend.name
        self.offsets, size = layout(spec.keys)
        self.arena = self.result = np.zeros(size, np.uint8)
        self.counters = Counters()
        ends = [o + key.nbytes for o, key in zip(self.offsets, spec.keys, strict=True)]
        self._buckets = plan([k.dtype for k in spec.keys], self.offsets, ends, spec.bucket_bytes)
        self._bucket_of = {key: b for b in self._buckets for key in b.keys}
        compare_tables(context, spec)
        self._begin_step()

    def _begin_step(self) -> None:
        for bucket in self._buckets:
            bucket.missing, bucket.work = set(bucket.keys), None

    def _operation(self, bucket: Bucket, kind: Kind, root: int = 0) -> Operation:
        spec = self._spec
        return Operation(
            kind,
            f"{spec.name}/{kind.value}.{bucket.begin}",
            Buffer(self.arena[bucket.begin : bucket.end], bucket.dtype),
            spec.op,
            root,
            spec.prescale,
            spec.postscale,
        )

    def initialize(self, root: int = 0, state: Sequence[KeyState] | None = None) -> None:
        if state is not None:
            self.read_state()  # refuses
        works = [
            self._backend.submit(self._operation(b, Kind.BROADCAST, root)) for b in self._buckets
        ]
        for work in works:
            work.wait()

    def push(self, key: int, no_grad: bool = False) -> None:
        bucket = self._bucket_of[key]
        if key not in bucket.missing:
            name = self._spec.keys[key].name
            raise ConfigError(f"[{self._backend.name}] key {name!r} was pushed twice in one step")
        if no_grad:
            begin = self.offsets[key]
            self.arena[begin : begin + self._spec.keys[key].nbytes] = 0
        bucket.missing.discard(key)
        if not bucket.missing:
            bucket.work = self._backend.submit(self._operation(bucket, Kind.ALLREDUCE))
            self.counters.pushed += bucket.end - bucket.begin

    def wait_key(self, key: int, timeout: float | None = None) -> None:
        work = self._bucket_of[key].work
        if work is not None:
            work.wait(timeout)

    def wait(self, timeout: float | None = None) -> None:
        for bucket in self._buckets:
            if bucket.work is None:
                names = [self._spec.keys[k].name for k in sorted(bucket.missing)][:3]
                raise ConfigError(
                    f"[{self._backend.name}] wait() before these keys were pushed: {names}"
                )
        begin = time.monotonic()
        for bucket in self._buckets:
            assert bucket.work is not None
            # The timeout is that of all buckets together.
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begin))
            bucket.work.wait(left)
        self.counters.steps += 1
        self._begin_step()

    def close(self) -> None:
        self._buckets.clear()


def describe(spec: ExchangeSpec) -> list[str]:
    """One comparable line per fact that all ranks must share."""
    head = (
        f"op {spec.op.name.lower()}, place {spec.place}, shared_model {spec.shared_model}, "
        f"prescale {spec.prescale}, postscale {spec.postscale}, bucket_bytes {spec.bucket_bytes}"
    )
    lines = [
        f"{k.name!r} {k.dtype.name.lower()} {k.shape} strides {k.strides or 'C'} group {k.group}"
        for k in spec.keys
    ]
    return [head, *lines]


def compare_tables(context: Context, spec: ExchangeSpec) -> None:
    """Raise MismatchError, naming both sides, unless every rank opened the same exchange."""
    mine = describe(spec)
    tables = context.rendezvous.all_gather(
        f"exchange/{spec.name}", "\n".join(mine).encode(), context.config.stall_timeout
    )
    for rank, table in enumerate(tables):
        theirs = table.decode().split("\n")
        if theirs != mine:
            where = first_difference(mine, theirs, f"rank {context.rank}", f"rank {rank}")
            raise MismatchError(
                f"[exchange {spec.name}] key tables differ at {where}; make them equal"
            )
