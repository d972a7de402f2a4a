"""NumPy twins of the packed forms (kernels/packed.h): slow and obvious, the oracle of tests and of
`phub bench exchange --compression`. A form is uint8; gradients and residuals are float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from phub_collective.backends import bfloat16
from phub_collective.backends.compression import Compression, Packing

Packed = tuple[np.ndarray, np.ndarray]  # a form, and the residual that is left


def kept(ratio: float, count: int) -> int:
    """How many of `count` elements TOPK sends."""
    return min(count, max(1, int(ratio * count)))


def pack(compression: Compression, residual: np.ndarray, gradient: np.ndarray) -> Packed:
    """What is sent of one chunk's gradient, and what is left of it."""
    packing = compression.packing
    if packing is Packing.FP16:
        with np.errstate(over="ignore"):
            return gradient.astype(np.float16).view(np.uint8), residual
    if packing is Packing.BF16:
        return bfloat16.narrow(gradient).view(np.uint8), residual
    with np.errstate(invalid="ignore"):
        pending = residual + gradient
        return _FORMS[packing](compression.parameter, pending)


def _two_bit(threshold: float, pending: np.ndarray) -> Packed:
    t = np.float32(threshold)
    up, down = pending >= t, pending <= -t
    codes = np.where(up, 3, np.where(down, 2, 0)).astype(np.uint8)
    rest = pending - np.where(up, t, np.where(down, -t, np.float32(0)))
    four = np.pad(codes, (0, -codes.size % 16)).reshape(-1, 4)
    form = four[:, 0] << 6 | four[:, 1] << 4 | four[:, 2] << 2 | four[:, 3]
    return form.astype(np.uint8), rest


def _one_bit(_: float, pending: np.ndarray) -> Packed:
    columns = np.pad(np.abs(pending).astype(np.float64), (0, -pending.size % 4)).reshape(-1, 4)
    total = np.cumsum(np.cumsum(columns, axis=0)[-1])[-1]  # in this order, each sum rounded
    scale = np.float32(total / pending.size)
    positive = pending >= 0
    bits = np.packbits(np.pad(positive, (0, -pending.size % 32)), bitorder="little")
    form = np.concatenate([np.array([scale]).view(np.uint8), bits])
    return form, pending - np.where(positive, scale, -scale)


def _topk(ratio: float, pending: np.ndarray) -> Packed:
    magnitudes = pending.view(np.uint32) & np.uint32(0x7FFFFFFF)  # as integers, NaN is the largest
    largest = np.argsort(~magnitudes, kind="stable")[: kept(ratio, pending.size)]
    indices = np.sort(largest).astype(np.uint32)
    rest = pending.copy()
    rest[indices] = 0
    return np.concatenate([indices.view(np.uint8), pending[indices].view(np.uint8)]), rest


_FORMS: dict[Packing, Callable[[float, np.ndarray], Packed]] = {
    Packing.TWO_BIT: _two_bit,
    Packing.ONE_BIT: _one_bit,
    Packing.TOPK: _topk,
}


def unpack(compression: Compression, form: np.ndarray, count: int) -> np.ndarray:
    """What a form of `count` elements stands for, as float32."""
    packing, parameter = compression.packing, compression.parameter
    if packing is Packing.FP16:
        return form.view(np.float16).astype(np.float32)
    if packing is Packing.BF16:
        return bfloat16.widen(form.view(np.uint16))
    if packing is Packing.TWO_BIT:
        codes = np.stack([form >> 6, form >> 4 & 3, form >> 2 & 3, form & 3], axis=1).reshape(-1)
        meaning = np.array([0, 0, -1, 1], np.float32) * np.float32(parameter)
        values: np.ndarray = meaning[codes[:count]]
        return values
    if packing is Packing.ONE_BIT:
        scale = form[:4].view(np.float32)[0]
        signs = np.unpackbits(form[4:], count=count, bitorder="little")
        scaled: np.ndarray = np.where(signs == 1, scale, -scale).astype(np.float32)
        return scaled
    indices, bits = form.view(np.uint32).reshape(2, -1)
    dense = np.zeros(count, np.float32)
    dense[indices] = bits.view(np.float32)
    return dense


class Sender:
    """One worker's pushes of one key: what arrives of each gradient, chunk by chunk."""

    def __init__(self, compression: Compression, count: int, chunk: int) -> None:
        """`count`, `chunk`: elements of the key, and of a chunk."""
        self._compression, self._chunk = compression, chunk
        self.residual = np.zeros(count, np.float32)

    def arrives(self, gradient: np.ndarray) -> np.ndarray:
        """What a core adds to its accumulator for this gradient (1-D), before any scale."""
        result = np.empty_like(self.residual)
        for begin in range(0, result.size, self._chunk):
            part = slice(begin, min(begin + self._chunk, result.size))
            form, self.residual[part] = pack(self._compression, self.residual[part], gradient[part])
            result[part] = unpack(self._compression, form, gradient[part].size)
        return result
