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
from phub_collective.backends.base import SGD, Adam, DType, ReduceOp
from phub_collective.kernels import reference

MAX_ARRAYS = 8
MAX_STATES = 2
KERNELS = ("reduce", "sgd", "adam")
HUGE_PAGE = 2 << 20  # bytes
SLICE = 8  # chunks between two looks at the clock
WARM = 4  # the first 1/WARM of a walk is not counted: caches still write back what was before
CHECK_BYTES = 4 << 20  # compared at once, so that NumPy's temporaries stay in the cache


@dataclass(frozen=True)
class Case:
    """One walk: "read", "copy", "triad", or "reduce", "sgd" and "adam" of `arrays` gradients."""

    walk: str
    arrays: int
    threads: int
    streaming: bool

    @property
    def is_kernel(self) -> bool:
        return self.walk in KERNELS

    @property
    def states(self) -> int:
        """Arrays of the optimizer's state."""
        return {"sgd": 1, "adam": 2}.get(self.walk, 0)

    @property
    def loads(self) -> int:
        """Bytes read per byte of an array, lines that are fetched to be written included. An
        optimizer reads weights and state, and writes the state in place."""
        allocates = 0 if self.walk == "read" or self.streaming else 1
        weights = 1 if self.states else 0
        return self.arrays + weights + self.states + allocates

    @property
    def stores(self) -> int:
        """Bytes written per byte of an array."""
        return 0 if self.walk == "read" else 1 + self.states


class Arrays:
    """The memory that all walks share: gradients, weights, optimizer state and the output."""

    def __init__(self, nbytes: int, dtype: DType, huge_pages: bool) -> None:
        """`nbytes` of each array; `huge_pages`: ask the kernel for them."""
        self.nbytes, self.dtype = nbytes, dtype
        self.kernels: Any = native.load().kernels
        made = [self._allocate(huge_pages) for _ in range(MAX_ARRAYS + MAX_STATES + 2)]
        self.gradients, others = made[:MAX_ARRAYS], made[MAX_ARRAYS:]
        self.out, self.weights, *self.state = others
        for index, array in enumerate([*self.gradients, self.weights]):
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
        slices: list[list[float]] = self.kernels.walk(
            getattr(self.kernels.Walk, case.walk.upper()),
            self.dtype,
            self.gradients[: case.arrays],
            self.out,
            self.weights,
            self.state[: case.states],
            chunk_bytes,
            SLICE,
            case.threads,
            case.streaming,
        )
        return slices

    def wrong(self, case: Case, chunk_bytes: int) -> int:
        """Walk once more, from known numbers; how many numbers differ from the NumPy twin's."""
        self.out[:] = 0xFF
        before = [self.known_state(index) for index in range(case.states)]
        self._walk(case, chunk_bytes)
        walked = SLICE * chunk_bytes * case.threads
        end = self.nbytes // walked * walked
        return sum(self._wrong_in(case, part, before) for part in parts(end))

    def known_state(self, index: int) -> np.ndarray:
        """Fill an array of state with numbers that are not negative; a copy of it."""
        self._fill(self.state[index], MAX_ARRAYS + 1 + index)
        numbers = self.state[index].view(self.dtype.stored)
        np.abs(numbers, out=numbers)
        return self.state[index].copy()

    def _wrong_in(self, case: Case, part: slice, before: list[np.ndarray]) -> int:
        stored = self.dtype.stored
        gradients = [array[part].view(stored) for array in self.gradients[: case.arrays]]
        total = reference.accumulate(self.dtype, ReduceOp.SUM, gradients)
        out = self.out[part].view(stored)
        scale = 1 / case.arrays
        if case.walk == "reduce":
            average = reference.Scale(post=scale)
            return differences(out, reference.finish(self.dtype, ReduceOp.SUM, total, average))
        weights = self.weights[part].view(stored)
        old = [array[part].view(stored) for array in before]
        if case.walk == "sgd":
            rule = walk_sgd(self.kernels.WALK_SGD)
            new_weights, momentum = reference.sgd(rule, weights, old[0], total, scale)
            assert momentum is not None
            new = [momentum]
        else:
            adam, taken = walk_adam(self.kernels.WALK_ADAM), self.kernels.WALK_TAKEN
            new_weights, new = reference.adam(adam, weights, old, total, scale, taken)
        found = [array[part].view(stored) for array in self.state]
        wrong = sum(differences(f, n) for f, n in zip(found, new, strict=False))
        return wrong + differences(out, new_weights)


def walk_sgd(params: Any) -> SGD:
    """The native walk's SgdParams."""
    return SGD(
        params.lr, params.momentum, params.dampening, params.weight_decay, params.nesterov,
        params.maximize,
    )  # fmt: skip


def walk_adam(params: Any) -> Adam:
    """The native walk's AdamParams."""
    return Adam(
        params.lr, (params.beta1, params.beta2), params.eps, params.weight_decay, params.amsgrad,
        params.maximize, params.decoupled,
    )  # fmt: skip


def parts(end: int) -> Iterator[slice]:
    """Bytes [0, end) in slices of CHECK_BYTES."""
    for begin in range(0, end, CHECK_BYTES):
        yield slice(begin, min(begin + CHECK_BYTES, end))


def differences(actual: np.ndarray, expected: np.ndarray) -> int:
    """How many elements are not the same; NaN differs from everything."""
    return int(np.count_nonzero(actual != expected))
