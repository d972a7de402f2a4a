"""Allreduce through a library that knows less than we do: NumPy steps before and after it.

Such a library gets one contiguous array and one of SUM, PRODUCT, MIN, MAX, so its result is the
contract's: 16-bit floats are accumulated in fp32, booleans are or-ed and and-ed, integers are
averaged downwards, scales are applied on this side.
"""

from __future__ import annotations

import numpy as np

from phub_collective.backends import bfloat16
from phub_collective.backends.base import DType, Kind, Operation, ReduceOp

IEEE = np.errstate(all="ignore")  # what overflows is infinite, whatever the caller has set
_BOOLEAN = {ReduceOp.SUM: ReduceOp.MAX, ReduceOp.PRODUCT: ReduceOp.MIN}


class Transfer:
    """One operation on its way through a library.

    Attributes:
        kind, root: as in the operation.
        array: what the library works on in place; the caller's own memory wherever possible.
        op: what it reduces with; never AVERAGE.
    """

    @IEEE
    def __init__(self, operation: Operation, size: int) -> None:
        assert operation.buffer is not None
        self.kind, self.root = operation.kind, operation.root
        self._operation, self._size, self._dtype = operation, size, operation.buffer.dtype
        self._target = operation.buffer.array()
        self.array = self._target
        self.op: ReduceOp = ReduceOp.SUM if operation.op is ReduceOp.AVERAGE else operation.op
        if operation.kind is Kind.BROADCAST:
            self.array = operation.buffer.bytes
        elif self._dtype is DType.BOOL:
            self.op = _BOOLEAN.get(operation.op, operation.op)
            self.array = operation.buffer.bytes
        elif self._dtype is DType.BFLOAT16:
            self.array = bfloat16.widen(self._target)
        elif self._dtype is DType.FLOAT16:
            self.array = self._target.astype(np.float32)
        if operation.kind is Kind.ALLREDUCE:
            self._scale(operation.prescale)

    @IEEE
    def finish(self) -> None:
        """The library is done: make the result that of the contract, in the caller's memory."""
        operation, array = self._operation, self.array
        if operation.kind is Kind.BROADCAST:
            return
        if operation.op is ReduceOp.AVERAGE:
            if self._dtype.is_floating:
                array /= array.dtype.type(self._size)
            else:  # in 64 bits, since 128 ranks are more than an int8 can say
                np.floor_divide(array, np.int64(self._size), out=array, casting="unsafe")
        self._scale(operation.postscale)
        if self._dtype is DType.BFLOAT16:
            self._target[:] = bfloat16.narrow(array)
        elif self._dtype is DType.FLOAT16:
            self._target[:] = array  # beyond 65504 it is infinite, as in torch

    def _scale(self, factor: float) -> None:
        if factor != 1.0:
            self.array *= self.array.dtype.type(factor)
