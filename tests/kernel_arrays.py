"""Arrays for tests of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from phub_collective.backends.base import DType
from phub_collective.kernels import reference

_core = pytest.importorskip("phub_collective.backends.native._core")
native = _core.kernels

ISAS = [isa for isa in native.Isa.__members__.values() if native.has_isa(isa)]
ACCUMULATOR = {t: np.float32 if t.itemsize == 2 else t.stored for t in DType} | {
    DType.BOOL: np.uint8
}
COUNTS = (0, 1, 15, 16, 17, 63, 64, 65, 1000, 3001)
FLOATS = [t for t in DType if t.is_floating]

each_isa = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name.lower())
each_dtype = pytest.mark.parametrize("dtype", DType, ids=lambda t: t.name.lower())
each_float = pytest.mark.parametrize("dtype", FLOATS, ids=lambda t: t.name.lower())


class Guarded:
    """An array at an odd place, with bytes around it that nobody may touch."""

    def __init__(self, content: np.ndarray, offset: int) -> None:
        self._offset, self._size = offset, content.nbytes
        self._memory = np.full(offset + content.nbytes + 64, 0xA5, np.uint8)
        self.dtype = content.dtype
        self.bytes[:] = np.frombuffer(content.tobytes(), np.uint8)

    @property
    def bytes(self) -> np.ndarray:
        return self._memory[self._offset : self._offset + self._size]

    @property
    def value(self) -> np.ndarray:
        around = np.delete(self._memory, slice(self._offset, self._offset + self._size))
        assert (around == 0xA5).all(), "written outside of the array"
        return np.frombuffer(self.bytes.tobytes(), self.dtype)


def random_array(dtype: DType, count: int, seed: int) -> np.ndarray:
    """Numbers of moderate size, so that sums and products stay finite; for integers any."""
    rng = np.random.default_rng(seed)
    if dtype.is_floating:
        numbers = rng.standard_normal(count)
        wide = numbers.astype(ACCUMULATOR[dtype])
        return reference.narrow(wide, dtype)
    if dtype is DType.BOOL:
        return rng.integers(0, 3, count).astype(np.uint8)  # 2 is true as well
    stored: Any = dtype.stored
    info = np.iinfo(stored)
    return rng.integers(info.min, info.max, count, dtype=stored, endpoint=True)


def random_arrays(dtype: DType, n: int, count: int) -> list[np.ndarray]:
    return [random_array(dtype, count, seed) for seed in range(n)]


def as_bytes(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [array.view(np.uint8) for array in arrays]


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    """Bitwise equal."""
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))
