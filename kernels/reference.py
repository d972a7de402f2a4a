"""NumPy twins of the kernels: slow and obvious, the oracle of tests and of `phub bench kernels`.

Arrays stand as they are on the wire, in the types of `DType.stored`. Every operation rounds as its
kernel does, so results are compared bitwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phub_collective.backends import bfloat16
from phub_collective.backends.base import SGD, Adam, DType, ReduceOp


@dataclass(frozen=True)
class Scale:
    """Factors before and after a reduction of floats, and the divisor of an average of integers."""

    pre: float = 1.0
    post: float = 1.0
    divisor: int = 1


NO_SCALE = Scale()


def widen(stored: np.ndarray, dtype: DType) -> np.ndarray:
    """In the accumulator's type: float32 for 16-bit floats, 0 or 1 for bool."""
    if dtype is DType.BFLOAT16:
        return bfloat16.widen(stored)
    if dtype is DType.FLOAT16:
        return stored.astype(np.float32)
    if dtype is DType.BOOL:
        return stored.astype(bool).astype(np.uint8)
    return stored.copy()


def narrow(accumulated: np.ndarray, dtype: DType) -> np.ndarray:
    """As stored on the wire; 16-bit floats are rounded to nearest even."""
    if dtype is DType.BFLOAT16:
        return bfloat16.narrow(accumulated)
    if dtype is DType.FLOAT16:
        with np.errstate(over="ignore"):
            return accumulated.astype(np.float16)
    return accumulated


def reduce(
    dtype: DType, op: ReduceOp, arrays: Sequence[np.ndarray], scale: Scale = NO_SCALE
) -> np.ndarray:
    """`op` over the arrays, in their order."""
    return finish(dtype, op, accumulate(dtype, op, arrays, scale), scale)


def accumulate(
    dtype: DType, op: ReduceOp, arrays: Sequence[np.ndarray], scale: Scale = NO_SCALE
) -> np.ndarray:
    """The reduction in the accumulator's type, before it is scaled and divided."""
    combine = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}
    total: np.ndarray | None = None
    for array in arrays:
        wide = widen(array, dtype)
        if dtype.is_floating:
            wide = wide * wide.dtype.type(scale.pre)
        with np.errstate(over="ignore", invalid="ignore"):
            total = wide if total is None else combine.get(op, np.add)(total, wide)
        if dtype is DType.BOOL:
            total = (total != 0).astype(np.uint8)
    assert total is not None
    return total


def finish(
    dtype: DType, op: ReduceOp, accumulated: np.ndarray, scale: Scale = NO_SCALE
) -> np.ndarray:
    """The answer: scaled, divided and rounded."""
    if dtype.is_floating:
        with np.errstate(over="ignore", invalid="ignore"):
            accumulated = accumulated * accumulated.dtype.type(scale.post)
    elif op is ReduceOp.AVERAGE and scale.divisor != 1:
        wide = accumulated // np.int64(scale.divisor)  # 128 ranks are more than an int8 can say
        accumulated = wide.astype(accumulated.dtype)
    return narrow(accumulated, dtype)


def sgd(
    hyper: SGD,
    weights: np.ndarray,
    momentum: np.ndarray | None,
    gradient: np.ndarray,
    scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray | None]:
    """One step on arrays of the accumulator's type: the new weights and momentum.

    `momentum` None: not set yet. It stays None without momentum.
    """
    t = weights.dtype.type
    ascent = gradient * t(-scale if hyper.maximize else scale)
    if hyper.weight_decay != 0.0:
        ascent = ascent + t(hyper.weight_decay) * weights
    if hyper.momentum == 0.0:
        return weights - t(hyper.lr) * ascent, None
    if momentum is None:
        momentum = ascent
    else:
        momentum = t(hyper.momentum) * momentum + t(1.0 - hyper.dampening) * ascent
    update = ascent + t(hyper.momentum) * momentum if hyper.nesterov else momentum
    return weights - t(hyper.lr) * update, momentum


def adam(
    hyper: Adam,
    weights: np.ndarray,
    state: Sequence[np.ndarray],
    gradient: np.ndarray,
    scale: float,
    taken: int,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """One step on arrays of the accumulator's type: the new weights and state (first moment, second
    moment and, with amsgrad, the largest second moment). `taken`: steps before this one."""
    t = weights.dtype.type
    beta1, beta2 = hyper.betas
    ascent = gradient * t(-scale if hyper.maximize else scale)
    if hyper.weight_decay != 0.0 and hyper.decoupled_weight_decay:
        weights = weights * t(1.0 - hyper.lr * hyper.weight_decay)
    elif hyper.weight_decay != 0.0:
        ascent = ascent + t(hyper.weight_decay) * weights
    first = state[0] + t(1.0 - beta1) * (ascent - state[0])
    second = t(beta2) * state[1] + t(1.0 - beta2) * (ascent * ascent)
    new = [first, second]
    if hyper.amsgrad:
        new.append(np.maximum(state[2], second))
    rate = t(hyper.lr / (1.0 - beta1 ** (taken + 1)))
    root = np.sqrt(new[-1]) * t(1.0 / math.sqrt(1.0 - beta2 ** (taken + 1)))
    return weights - rate * (first / (root + t(hyper.eps))), new
