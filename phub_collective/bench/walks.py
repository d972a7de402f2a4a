"""Timed walks of the kernels over arrays much larger than the caches, and the machine's own
bandwidths beside them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from phub_collective.backends import native
from phub_collective.backends.base import DType, Hyper, ReduceOp
from phub_collective.kernels import reference

MAX_ARRAYS = 8
HUGE_PAGE = 2 << 20  # bytes
SLICE = 8  # chunks between two looks at the clock
WARM = 4  # the first 1/WARM of a walk is not counted: caches still write back what was before
CHECK_BYTES = 4 << 20  # compared at once, so that NumPy's temporaries stay in the cache


@dataclass(frozen=True)
class Case:
    """One walk: "read", "copy", "triad", or "reduce" and "sgd" of `arrays` gradients."""

    walk: str
    arrays: int
    threads: int
    streaming: bool

    @property
    def is_kernel(self) -> bool:
        return self.walk in ("reduce", "sgd")

    @property
    def loads(self) -> int:
        """Bytes read per byte of an array, lines that are fetched to be written included. SGD
        reads weights and momentum, and writes the momentum in place."""
        allocates = 0 if self.walk == "read" or self.streaming else 1
        state = 2 if self.walk == "sgd" else 0
        return self.arrays + state + allocates

    @property
    def stores(self) -> int:
        """Bytes written per byte of an array."""
        return {"read": 0, "sgd": 2}.get(self.walk, 1)


class Arrays:
    """The memory that all walks share: gradients, weights, momentum and the output."""

    def __init__(self, nbytes: int, dtype: DType, huge_pages: bool) -> None:
        """`nbytes` of each array; `huge_pages`: ask the kernel for them."""
        self.nbytes, self.dtype = nbytes, dtype
        self._core: Any = native.load().kernels
        made = [self._allocate(huge_pages) for _ in range(MAX_ARRAYS + 3)]
        self._gradients, (self._out, self._weights, self._momentum) = made[:-3], made[-3:]
        for index, array in enumerate([*self._gradients, self._weights]):
            self._fill(array, index)

    def _allocate(self, huge_pages: bool) -> np.ndarray:
        """At the start of a huge page, as a server's arrays are, and written once."""
        memory = mmap.mmap(-1, self.nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        begin = -int(whole.__array_interface__["data"][0]) % HUGE_PAGE
        array = whole[begin : begin + self.nbytes]
        array[:] = 0
        return array

    def _fill(self, array: np.ndarray, index: int) -> None:
        numbers = array.view(self.dtype.stored)
        pattern = (np.arange(997) * (index + 3) % 61 - 30) / 8
        numbers[:] = np.resize(pattern, numbers.size)

    def seconds(self, case: Case, chunk_bytes: int) -> float:
        """Time of one walk over whole arrays: that of the median slice, for all of them; so it does
        not count when a thread had to wait for a processor."""
        slices = self._walk(case, chunk_bytes)
        counted = [times[len(times) // WARM :] for times in slices]
        rate = sum(SLICE * chunk_bytes / median(times) for times in counted)
        return self.nbytes / rate

    def _walk(self, case: Case, chunk_bytes: int) -> list[list[float]]:
        slices: list[list[float]] = self._core.walk(
            getattr(self._core.Walk, case.walk.upper()),
            self.dtype,
            self._gradients[: case.arrays],
            self._out,
            self._weights,
            self._momentum,
            chunk_bytes,
            SLICE,
            case.threads,
            case.streaming,
        )
        return slices

    def wrong(self, case: Case, chunk_bytes: int) -> int:
        """Walk once more, from known numbers; how many numbers differ from the NumPy twin's."""
        self._out[:] = 0xFF
        self._fill(self._momentum, MAX_ARRAYS + 1)
        momentum_before = self._momentum.copy()
        self._walk(case, chunk_bytes)
        walked = SLICE * chunk_bytes * case.threads
        end = self.nbytes // walked * walked
        return sum(self._wrong_in(case, part, momentum_before) for part in parts(end))

    def _wrong_in(self, case: Case, part: slice, momentum_before: np.ndarray) -> int:
        stored = self.dtype.stored
        gradients = [array[part].view(stored) for array in self._gradients[: case.arrays]]
        total = reference.accumulate(self.dtype, ReduceOp.SUM, gradients)
        out, momentum = self._out[part].view(stored), self._momentum[part].view(stored)
        if case.walk == "reduce":
            scale = reference.Scale(post=1 / case.arrays)
            return differences(out, reference.finish(self.dtype, ReduceOp.SUM, total, scale))
        new_weights, new_momentum = reference.sgd(
            walk_hyper(self._core.WALK_SGD),
            self._weights[part].view(stored),
            momentum_before[part].view(stored),
            total,
            1 / case.arrays,
        )
        assert new_momentum is not None
        return differences(out, new_weights) + differences(momentum, new_momentum)


def walk_hyper(params: Any) -> Hyper:
    """The native walk's SgdParams as Hyper."""
    return Hyper(
        params.lr, params.momentum, params.dampening, params.weight_decay, params.nesterov,
        params.maximize,
    )  # fmt: skip


def parts(end: int) -> Iterator[slice]:
    """Bytes [0, end) in slices of CHECK_BYTES."""
    for begin in range(0, end, CHECK_BYTES):
        yield slice(begin, min(begin + CHECK_BYTES, end))


def differences(actual: np.ndarray, expected: np.ndarray) -> int:
    """How many elements are not the same; NaN differs from everything."""
    return int(np.count_nonzero(actual != expected))
