"""Optimizer steps: the kernels against their NumPy twins (bitwise) and against torch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_arrays import (
    ACCUMULATOR,
    Guarded,
    as_bytes,
    assert_same,
    each_float,
    each_isa,
    native,
    random_array,
    random_arrays,
)

from phub_collective.backends.base import SGD, Adam, DType, Hyper, ReduceOp
from phub_collective.kernels import reference
from phub_collective.kernels.reference import Scale

HYPERS: list[Hyper] = [
    SGD(lr=0.1),
    SGD(lr=0.1, weight_decay=0.01),
    SGD(lr=0.05, momentum=0.9),
    SGD(lr=0.05, momentum=0.9, dampening=0.5, weight_decay=0.02),
    SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.02),
    SGD(lr=0.05, momentum=0.5, maximize=True, weight_decay=1e-3),
    SGD(lr=0.05, momentum=0.5, maximize=True, nesterov=True),
    Adam(lr=0.01),
    Adam(lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.02),
    Adam(lr=0.01, weight_decay=0.02, decoupled_weight_decay=True),
    Adam(lr=0.01, amsgrad=True),
    Adam(lr=0.01, amsgrad=True, weight_decay=0.02, decoupled_weight_decay=True, maximize=True),
]
each_hyper = pytest.mark.parametrize("hyper", HYPERS, ids=str)


def to_params(hyper: Hyper) -> Any:
    if isinstance(hyper, SGD):
        return native.SgdParams(**vars(hyper))
    return native.AdamParams(
        hyper.lr,
        *hyper.betas,
        hyper.eps,
        hyper.weight_decay,
        hyper.amsgrad,
        hyper.decoupled_weight_decay,
        hyper.maximize,
    )


def states_of(hyper: Hyper) -> int:
    """Arrays of state that the kernel uses."""
    return 0 if isinstance(hyper, SGD) and hyper.momentum == 0.0 else hyper.state_arrays


def unset_state(hyper: Hyper, like: np.ndarray) -> list[np.ndarray]:
    """SGD must not read its momentum before it is set; Adam begins with zeros."""
    unset = np.nan if isinstance(hyper, SGD) else 0.0
    return [np.full_like(like, unset) for _ in range(states_of(hyper))]


class Twin:
    """The NumPy twin with its state."""

    def __init__(self, hyper: Hyper, weights: np.ndarray) -> None:
        self._hyper, self.weights = hyper, weights
        self.state = unset_state(hyper, weights)
        self._taken = 0

    def step(self, gradient: np.ndarray, scale: float) -> None:
        hyper = self._hyper
        if isinstance(hyper, SGD):
            before = self.state[0] if self.state and self._taken else None
            self.weights, momentum = reference.sgd(hyper, self.weights, before, gradient, scale)
            self.state = [] if momentum is None else [momentum]
        else:
            self.weights, self.state = reference.adam(
                hyper, self.weights, self.state, gradient, scale, self._taken
            )
        self._taken += 1


@each_hyper
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_100_steps_equal_torch(name: str, hyper: Hyper) -> None:
    torch = pytest.importorskip("torch")
    dtype, count, n = DType[name.upper()], 301, 4
    weights = random_array(dtype, count, 99)
    state = unset_state(hyper, weights)
    parameter = torch.nn.Parameter(torch.from_numpy(weights.copy()))
    rule = torch.optim.SGD if isinstance(hyper, SGD) else torch.optim.Adam
    optimizer = rule([parameter], **vars(hyper))
    for step in range(100):
        gradients = [random_array(dtype, count, 1000 * step + k) for k in range(n)]
        native.reduce_step(
            dtype,
            to_params(hyper),
            weights.view(np.uint8),
            weights.view(np.uint8),
            as_bytes(state),
            [],
            as_bytes(gradients),
            native.Scale(post=1 / n),
            step,
        )
        parameter.grad = torch.from_numpy(reference.reduce(dtype, ReduceOp.SUM, gradients) / n)
        optimizer.step()
    # torch's CPU kernels fuse multiply and add, ours do not.
    tolerance = 1e-5 if dtype is DType.FLOAT32 else 1e-13
    expected = parameter.detach().numpy()
    np.testing.assert_allclose(weights, expected, rtol=tolerance, atol=tolerance)


@each_isa
@each_float
@each_hyper
def test_steps_equal_their_twin(dtype: DType, isa: Any, hyper: Hyper) -> None:
    """Both forms, double-buffered, with copies of the weights on the wire, streamed or not."""
    wide = ACCUMULATOR[dtype]
    for n, copies, pre in ((1, 0, 1.0), (4, 1, 1.0), (8, 9, 1.0), (9, 12, 1.0), (3, 2, 0.5)):
        count = 1029
        gradients = random_arrays(dtype, n, count)
        scale = Scale(pre, 0.25)
        acc = reference.accumulate(dtype, ReduceOp.SUM, gradients, scale)
        start = random_array(dtype, count, 7)
        twin = Twin(hyper, reference.widen(start, dtype))
        buffers = {
            form: [twin.weights.copy(), np.zeros(count, wide)] for form in ("fused", "apart")
        }
        states = {form: unset_state(hyper, twin.weights) for form in buffers}
        for step in range(3):
            execution = native.Execution(isa, step == 1)
            native_scale = native.Scale(scale.pre, scale.post)
            outs = [Guarded(np.zeros_like(start), k) for k in range(copies)]
            native.reduce_step(
                dtype, to_params(hyper), *as_bytes(buffers["fused"]), as_bytes(states["fused"]),
                [out.bytes for out in outs], as_bytes(gradients), native_scale, step, execution,
            )  # fmt: skip
            native.step(
                dtype, to_params(hyper), *as_bytes(buffers["apart"]), as_bytes(states["apart"]),
                [], acc.view(np.uint8), native_scale, step, execution,
            )  # fmt: skip
            twin.step(acc, scale.post)
            for form, pair in buffers.items():
                assert_same(pair[1], twin.weights)
                for found, expected in zip(states[form], twin.state, strict=True):
                    assert_same(found, expected)
                pair.reverse()
            for out in outs:
                assert_same(out.value, reference.narrow(twin.weights, dtype))


def test_wrong_arguments_are_refused() -> None:
    small, no_scale = np.zeros(4, np.uint8), native.Scale()
    params = native.SgdParams(0.1, 0.9)
    with pytest.raises(ValueError, match="floating type"):
        native.step(DType.INT32, params, small, small, [small], [], small, no_scale, 0)
    with pytest.raises(ValueError, match="1 arrays of state, got 0"):
        native.step(DType.FLOAT32, params, small, small, [], [], small, no_scale, 0)
    amsgrad = native.AdamParams(0.1, amsgrad=True)
    with pytest.raises(ValueError, match="3 arrays of state, got 2"):
        native.step(DType.FLOAT32, amsgrad, small, small, [small] * 2, [], small, no_scale, 0)


# --- one rule for CPU and GPU ---

CUDA_SOURCE = """
#include "kernels/adam.h"
#include "kernels/sgd.h"
__global__ void sgd(phub::SgdRule<float> rule, float* w, float* m, const float* g, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) w[i] = rule.step(w[i], g[i], m[i]);
}
struct Root {
  __device__ float operator()(float x) const { return sqrtf(x); }
};
struct Same {
  __device__ float operator()(float x) const { return x; }
};
__global__ void adam(phub::AdamRule<float> rule, float* w, float* m, float* v, const float* g,
                     int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) w[i] = rule.step(w[i], g[i], m[i], v[i], Root(), Same());
}
void launch(float* w, float* m, float* v, const float* g, int n) {
  sgd<<<1, 32>>>(phub::SgdRule<float>(phub::SgdParams{}, 1.0), w, m, g, n);
  adam<<<1, 32>>>(phub::AdamRule<float>(phub::AdamParams{}, 1.0, 0), w, m, v, g, n);
}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_the_rules_compile_for_cuda(tmp_path: Path) -> None:
    source = tmp_path / "step.cu"
    source.write_text(CUDA_SOURCE)
    root = Path(__file__).parents[2]
    command = ["nvcc", "-std=c++17", "-I", str(root), "-c", str(source), "-o", "step.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
