"""The CPU kernels against their NumPy twins (bitwise) and against torch."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phub_collective.backends.base import DType, Hyper, ReduceOp
from phub_collective.errors import ConfigError
from phub_collective.kernels import reference
from phub_collective.kernels.reference import Scale

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


# --- optimizer steps ---

HYPERS = [
    Hyper(lr=0.1),
    Hyper(lr=0.1, weight_decay=0.01),
    Hyper(lr=0.05, momentum=0.9),
    Hyper(lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.02),
    Hyper(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.02),
    Hyper(lr=0.05, momentum=0.5, maximize=True, weight_decay=1e-3),
    Hyper(lr=0.05, momentum=0.5, maximize=True, nesterov=True),
]


def to_params(hyper: Hyper) -> Any:
    return native.SgdParams(
        hyper.lr,
        hyper.momentum,
        hyper.dampening,
        hyper.weight_decay,
        hyper.nesterov,
        hyper.maximize,
    )


@pytest.mark.parametrize("hyper", HYPERS, ids=str)
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_sgd_equals_torch_over_100_steps(name: str, hyper: Hyper) -> None:
    torch = pytest.importorskip("torch")
    dtype, count, n = DType[name.upper()], 301, 4
    weights = random_array(dtype, count, 99)
    momentum = np.full_like(weights, np.nan)  # must not be read before it is set
    parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    optimizer = torch.optim.SGD(
        [parameter],
        lr=hyper.lr,
        momentum=hyper.momentum,
        dampening=hyper.dampening,
        weight_decay=hyper.weight_decay,
        nesterov=hyper.nesterov,
        maximize=hyper.maximize,
    )
    for step in range(100):
        gradients = [random_array(dtype, count, 1000 * step + k) for k in range(n)]
        native.reduce_sgd(
            dtype,
            to_params(hyper),
            weights.view(np.uint8),
            weights.view(np.uint8),
            momentum.view(np.uint8),
            [],
            as_bytes(gradients),
            native.Scale(post=1 / n),
            step == 0,
        )
        parameter.grad = torch.from_numpy(reference.reduce(dtype, ReduceOp.SUM, gradients) / n)
        optimizer.step()
    # torch's CPU kernels fuse multiply and add, ours do not.
    tolerance = 1e-5 if dtype is DType.FLOAT32 else 1e-13
    expected = parameter.detach().numpy()
    np.testing.assert_allclose(weights, expected, rtol=tolerance, atol=tolerance)


@each_isa
@each_float
@pytest.mark.parametrize("hyper", HYPERS, ids=str)
def test_steps_equal_their_twin(dtype: DType, isa: Any, hyper: Hyper) -> None:
    """Both forms, double-buffered, with copies of the weights on the wire, streamed or not."""
    wide = ACCUMULATOR[dtype]
    for n, copies, pre in ((1, 0, 1.0), (4, 1, 1.0), (8, 9, 1.0), (9, 12, 1.0), (3, 2, 0.5)):
        count = 1029
        gradients = random_arrays(dtype, n, count)
        scale = Scale(pre, 0.25)
        acc = reference.accumulate(dtype, ReduceOp.SUM, gradients, scale)
        start = random_array(dtype, count, 7)
        weights, momentum = reference.widen(start, dtype), None
        fused = [weights.copy(), np.zeros(count, wide), np.full(count, np.nan, wide)]
        apart = [weights.copy(), np.zeros(count, wide), np.full(count, np.nan, wide)]
        for step in range(3):
            streaming = native.Execution(isa, step == 1)
            native_scale = native.Scale(scale.pre, scale.post)
            outs = [Guarded(np.zeros_like(start), k) for k in range(copies)]
            state = as_bytes(fused)
            native.reduce_sgd(
                dtype, to_params(hyper), *state, [out.bytes for out in outs], as_bytes(gradients),
                native_scale, step == 0, streaming,
            )  # fmt: skip
            state = as_bytes(apart)
            native.sgd(
                dtype, to_params(hyper), *state, [], acc.view(np.uint8), native_scale, step == 0,
                streaming,
            )  # fmt: skip
            weights, momentum = reference.sgd(hyper, weights, momentum, acc, scale.post)
            for result in (fused, apart):
                assert_same(result[1], weights)
                if momentum is not None:
                    assert_same(result[2], momentum)
                result[0], result[1] = result[1], result[0]
            for out in outs:
                assert_same(out.value, reference.narrow(weights, dtype))


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
    params = native.SgdParams(0.1, 0.9)
    with pytest.raises(ValueError, match="floating type"):
        native.sgd(DType.INT32, params, small, small, small, [], small, native.Scale(), True)
    with pytest.raises(ValueError, match="momentum, got none"):
        native.sgd(DType.FLOAT32, params, small, small, None, [], small, native.Scale(), True)
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ConfigError, match="writable"):
        native.reduce(DType.FLOAT32, ReduceOp.SUM, [frozen], [small])


# --- one rule for CPU and GPU ---

CUDA_SOURCE = """
#include "kernels/sgd.h"
__global__ void step(phub::SgdRule<float> rule, float* w, float* m, const float* g, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) w[i] = rule.step(w[i], g[i], m[i]);
}
void launch(const phub::SgdParams& params, float* w, float* m, const float* g, int n) {
  step<<<1, 32>>>(phub::SgdRule<float>(params, 1.0), w, m, g, n);
}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_rule_compiles_for_cuda(tmp_path: Path) -> None:
    source = tmp_path / "step.cu"
    source.write_text(CUDA_SOURCE)
    root = Path(__file__).parents[2]
    command = ["nvcc", "-std=c++17", "-I", str(root), "-c", str(source), "-o", "step.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
