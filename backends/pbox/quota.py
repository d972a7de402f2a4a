"""What a job may ask of a PBox: numbers that no honest job reaches, and the memory that is there.
Checked before anything is made of them, since a server that runs out of memory fails all jobs."""

from __future__ import annotations

import math
from pathlib import Path

from phub_collective.backends.base import Key
from phub_collective.backends.pbox.keytable import TableSpec
from phub_collective.errors import ConfigError

MAX_NAME = 1000  # characters of a key or table
MAX_KEYS = 1 << 20
MAX_CHUNKS = 1 << 22  # 128 GiB in chunks of 32 KiB
MAX_GROUPS = 4096
MEMINFO = Path("/proc/meminfo")


def check_numbers(spec: TableSpec) -> None:
    """Raise ConfigError when a table is out of all proportion."""
    long = next((n for n in (spec.name, *(k.name for k in spec.keys)) if len(n) > MAX_NAME), None)
    if long is not None:
        raise ConfigError(f"[pbox] a name of {len(long)} characters; at most {MAX_NAME} are taken")
    groups = 1 + max((key.group for key in spec.keys), default=0)
    chunks = sum(-(-_bytes(key) // spec.chunk_bytes) for key in spec.keys)
    for what, value, most in (
        ("keys", len(spec.keys), MAX_KEYS),
        ("parameter groups", groups, MAX_GROUPS),
        ("chunks", chunks, MAX_CHUNKS),
    ):
        if value > most:
            raise ConfigError(f"[pbox] {spec.name!r} has {value} {what}; at most {most} are taken")


def check_memory(spec: TableSpec, workers: int, local: bool) -> None:
    """Raise ConfigError when a table needs more than half of what this host has left."""
    needed, available = memory_needed(spec, workers, local), available_memory()
    if needed > available // 2:
        raise ConfigError(
            f"[pbox] {spec.name!r} needs {needed >> 20} MiB on the server, which has "
            f"{available >> 20} MiB left and keeps half of it; use fewer workers, a smaller model "
            "or a larger host"
        )


def memory_needed(spec: TableSpec, workers: int, local: bool) -> int:
    """Bytes that the server allocates for a table, at most (see `Table` in native/table.h)."""
    size = sum(_bytes(key) for key in spec.keys)
    wide = 2 if any(key.dtype.is_floating and key.dtype.itemsize == 2 for key in spec.keys) else 1
    arenas = workers if local and spec.model else 0
    state = 2 * wide if spec.server else 0
    weights = 2 if spec.shared else 0
    answers = 0 if arenas else 2 + wide
    return size * (arenas + state + weights + answers)


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) << 10


def _bytes(key: Key) -> int:
    """`key.nbytes`, without the bounds of NumPy's integers."""
    return math.prod(key.shape) * key.dtype.itemsize
