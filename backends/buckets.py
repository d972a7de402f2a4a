"""The exchange of a model over any backend's `submit`: gradients grouped into buckets, and cast to
16 bits where that is asked for."""

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
    ReduceOp,
    Work,
    layout,
)
from phub_collective.backends.compression import Packing
from phub_collective.backends.native import load
from phub_collective.backends.operations import check_compression, first_difference
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
    widened: bool = False  # its result stands in the arena


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


# The types in which a cast is reduced.
CASTS = {Packing.FP16: DType.FLOAT16, Packing.BF16: DType.BFLOAT16}


class Cast:
    """Half as large a copy of an arena of float32, which is reduced instead of it."""

    def __init__(self, dtype: DType, arena: np.ndarray) -> None:
        self._dtype, self._arena = dtype, arena
        self._small = np.zeros(arena.size // 2, np.uint8)
        self._kernels = load().kernels

    def narrow(self, begin: int, end: int) -> Buffer:
        """Bytes [begin, end) of the arena, cast."""
        small = self._small[begin // 2 : end // 2]
        self._kernels.finish(self._dtype, ReduceOp.SUM, small, self._arena[begin:end])
        return Buffer(small, self._dtype)

    def widen(self, begin: int, end: int) -> None:
        """Bring what stands in the copy into bytes [begin, end) of the arena."""
        small = self._small[begin // 2 : end // 2]
        self._kernels.fold(self._dtype, ReduceOp.SUM, self._arena[begin:end], small, True)


class BucketExchange(Exchange):
    """See `Exchange`. A bucket is submitted when its last key was pushed."""

    def __init__(self, backend: Backend, context: Context, spec: ExchangeSpec) -> None:
        if spec.place != "worker" or spec.shared_model or spec.staleness != 0:
            raise ConfigError(
                f"[{backend.name}] cannot run the optimizer (place={spec.place!r}, "
                f"shared_model={spec.shared_model}, staleness={spec.staleness}); use the pbox "
                "backend or place='worker'"
            )
        check_compression(spec, backend.name)
        if spec.compression.has_residual:
            raise ConfigError(
                f"[{backend.name}] compression {spec.compression}: the sum of such forms has not "
                "their form; use the pbox backend, which adds them up, or fp16 or bf16"
            )
        self._backend, self._spec = backend, spec
        self.backend = backend.name
        self.offsets, size = layout(spec.keys)
        self.arena = self.result = np.zeros(size, np.uint8)
        self.counters = Counters()
        dtype = CASTS.get(spec.compression.packing)
        self._cast = None if dtype is None else Cast(dtype, self.arena)
        ends = [o + key.nbytes for o, key in zip(self.offsets, spec.keys, strict=True)]
        self._buckets = plan([k.dtype for k in spec.keys], self.offsets, ends, spec.bucket_bytes)
        self._bucket_of = {key: b for b in self._buckets for key in b.keys}
        compare_tables(context, spec)
        self._begin_step()

    def _begin_step(self) -> None:
        for bucket in self._buckets:
            bucket.missing, bucket.work = set(bucket.keys), None
            bucket.widened = False

    def _operation(self, bucket: Bucket, kind: Kind, root: int = 0) -> Operation:
        spec = self._spec
        if self._cast is not None and kind is Kind.ALLREDUCE:
            buffer = self._cast.narrow(bucket.begin, bucket.end)
        else:
            buffer = Buffer(self.arena[bucket.begin : bucket.end], bucket.dtype)
        return Operation(
            kind,
            f"{spec.name}/{kind.value}.{bucket.begin}",
            buffer,
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
            operation = self._operation(bucket, Kind.ALLREDUCE)
            assert operation.buffer is not None
            bucket.work = self._backend.submit(operation)
            self.counters.pushed += operation.buffer.bytes.size

    def wait_key(self, key: int, timeout: float | None = None) -> None:
        self._wait_bucket(self._bucket_of[key], timeout)

    def _wait_bucket(self, bucket: Bucket, timeout: float | None) -> None:
        if bucket.work is None:
            return
        bucket.work.wait(timeout)
        if self._cast is not None and not bucket.widened:
            self._cast.widen(bucket.begin, bucket.end)
            bucket.widened = True

    def wait(self, timeout: float | None = None) -> None:
        for bucket in self._buckets:
            if bucket.work is None:
                names = [self._spec.keys[k].name for k in sorted(bucket.missing)][:3]
                raise ConfigError(
                    f"[{self._backend.name}] wait() before these keys were pushed: {names}"
                )
        begin = time.monotonic()
        for bucket in self._buckets:
            # The timeout is that of all buckets together.
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begin))
            self._wait_bucket(bucket, left)
        self.counters.steps += 1
        self._begin_step()

    def close(self) -> None:
        self._buckets.clear()


def describe(spec: ExchangeSpec) -> list[str]:
    """One comparable line per fact that all ranks must share."""
    head = (
        f"op {spec.op.name.lower()}, place {spec.place}, shared_model {spec.shared_model}, "
        f"prescale {spec.prescale}, postscale {spec.postscale}, bucket_bytes {spec.bucket_bytes}, "
        f"compression {spec.compression}"
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
