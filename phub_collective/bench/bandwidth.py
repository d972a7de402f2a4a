"""What an exchange costs at least on one host: the bytes it must move over memory, at the highest
bandwidth that the same run measured, of a copy or of an update in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from phub_collective.bench.gate import Gate
from phub_collective.machine import usable_cpus

WALK_BYTES = 64 << 20  # per array; two of them on each core exceed common last-level caches
WALKS = 8  # in one timing, so that the ranks overlap although they do not start as one
REPEATS = 5
CACHES = 8  # a workload of so many last-level caches finds little of itself there


def walk_seconds(gate: Gate, rank: int) -> dict[str, list[float]]:
    """Copy, and update in place, on the first ranks, one per core, all at once. Seconds that this
    rank took for WALKS of each, one entry per repeat; none for a rank that only waited.
    Collective."""
    walks = rank < usable_cpus()
    count = WALK_BYTES // 8 if walks else 0
    source, target = np.ones(count), np.ones(count)
    kinds: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(target, source),
        "update": lambda: np.negative(source, out=source),  # fetches no line just to overwrite it
    }
    seconds = {}
    for name, walk in kinds.items():
        repeats = [_timed(gate, walk) for _ in range(REPEATS)]
        seconds[name] = repeats if walks else []
    return seconds


def _timed(gate: Gate, walk: Callable[[], object]) -> float:
    gate.start()
    begin = time.perf_counter()
    for _ in range(WALKS):
        walk()
    seconds = time.perf_counter() - begin
    gate.pause()
    return seconds


def bandwidth(ranks: Sequence[Sequence[float]]) -> float:
    """Bytes per second, reads and writes counted, that all ranks' walks moved together in the
    best repeat; a repeat takes as long as its slowest rank."""
    walking = [seconds for seconds in ranks if seconds]
    moved = 2 * WALK_BYTES * WALKS * len(walking)
    best: float = min(max(repeat) for repeat in zip(*walking, strict=True))
    return moved / best


def last_level_cache() -> int:
    """Bytes of the largest cache of the first core; 32 MiB where the kernel does not say."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    sizes = [_size(path) for path in folder.glob("index*/size")]
    return max(sizes, default=32 << 20)


def _size(path: Path) -> int:
    text = path.read_text().strip()
    unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * unit


def least_bytes(mode: str, lane: str, workers: int, nbytes: int) -> int:
    """Bytes that any algorithm reads or writes at least, over all processes of one host.

    In shared memory each rank's gradient is read once and each rank's result written once; a
    server's optimizer reads and writes weights and momentum; of a shared model the result is
    written once for all. Over TCP an allreduce sends at least 2(N-1) times the model (its
    bandwidth bound), and the kernel copies each byte in and out: two reads and two writes.
    """
    state = 0 if mode.startswith("allreduce") else 4 * nbytes
    if lane == "tcp":
        return 8 * (workers - 1) * nbytes + state
    if mode == "shared-model":
        return workers * nbytes + state
    return 2 * workers * nbytes + state


def floor_seconds(
    mode: str, lane: str, workers: int, nbytes: int, bandwidth: float
) -> float | None:
    """Seconds for `least_bytes`; None where the last cache may hold a good part of the workload,
    and for packed gradients, whose bytes are few and whose packing takes longer."""
    if mode == "allreduce-packed":
        return None
    if workers * nbytes < CACHES * last_level_cache():
        return None
    return least_bytes(mode, lane, workers, nbytes) / bandwidth
