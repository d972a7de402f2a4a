"""The choices for the `compression` argument: how tensors are packed before they are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from phub_collective.backends.compression import Compression as Form
from phub_collective.backends.compression import Packing
from phub_collective.errors import ConfigError

_CASTS = {Packing.FP16: torch.float16, Packing.BF16: torch.bfloat16}
_CHOICES = "none, fp16, bf16, two_bit(threshold), one_bit, topk(ratio)"


@dataclass(frozen=True)
class Compressor:
    """One choice. `compress` and `decompress` are Horovod's, for a tensor that is reduced alone; a
    distributed optimizer's exchange is told the `form`, and packs by itself."""

    form: Form

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """The tensor as it is sent, and what `decompress` must know.

        Raises:
            ConfigError: the form needs the residual of the exchange before.
        """
        if self.form.has_residual:
            raise ConfigError(
                f"[torch] compression {self.form} keeps what it has not sent for the next exchange "
                "of the same tensor; expected Compression.none, fp16 or bf16 here: pass it to "
                "DistributedOptimizer"
            )
        is_float = tensor.dtype.is_floating_point
        dtype = _CASTS.get(self.form.packing, tensor.dtype) if is_float else tensor.dtype
        return tensor.to(dtype), tensor.dtype

    def decompress(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What was sent, in the type that it had."""
        return tensor.to(dtype)

    def compress_all(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.dtype]]:
        """`compress` of each."""
        packed = [self.compress(tensor) for tensor in tensors]
        return [tensor for tensor, _ in packed], [dtype for _, dtype in packed]

    def decompress_all(
        self, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> list[torch.Tensor]:
        """`decompress` of each."""
        return [self.decompress(*one) for one in zip(tensors, dtypes, strict=True)]

    def __repr__(self) -> str:
        return f"Compression.{self.form}"


class _Choices(type):
    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(
            f"Compression.{name} is not in phub_collective.torch; use one of {_CHOICES}"
        )


class Compression(metaclass=_Choices):
    """The choices. Those but `none`, `fp16` and `bf16` need a backend that adds packed gradients up
    (pbox) and a distributed optimizer, which keeps what was not sent for its next step."""

    none = Compressor(Form())
    fp16 = Compressor(Form(Packing.FP16))
    bf16 = Compressor(Form(Packing.BF16))
    one_bit = Compressor(Form(Packing.ONE_BIT))

    @staticmethod
    def two_bit(threshold: float = 0.5) -> Compressor:
        """Each element as +threshold, 0 or -threshold, as MXNet's 2-bit compression."""
        return Compressor(Form(Packing.TWO_BIT, float(threshold)))

    @staticmethod
    def topk(ratio: float = 0.01) -> Compressor:
        """The largest elements, this part of each chunk."""
        return Compressor(Form(Packing.TOPK, float(ratio)))

    @staticmethod
    def of(text: str) -> Compressor:
        """What a command line says: "none", "fp16", "bf16", "two_bit[:THRESHOLD]", "one_bit" or
        "topk[:RATIO]"."""
        return Compressor(Form.of(text))


def checked(compression: object) -> Compressor:
    """`compression`, or ConfigError where it is none of the choices."""
    if isinstance(compression, Compressor):
        return compression
    raise ConfigError(
        f"[torch] compression={compression!r}; expected Compression.none, or another of "
        f"Compression: {_CHOICES}"
    )
