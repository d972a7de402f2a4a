"""Numbers whose sum over the ranks is known exactly, for checking an exchange without tolerance.

Element i of rank r in iteration t is a small integer that depends on all three, so a result that
is stale, belongs to another place or lacks a rank is seen. The pattern repeats after `PERIOD`
elements, a prime: no two chunks, buckets or keys of one model (all multiples of 64 bytes) that
are less than PERIOD chunks apart hold the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from phub_collective.backends.base import DType
from phub_collective.errors import ConfigError

PERIOD = 65521

# Every integer up to this magnitude is exact in the type (16-bit floats are summed in fp32, but
# the result is rounded to the type).
_EXACT = {
    DType.FLOAT32: 1 << 24,
    DType.FLOAT64: 1 << 53,
    DType.FLOAT16: 1 << 11,
    DType.BFLOAT16: 1 << 8,
    DType.INT32: (1 << 31) - 1,
    DType.INT64: (1 << 63) - 1,
    DType.UINT8: 255,
    DType.INT8: 127,
}
_LARGEST = 512  # small, so that sums over iterations (an optimizer's momentum) stay exact too


class Pattern:
    """The numbers of one job; rows are int64, one entry per element of the period.

    Attributes:
        values: numbers are below it.
    """

    def __init__(self, ranks: int, dtype: DType, count: int) -> None:
        """`count`: elements of the longest array that is filled (rows are not made longer)."""
        self.ranks, self.dtype = ranks, dtype
        if dtype not in _EXACT or _EXACT[dtype] // ranks < 2:
            raise ConfigError(
                f"[bench] no exact pattern for {ranks} ranks of {dtype.name.lower()}; "
                "use another --dtype"
            )
        self.values = min(_LARGEST, _EXACT[dtype] // ranks)
        self._index = np.arange(max(1, min(count, PERIOD)), dtype=np.uint64)

    def row(self, rank: int, iteration: int) -> np.ndarray:
        """What `rank` contributes in `iteration`: integers in [0, 512) or a smaller range."""
        seed = np.uint64(
            (iteration + 1) * 0x9E3779B97F4A7C15 + (rank + 1) * 0xD1B54A32D192ED03
            & 0xFFFFFFFFFFFFFFFF
        )
        mixed = self._index * np.uint64(0xBF58476D1CE4E5B9) + seed
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(32)
        return (mixed % np.uint64(self.values)).astype(np.int64)

    def total(self, iteration: int) -> np.ndarray:
        """The sum over all ranks in `iteration`."""
        return sum(
            (self.row(rank, iteration) for rank in range(self.ranks)),
            np.zeros(self._index.size, np.int64),
        )

    def encode(self, row: np.ndarray) -> np.ndarray:
        """`row` in the pattern's element type (bfloat16 as uint16).

        Raises:
            ConfigError: a number is not exact in that type (too many iterations).
        """
        if int(np.abs(row).max(initial=0)) > _EXACT[self.dtype]:
            raise ConfigError(
                f"[bench] numbers outgrew {self.dtype.name.lower()}; use fewer --iterations"
            )
        if self.dtype is DType.BFLOAT16:
            return (row.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return row.astype(self.dtype.name.lower())


def _blocks(begin: int, count: int, period: int) -> Iterator[tuple[slice, slice]]:
    """Cut `count` elements that start at element `begin` of the pattern into pieces within one
    period: (where in the array, where in the row)."""
    done = 0
    while done < count:
        phase = (begin + done) % period
        length = min(period - phase, count - done)
        yield slice(done, done + length), slice(phase, phase + length)
        done += length


def fill(array: np.ndarray, encoded: np.ndarray, begin: int = 0) -> None:
    """Write the encoded row into a 1-D array whose first element is element `begin`."""
    for here, there in _blocks(begin, array.size, encoded.size):
        array[here] = encoded[there]


def wrong(array: np.ndarray, encoded: np.ndarray, begin: int = 0) -> int:
    """Number of elements of `array` that differ from the encoded row."""
    return sum(
        int(np.count_nonzero(array[here] != encoded[there]))
        for here, there in _blocks(begin, array.size, encoded.size)
    )
