"""Torch tensors as the memory that backends exchange."""

from __future__ import annotations

import torch

from phub_collective.backends.base import Buffer, DType
from phub_collective.errors import ConfigError

# Torch calls them as we do.
DTYPES: dict[torch.dtype, DType] = {getattr(torch, dtype.name.lower()): dtype for dtype in DType}


def short_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module: "float32"."""
    return str(dtype).removeprefix("torch.")


def check_host(tensor: torch.Tensor, what: str) -> None:
    """Raise ConfigError unless `tensor` is a strided tensor in host memory."""
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"[torch] {what} is on {tensor.device}; expected host memory: use .cpu(), device "
            "tensors are not exchanged yet"
        )
    if tensor.layout is not torch.strided:
        raise ConfigError(f"[torch] {what} is {tensor.layout}; expected a dense tensor: to_dense()")


def exchanged_dtype(tensor: torch.Tensor, what: str) -> DType:
    """The element type that reductions know, or ConfigError."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        known = ", ".join(short_name(one) for one in DTYPES)
        raise ConfigError(f"[torch] {what} is {short_name(tensor.dtype)}; expected one of {known}")
    return dtype


def buffer_of(flat: torch.Tensor, dtype: DType) -> Buffer:
    """The memory of a contiguous host tensor, without a copy; `dtype` is its element type, or
    UINT8 where only bytes are moved."""
    return Buffer(flat.detach().reshape(-1).view(torch.uint8).numpy(), dtype)


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides (in elements) in which autograd lays the gradient of `tensor`: its own, where
    it fills its memory without gaps (channels_last does); () stands for C order."""
    if tensor.is_contiguous():
        return ()
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return ()  # gaps or overlaps
        expected *= size
    return tensor.stride()


def count_write(tensor: torch.Tensor) -> None:
    """Tell autograd that `tensor`'s memory was written behind its back, so that a graph which
    saved it complains instead of computing a wrong gradient."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
