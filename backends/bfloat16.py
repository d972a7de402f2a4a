"""bfloat16, which NumPy lacks, as its bits in uint16."""

from __future__ import annotations

import numpy as np


def widen(bits: np.ndarray) -> np.ndarray:
    """As float32; exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest, ties to even; NaN stays NaN, and is quiet."""
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))
    quiet = bits | np.uint32(0x400000)  # rounding could carry a NaN's mantissa into infinity
    return (np.where(np.isnan(values), quiet, rounded) >> 16).astype(np.uint16)
