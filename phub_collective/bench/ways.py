"""Tall against wide aggregation (paper section 3.2), caching against bypassing stores, on the keys
of a network: the second table of `phub bench kernels`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from phub_collective.backends.base import ReduceOp, layout
from phub_collective.bench import report
from phub_collective.bench.walks import Arrays, differences, parts, walk_sgd
from phub_collective.kernels import reference
from phub_collective.models import model_keys

WORKERS = 8  # as in the paper
NOTES = (
    "tall: each thread sums and optimizes whole chunks; wide: all threads sum a part of one key, "
    "meet, optimize it, and meet; SGD with momentum, 8 workers",
    "cached: ordinary stores; streaming: results are written past the caches",
    "x tall: time / that of tall with the same stores and threads, of the same round",
    "paper: tall 20 times as fast as MXNet's wide, with its queues, on ResNet 50; caching costs 8% "
    "memory bandwidth and 1% throughput on VGG, bypassing reaches the memory's limit",
)


@dataclass(frozen=True)
class Sharing:
    """How the work is shared: "tall" or "wide", by so many threads, with which stores."""

    way: str
    streaming: bool
    threads: int


def sharings(threads: Sequence[int]) -> list[Sharing]:
    """All that are compared."""
    return [
        Sharing(way, streaming, n)
        for n in threads
        for streaming in (False, True)
        for way in ("tall", "wide")
    ]


class Model:
    """A network's keys, one behind the other, in all arrays."""

    def __init__(self, name: str, arrays: Arrays) -> None:
        self._arrays = arrays
        offsets, self.nbytes = layout(model_keys(name))
        ends = [*offsets[1:], self.nbytes]
        self._keys = [end - begin for begin, end in zip(offsets, ends, strict=True)]

    @staticmethod
    def size(name: str) -> int:
        """Bytes of a network."""
        return layout(model_keys(name))[1]

    def seconds(self, sharing: Sharing, chunk: int) -> float:
        """Of one aggregation; the first of two, which warms up, is not counted."""
        return self._aggregate(sharing, chunk, 2)[1]

    def _aggregate(self, sharing: Sharing, chunk: int, rounds: int) -> list[float]:
        memory, kernels = self._arrays, self._arrays.kernels
        seconds: list[float] = kernels.aggregate(
            getattr(kernels.Way, sharing.way.upper()),
            memory.gradients[:WORKERS],
            memory.out,
            memory.weights,
            memory.state[0],
            memory.state[1],  # that no step uses: the sums of the wide way
            self._keys,
            chunk,
            sharing.threads,
            sharing.streaming,
            rounds,
        )
        return seconds

    def wrong(self, sharing: Sharing, chunk: int) -> int:
        """Aggregate once more, from known numbers; how many differ from the NumPy twin's."""
        memory = self._arrays
        memory.out[:] = 0xFF
        momentum = memory.known_state(0)
        self._aggregate(sharing, chunk, 1)
        return sum(self._wrong_in(part, momentum) for part in parts(self.nbytes))

    def _wrong_in(self, part: slice, before: np.ndarray) -> int:
        memory, dtype = self._arrays, self._arrays.dtype
        stored = dtype.stored
        gradients = [array[part].view(stored) for array in memory.gradients[:WORKERS]]
        total = reference.accumulate(dtype, ReduceOp.SUM, gradients)
        rule = walk_sgd(memory.kernels.WALK_SGD)
        weights, old = memory.weights[part].view(stored), before[part].view(stored)
        new, momentum = reference.sgd(rule, weights, old, total, 1 / WORKERS)
        assert momentum is not None
        found = memory.out[part].view(stored), memory.state[0][part].view(stored)
        return differences(found[0], new) + differences(found[1], momentum)


def measure(
    name: str, arrays: Arrays, threads: Sequence[int], chunk: int, rounds: int
) -> list[dict[str, Any]]:
    """The rows: all take turns within each round."""
    model, cases = Model(name, arrays), sharings(threads)
    times: dict[Sharing, list[float]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            times[case].append(model.seconds(case, chunk))
    return [
        row_of(name, case, times, model) | {"wrong": model.wrong(case, chunk)} for case in cases
    ]


def row_of(
    name: str, case: Sharing, times: dict[Sharing, list[float]], model: Model
) -> dict[str, Any]:
    """One row of the table, without its check."""
    tall = times[Sharing("tall", case.streaming, case.threads)]
    seconds = median(times[case])
    return {
        "model": name,
        "way": case.way,
        "stores": "streaming" if case.streaming else "cached",
        "threads": case.threads,
        "median_s": seconds,
        "in_GBps": WORKERS * model.nbytes / seconds / 1e9,
        "times_tall": median(mine / its for mine, its in zip(times[case], tall, strict=True)),
    }


def row_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A title line and one aligned line per row."""
    titles = ("model", "way", "stores", "threads", "time", "in GB/s", "x tall", "wrong")
    cells = [
        (
            *(str(row[name]) for name in ("model", "way", "stores", "threads")),
            report.number(row["median_s"], 1e3),
            *(report.number(row[name]) for name in ("in_GBps", "times_tall", "wrong")),
        )
        for row in rows
    ]
    return report.table([titles, *cells], 3)
