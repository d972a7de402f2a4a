"""The NumPy steps around a library: conversions against torch's, averages against arithmetic."""

from __future__ import annotations

import numpy as np
import pytest

from phub_collective.backends import bfloat16
from phub_collective.backends.base import Buffer, DType, Kind, Operation, ReduceOp
from phub_collective.backends.transfer import Transfer


def allreduce(
    array: np.ndarray, op: ReduceOp = ReduceOp.SUM, prescale: float = 1.0, postscale: float = 1.0
) -> Operation:
    return Operation(
        Kind.ALLREDUCE, "x", Buffer.of(array), op, prescale=prescale, postscale=postscale
    )


def test_bfloat16_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    bits = np.arange(1 << 16, dtype=np.uint16)
    widened = bfloat16.widen(bits)
    theirs = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(widened, theirs, equal_nan=True)

    values = np.random.default_rng(1).integers(1 << 32, size=200_000, dtype=np.uint32)
    values = np.concatenate([values, [0x7F800001, 0x7FFFFFFF, 0xFF800000, 0x3F808000, 0x3F818000]])
    floats = values.astype(np.uint32).view(np.float32)
    rounded = bfloat16.widen(bfloat16.narrow(floats))
    theirs = torch.from_numpy(floats).bfloat16().float().numpy()
    assert np.array_equal(rounded, theirs, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "int8", "uint8"])
def test_these_types_are_reduced_where_they_stand(dtype: str) -> None:
    array = np.ones(5, dtype)
    assert np.shares_memory(Transfer(allreduce(array), 2).array, array)


def test_half_floats_are_accumulated_in_single() -> None:
    """1000 + 1 is 1001 in fp16, but 2049 summands of 1 stop at 2048 unless they are widened."""
    array = np.full(3, 1, np.float16)
    transfer = Transfer(allreduce(array, ReduceOp.AVERAGE), 2050)
    assert transfer.array.dtype == np.float32
    transfer.array[:] = 2050  # what the library would have summed
    transfer.finish()
    assert (array == 1).all()


def test_half_floats_overflow_to_infinity() -> None:
    array = np.full(1, 60000, np.float16)
    transfer = Transfer(allreduce(array), 2)
    transfer.array *= 2
    transfer.finish()
    assert np.isposinf(array).all()


def test_integers_average_downwards() -> None:
    array = np.array([-3, 3, -4], np.int32)
    transfer = Transfer(allreduce(array, ReduceOp.AVERAGE), 2)
    transfer.finish()  # as if these were the sums
    assert array.tolist() == [-2, 1, -2]


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_small_integers_average_over_more_ranks_than_they_can_say(dtype: str) -> None:
    array = np.array([-128, 127, 0], np.int8).view(dtype)
    expected = np.floor(array.astype(float) / 300).astype(dtype)
    Transfer(allreduce(array, ReduceOp.AVERAGE), 300).finish()
    assert array.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_overflow_is_infinite_whatever_numpy_is_told_to_do(dtype: str) -> None:
    array = np.array([1e4, -1e4], dtype)
    with np.errstate(all="raise"):
        Transfer(allreduce(array, prescale=1e30, postscale=1e30), 2).finish()
    assert array.tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize(
    ("op", "library_op"),
    [
        (ReduceOp.SUM, ReduceOp.MAX),
        (ReduceOp.MAX, ReduceOp.MAX),
        (ReduceOp.PRODUCT, ReduceOp.MIN),
        (ReduceOp.MIN, ReduceOp.MIN),
    ],
)
def test_booleans_are_or_and_and(op: ReduceOp, library_op: ReduceOp) -> None:
    array = np.array([True, False])
    transfer = Transfer(allreduce(array, op), 2)
    assert transfer.op is library_op
    assert transfer.array.dtype == np.uint8
    assert np.shares_memory(transfer.array, array)


def test_scales_are_applied_once_each() -> None:
    array = np.array([2, 4], np.float32)
    transfer = Transfer(allreduce(array, prescale=0.5, postscale=8.0), 2)
    assert transfer.array.tolist() == [1, 2]
    transfer.finish()
    assert array.tolist() == [8, 16]


def test_a_broadcast_moves_bytes() -> None:
    array = np.ones(3, np.float16)
    operation = Operation(Kind.BROADCAST, "x", Buffer(array.view(np.uint8), DType.FLOAT16), root=1)
    transfer = Transfer(operation, 2)
    assert transfer.array.dtype == np.uint8
    assert np.shares_memory(transfer.array, array)
