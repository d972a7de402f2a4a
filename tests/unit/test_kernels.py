"""The CPU kernels against their NumPy twins (bitwise) and against torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from kernel_arrays import (
    ACCUMULATOR,
    COUNTS,
    Guarded,
    as_bytes,
    assert_same,
    each_dtype,
    each_float,
    each_isa,
    native,
    random_arrays,
)

from phub_collective.backends.base import DType, ReduceOp
from phub_collective.errors import ConfigError
from phub_collective.kernels import reference
from phub_collective.kernels.reference import Scale


def run_reduce(
    dtype: DType,
    op: ReduceOp,
    arrays: Sequence[np.ndarray],
    scale: Scale,
    execution: Any,
    offsets: Sequence[int] = (3,),
) -> list[np.ndarray]:
    """The kernel on arrays at odd addresses; one output for each of `offsets`."""
    inputs = [Guarded(array, 1 + k) for k, array in enumerate(arrays)]
    outs = [Guarded(np.zeros_like(arrays[0]), offset) for offset in offsets]
    native.reduce(
        dtype,
        op,
        [out.bytes for out in outs],
        [array.bytes for array in inputs],
        native.Scale(scale.pre, scale.post, scale.divisor),
        execution,
    )
    return [out.value for out in outs]


# --- conversions ---


@each_isa
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16], ids=["float16", "bfloat16"])
def test_every_16_bit_float_is_widened_exactly(dtype: DType, isa: Any) -> None:
    stored = np.arange(1 << 16, dtype=np.uint16).view(dtype.stored)
    wide = np.zeros(stored.size, np.float32)
    native.fold(
        dtype,
        ReduceOp.SUM,
        wide.view(np.uint8),
        stored.view(np.uint8),
        True,
        execution=native.Execution(isa),
    )
    np.testing.assert_array_equal(wide, reference.widen(stored, dtype))  # NaN equals NaN here
    assert (np.signbit(wide) == np.signbit(reference.widen(stored, dtype))).all()


def rounding_cases() -> np.ndarray:
    """Floats around every 16-bit float, around the middle between it and the next, and NaNs."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    near_half = half.view(np.uint32)
    steps = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    half_steps = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF]
    bits = [upper | np.uint32(s) for s in steps] + [near_half | np.uint32(s) for s in half_steps]
    return np.concatenate(bits).view(np.float32)


@each_isa
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_rounding_to_16_bits_equals_torch(name: str, isa: Any) -> None:
    torch = pytest.importorskip("torch")
    dtype = DType[name.upper()]
    wide = rounding_cases()
    out = np.zeros(wide.size, np.uint16)
    native.finish(
        dtype,
        ReduceOp.SUM,
        out.view(np.uint8),
        wide.view(np.uint8),
        execution=native.Execution(isa),
    )
    expected = torch.from_numpy(wide).to(getattr(torch, name)).view(torch.uint16).numpy()
    nan = np.isnan(wide)
    np.testing.assert_array_equal(out[~nan], expected[~nan])
    assert np.isnan(reference.widen(out[nan].view(dtype.stored), dtype)).all()
    assert_same(
        reference.narrow(wide, dtype).view(np.uint16)[~nan], expected[~nan]
    )  # the twin itself


# --- reductions ---


@each_isa
@each_dtype
def test_reduce_equals_its_twin(dtype: DType, isa: Any) -> None:
    for op, n in itertools.product(ReduceOp, (1, 2, 5, 8, 9, 17)):
        scale = Scale(post=1 / n) if op is ReduceOp.AVERAGE else Scale()
        for count in COUNTS:
            arrays = random_arrays(dtype, n, count)
            (out,) = run_reduce(dtype, op, arrays, scale, native.Execution(isa))
            assert_same(out, reference.reduce(dtype, op, arrays, scale))


@each_isa
@each_float
def test_factors_before_and_after(dtype: DType, isa: Any) -> None:
    for n in (1, 4, 9):
        arrays = random_arrays(dtype, n, 1000)
        scale = Scale(pre=0.3, post=1.7)
        (out,) = run_reduce(dtype, ReduceOp.SUM, arrays, scale, native.Execution(isa))
        assert_same(out, reference.reduce(dtype, ReduceOp.SUM, arrays, scale))


@each_isa
@pytest.mark.parametrize("streaming", [False, True])
def test_several_outputs_some_of_which_are_inputs(isa: Any, streaming: bool) -> None:
    for dtype, n, copies in itertools.product(
        (DType.FLOAT32, DType.FLOAT16), (2, 8, 9), (1, 5, 12)
    ):
        arrays = random_arrays(dtype, n, 2501)
        expected = reference.reduce(dtype, ReduceOp.SUM, arrays)
        others = [np.zeros_like(arrays[0]) for _ in range(copies)]
        outs = [arrays[0], *others, arrays[-1]]
        native.reduce(
            dtype,
            ReduceOp.SUM,
            as_bytes(outs),
            as_bytes(arrays),
            execution=native.Execution(isa, streaming),
        )
        for out in outs:
            assert_same(out, expected)


@each_isa
@each_dtype
def test_streamed_outputs_at_any_address(dtype: DType, isa: Any) -> None:
    execution = native.Execution(isa, streaming=True)
    arrays = random_arrays(dtype, 3, 1003)
    expected = reference.reduce(dtype, ReduceOp.MAX, arrays)
    item = dtype.itemsize
    for offsets in ([0], [item], [3], [64 - item], [8 * item, 0, 64 + 8 * item, 5]):
        for out in run_reduce(dtype, ReduceOp.MAX, arrays, Scale(), execution, offsets):
            assert_same(out, expected)


@each_isa
@each_dtype
def test_folding_one_by_one_equals_reducing_at_once(dtype: DType, isa: Any) -> None:
    execution = native.Execution(isa)
    for op in ReduceOp:
        arrays = random_arrays(dtype, 6, 777)
        if op is ReduceOp.AVERAGE and dtype is DType.BOOL:
            continue
        scale = native.Scale(0.5, 0.25, 6)
        acc = Guarded(np.zeros(777, ACCUMULATOR[dtype]), 5)
        out = Guarded(np.zeros_like(arrays[0]), 7)
        for k, array in enumerate(arrays):
            native.fold(dtype, op, acc.bytes, array.view(np.uint8), k == 0, scale, execution)
        native.finish(dtype, op, out.bytes, acc.bytes, scale, execution)
        expected = reference.reduce(dtype, op, arrays, Scale(0.5, 0.25, 6))
        assert_same(out.value, expected)
        (at_once,) = run_reduce(dtype, op, arrays, Scale(0.5, 0.25, 6), execution)
        assert_same(at_once, expected)


@each_isa
@each_float
def test_nan_and_infinity_pass_through(dtype: DType, isa: Any) -> None:
    special = np.array([np.nan, 1.0, np.inf, -np.inf, np.nan], ACCUMULATOR[dtype])
    other = np.array([1.0, np.nan, np.inf, np.inf, np.nan], ACCUMULATOR[dtype])
    arrays = [reference.narrow(special, dtype), reference.narrow(other, dtype)]
    nan = {
        ReduceOp.SUM: [True, True, False, True, True],
        ReduceOp.MIN: [True, True, False, False, True],
        ReduceOp.MAX: [True, True, False, False, True],
    }
    for op, expected in nan.items():
        (out,) = run_reduce(dtype, op, arrays, Scale(), native.Execution(isa))
        assert np.isnan(reference.widen(out, dtype)).tolist() == expected, op


def test_average_of_integers_rounds_down() -> None:
    arrays = [np.array([-7, -6, -1, 0, 1, 6, 7], np.int32), np.zeros(7, np.int32)]
    (out,) = run_reduce(DType.INT32, ReduceOp.AVERAGE, arrays, Scale(divisor=3), native.Execution())
    assert out.tolist() == [-3, -2, -1, 0, 0, 2, 2]


# --- what is refused ---


def test_wrong_arguments_are_refused() -> None:
    small, large = np.zeros(4, np.uint8), np.zeros(8, np.uint8)
    with pytest.raises(ConfigError, match="expected 4 bytes, got 8"):
        native.reduce(DType.FLOAT32, ReduceOp.SUM, [large], [small])
    with pytest.raises(ConfigError, match="at least one input"):
        native.reduce(DType.FLOAT32, ReduceOp.SUM, [small], [])
    with pytest.raises(ConfigError, match="a DType, got 77"):
        native.reduce(77, ReduceOp.SUM, [small], [small])
    with pytest.raises(ValueError, match="a divisor >= 1, got 0"):
        native.reduce(DType.INT32, ReduceOp.AVERAGE, [small], [small], native.Scale(divisor=0))
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ConfigError, match="writable"):
        native.reduce(DType.FLOAT32, ReduceOp.SUM, [frozen], [small])
