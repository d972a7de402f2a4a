"""Allreduce through a library that knows less than we do: NumPy steps before and after it.

Such a library gets one contiguous array and one of SUM, PRODUCT, MIN, MAX, so its result is the
contract's: 16-bit floats are accumulated in fp32, booleans are or-ed and and-ed, integers are
averaged downwards, scales are applied on this side.
"""

from __future__ import annotations

import numpy as np

from phub_collective.backends.base import DType, Kind, Operation, ReduceOp

# The NumPy type of each; bfloat16, which NumPy lacks, as its bits.
_ELEMENTS = {
    dtype: np.dtype("uint16" if dtype is DType.BFLOAT16 else dtype.name.lower()) for dtype in DType
}
_BOOLEAN = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}


class Transfer:
    """One operation on its way through a library.

    Attributes:
        kind, root: as in the operation.
        array: what the library works on in place; the caller's own memory wherever possible.
        op: what it reduces with; never AVERAGE.
    """

    def __init__(self, operation: Operation, size: int) -> None:
        assert operation.buffer is not None
        self.kind, self.root = operation.kind, operation.root
        self._operation, self._size, self._dtype = operation, size, operation.buffer.dtype
        self._target = operation.buffer.bytes.view(_ELEMENTS[self._dtype])
        self.array = self._target
        self.op: ReduceOp = ReduceOp.SUM if operation.op is ReduceOp.AVERAGE else operation.op
        if operation.kind is Kind.BROADCAST:
            self.array = operation.buffer.bytes
        elif self._dtype is DType.BOOL:
            self.op = _BOOLEAN.get(operation.op, operation.op)
            self.array = operation.buffer.bytes
        elif self._dtype is DType.BFLOAT16:
            self.array = from_bfloat16(self._target)
        elif self._dtype is DType.FLOAT16:
            self.array = self._target.astype(np.float32)
        if operation.kind is Kind.ALLREDUCE and operation.prescale != 1.0:
            self.array *= self.array.dtype.type(operation.prescale)

    def finish(self) -> None:
        """The library is done: make the result that of the contract, in the caller's memory."""
        operation, array = self._operation, self.array
        if operation.kind is Kind.BROADCAST:
            return
        if operation.op is ReduceOp.AVERAGE:
            if self._dtype.is_floating:
                array /= array.dtype.type(self._size)
            else:
                array //= array.dtype.type(self._size)
        if operation.postscale != 1.0:
            array *= array.dtype.type(operation.postscale)
        if self._dtype is DType.BFLOAT16:
            self._target[:] = to_bfloat16(array)
        elif self._dtype is DType.FLOAT16:
            with np.errstate(over="ignore"):  # beyond 65504 it is infinite, as in torch
                self._target[:] = array


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """bfloat16 (as uint16) widened to float32; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16 (as uint16), to nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))
    quiet = bits | np.uint32(0x400000)  # rounding could carry a NaN's mantissa into infinity
    return (np.where(np.isnan(values), quiet, rounded) >> 16).astype(np.uint16)
