"""Inputs whose reduction is exact in every element type, and what must come out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from phub_collective.backends import bfloat16
from phub_collective.backends.base import Buffer, DType, Kind, Operation, ReduceOp

LARGE = 300_001  # elements: several chunks, pieces and segments of every backend


@dataclass(frozen=True)
class Case:
    """One allreduce."""

    dtype: DType
    op: ReduceOp
    count: int
    prescale: float = 1.0
    postscale: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.dtype.name}.{self.op.name}.{self.count}.{self.prescale}"

    def operation(self, buffer: Buffer) -> Operation:
        return Operation(
            Kind.ALLREDUCE,
            self.name,
            buffer,
            self.op,
            prescale=self.prescale,
            postscale=self.postscale,
        )


def grid(size: int) -> Iterator[Case]:
    """Every type with every reduction; counts and scales take turns over them."""
    counts = itertools.cycle([1, size - 1, 257, 0, size, size + 1, 4 * size, 1000])
    for dtype, op in itertools.product(DType, ReduceOp):
        if dtype is DType.BOOL and op is ReduceOp.AVERAGE:
            continue
        yield Case(dtype, op, next(counts))
        if dtype.is_floating:
            yield Case(dtype, op, 33, prescale=0.5, postscale=4.0)
    yield Case(DType.FLOAT32, ReduceOp.SUM, LARGE)
    yield Case(DType.BFLOAT16, ReduceOp.AVERAGE, LARGE)
    yield Case(DType.UINT8, ReduceOp.MAX, LARGE)


def values(case: Case, rank: int, size: int, step: int = 0) -> np.ndarray:
    """What a rank contributes, as int64: small enough that no type rounds or overflows."""
    at = np.arange(case.count, dtype=np.int64) + 3 * rank + 7 * step
    if case.op is ReduceOp.PRODUCT:
        return 1 + at % 2 if rank < 3 else np.ones_like(at)
    if case.op is ReduceOp.AVERAGE and case.dtype.is_floating:
        return at % 5 * size  # so that the average is whole
    if case.dtype in (DType.UINT8, DType.BOOL):
        return at % 5 if case.dtype is DType.UINT8 else at % 3 // 2
    return at % 9 - 4


@lru_cache(256)  # all ranks ask for the same
def expected(case: Case, size: int, step: int = 0) -> np.ndarray:
    """What every rank must hold afterwards, as the bytes of the case's type."""
    inputs = np.array([values(case, rank, size, step) for rank in range(size)])
    exact = inputs.reshape(size, case.count).astype(np.float64) * case.prescale
    if case.op is ReduceOp.SUM:
        result = np.minimum(exact.sum(0), 1) if case.dtype is DType.BOOL else exact.sum(0)
    elif case.op is ReduceOp.AVERAGE:
        mean = exact.sum(0) / size
        result = mean if case.dtype.is_floating else np.floor(mean)
    elif case.op is ReduceOp.PRODUCT:
        result = exact.prod(0)
    else:
        result = exact.min(0) if case.op is ReduceOp.MIN else exact.max(0)
    return encode(result * case.postscale, case.dtype)


def wrong_elements(case: Case, buffer: Buffer, size: int, step: int = 0) -> np.ndarray:
    """Where a result differs from what it must be. An average of fp32 or fp64 may multiply by
    1/N, which is not exact for every N: there, one unit in the last place is allowed."""
    wanted, got = expected(case, size, step), buffer.bytes
    wide = case.dtype in (DType.FLOAT32, DType.FLOAT64)
    if case.op is ReduceOp.AVERAGE and wide and size & (size - 1):
        numbers = wanted.view(case.dtype.stored)
        return np.flatnonzero(np.abs(buffer.array() - numbers) > np.spacing(np.abs(numbers)))
    return np.flatnonzero(got != wanted)


def buffer_of(case: Case, rank: int, size: int, step: int = 0) -> Buffer:
    return Buffer(encode(values(case, rank, size, step), case.dtype), case.dtype)


def encode(numbers: np.ndarray, dtype: DType) -> np.ndarray:
    """Numbers as the bytes of an element type; they must be exact in it."""
    if dtype is DType.BFLOAT16:
        bits = bfloat16.narrow(numbers.astype(np.float32))
        assert np.array_equal(bfloat16.widen(bits), numbers), "the case is not exact in bfloat16"
        return bits.view(np.uint8)
    typed = numbers.astype(dtype.stored)
    assert np.array_equal(typed, numbers), f"the case is not exact in {dtype.name}"
    return typed.view(np.uint8)
