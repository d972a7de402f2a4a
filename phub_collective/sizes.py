"""Sizes in bytes, and times, as people write and read them."""

from __future__ import annotations

import re

UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_size(text: str) -> int:
    """Bytes of "64KiB" or "4096"; ValueError when it is none."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in UNITS:
        raise ValueError(f"{text!r} is no size")
    return int(float(match[1]) * UNITS[match[2]])


def size_text(nbytes: int) -> str:
    """ "64KiB": four digits in the largest unit that is not below 1."""
    name, unit = next((n, u) for n, u in reversed(UNITS.items()) if n and (nbytes >= u or u == 1))
    return f"{nbytes / unit:.4g}{name}"


def time_text(seconds: float) -> str:
    """ "12.3 us", "4.5 ms" or "1.2 s"."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
