"""`phub bench kernels`: aggregation and optimizer of chunks, beside the machine's memory bandwidth;
and how cores share a model (ways.py).

A core's arithmetic is bound by memory. So the measure is the time that the same bytes would take at
the copy bandwidth of the same run ("x floor"), and how the bytes read compare with a core that only
reads ("x read"). All walks take turns within each round; ratios are of times of one round.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from phub_collective.backends import native
from phub_collective.backends.base import DType
from phub_collective.bench import report, ways
from phub_collective.bench.bandwidth import last_level_cache
from phub_collective.bench.plan import parse_bytes
from phub_collective.bench.walks import KERNELS, MAX_ARRAYS, SLICE, WARM, Arrays, Case
from phub_collective.errors import ConfigError
from phub_collective.machine import HUGE_PAGES, kernel_value, usable_cpus
from phub_collective.sizes import size_text

MACHINE = (("read", 1), ("copy", 1), ("triad", 2))  # walks of the machine's memory: name, arrays
NOTES = (
    "time: ms for whole arrays at the median slice's speed, median over the rounds",
    "GB/s: all bytes moved; reads, writes, and lines fetched to be written (not if streaming)",
    "in GB/s: bytes of gradients taken in",
    "x floor: time / (bytes moved / copy bandwidth); copy is libc's memcpy, chunk by chunk",
    "x read: time / (bytes read or fetched / read bandwidth)",
    "reduce: average of the arrays; sgd (with momentum), adam: with weight decay, from one copy of "
    "the weights to another",
    "wrong: numbers that differ from the NumPy twin's, of one more walk",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `phub bench kernels`."""
    every = ",".join(str(n) for n in range(1, MAX_ARRAYS + 1))
    parser.add_argument("--arrays", default=every, metavar="LIST",
                        help="numbers of gradient arrays (default: %(default)s)")  # fmt: skip
    parser.add_argument("--threads", default="1,2", metavar="LIST", help="default: %(default)s")
    parser.add_argument("--size", default="64MiB", help="of each array (default: %(default)s)")
    parser.add_argument("--chunk", default="32KiB", help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--rounds", type=int, default=11, help="default: %(default)s")
    parser.add_argument("--stores", choices=("cached", "streaming"), default="cached",
                        help="how results and the copy are written (default: cached)")  # fmt: skip
    parser.add_argument("--huge-pages", action="store_true", help="ask for them (MADV_HUGEPAGE)")
    parser.add_argument("--model", default="ResNet50", metavar="NAME",
                        help="network for tall against wide aggregation, float32; empty: leave it "
                        "out (default: %(default)s)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write header and rows there")


def parse_numbers(flag: str, text: str, largest: int) -> list[int]:
    """A comma-separated list of numbers from 1 to `largest`.

    Raises:
        ConfigError: it is not.
    """
    numbers = [int(word) if word.isdecimal() else 0 for word in text.split(",")]
    if not all(1 <= number <= largest for number in numbers):
        raise ConfigError(f"[bench] {flag} {text!r}: expected numbers from 1 to {largest}")
    return numbers


def cases_of(args: argparse.Namespace) -> list[Case]:
    """The walks of a round."""
    streaming = args.stores == "streaming"
    arrays = parse_numbers("--arrays", args.arrays, MAX_ARRAYS)
    cases = []
    for threads in parse_numbers("--threads", args.threads, 1024):
        cases += [Case(walk, n, threads, streaming and walk == "copy") for walk, n in MACHINE]
        cases += [Case(walk, n, threads, streaming) for walk in KERNELS for n in arrays]
    return cases


def check_sizes(args: argparse.Namespace, threads: Sequence[int]) -> tuple[int, int]:
    """Bytes of an array and of a chunk.

    Raises:
        ConfigError: arrays too small for the threads, or chunks that are no whole lines.
    """
    nbytes, chunk = parse_bytes(args.size), parse_bytes(args.chunk)
    least = SLICE * chunk * WARM * max(threads)
    if chunk < 128 or chunk % 128 or nbytes % 128:
        raise ConfigError(f"[bench] sizes {nbytes} and {chunk}: expected multiples of 128 bytes")
    if nbytes < least:
        raise ConfigError(f"[bench] --size {args.size}: expected at least {size_text(least)}")
    if args.rounds < 1:
        raise ConfigError(f"[bench] --rounds {args.rounds}: expected at least 1")
    return nbytes, chunk


def facts(args: argparse.Namespace) -> dict[str, Any]:
    """The header: what the numbers depend on."""
    asked = "asked for" if args.huge_pages else "not asked for"
    return {
        "kernel": platform.release(),
        "numpy": np.__version__,
        "cores": usable_cpus(),
        "isa": native.load().kernels.best_isa().name.lower(),
        "last_level_cache_bytes": last_level_cache(),
        "array_bytes": parse_bytes(args.size),
        "chunk_bytes": parse_bytes(args.chunk),
        "huge_pages": f"{asked}; the kernel: {kernel_value(HUGE_PAGES)}",
        "stores": args.stores,
        "rounds": args.rounds,
        "warmup": f"first 1/{WARM} of each walk",
        "load_average": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def measure(arrays: Arrays, cases: Sequence[Case], chunk: int, rounds: int) -> list[list[float]]:
    """Seconds of each case in each round."""
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        for case, seconds in zip(cases, times, strict=True):
            seconds.append(arrays.seconds(case, chunk))
    return times


def row_of(
    case: Case, cases: Sequence[Case], times: Sequence[list[float]], nbytes: int, dtype: str
) -> dict[str, Any]:
    """One row of the table, without its check."""

    def ratio(walk: str, mine: int, per_array: int) -> float:
        """Median over the rounds of time / (`mine` bytes at the bandwidth of `walk`)."""
        place = next(i for i, c in enumerate(cases) if (c.walk, c.threads) == (walk, case.threads))
        own = times[cases.index(case)]
        return median(t / (m * mine / per_array) for t, m in zip(own, times[place], strict=True))

    seconds = median(times[cases.index(case)])
    moved = case.loads + case.stores
    copy = next(c for c in cases if c.walk == "copy")
    return {
        "walk": case.walk,
        "arrays": case.arrays,
        "threads": case.threads,
        "dtype": dtype,
        "stores": "streaming" if case.streaming else "cached",
        "median_s": seconds,
        "GBps": moved * nbytes / seconds / 1e9,
        "in_GBps": case.arrays * nbytes / seconds / 1e9,
        "times_floor": ratio("copy", moved, copy.loads + copy.stores),
        "times_read": ratio("read", case.loads, 1),
        "wrong": None,
    }


def row_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A title line and one aligned line per row."""
    titles = ("walk", "stores", "arrays", "threads", "time", "GB/s", "in GB/s", "x floor",
              "x read", "wrong")  # fmt: skip
    cells = [
        (
            row["walk"],
            row["stores"] if row["walk"] != "read" else "-",
            str(row["arrays"]),
            str(row["threads"]),
            report.number(row["median_s"], 1e3),
            *(report.number(row[name]) for name in ("GBps", "in_GBps")),
            *(report.number(row[name]) for name in ("times_floor", "times_read")),
            report.number(row["wrong"]),
        )
        for row in rows
    ]
    return report.table([titles, *cells], 2)


def main(args: argparse.Namespace) -> int:
    """1 when a number was wrong, else 0.

    Raises:
        ConfigError: a flag is wrong.
        BackendUnavailable: the native core is not built.
    """
    cases = cases_of(args)
    nbytes, chunk = check_sizes(args, [case.threads for case in cases])
    model_bytes = ways.Model.size(args.model) if args.model else 0
    header = facts(args)
    threads = sorted({case.threads for case in cases})
    arrays = Arrays(nbytes, DType[args.dtype.upper()], args.huge_pages)
    times = measure(arrays, cases, chunk, args.rounds)
    rows = [row_of(case, cases, times, nbytes, args.dtype) for case in cases]
    for case, row in zip(cases, rows, strict=True):
        if case.is_kernel:
            row["wrong"] = arrays.wrong(case, chunk)
    print(*(f"# {name}: {value}" for name, value in header.items()), sep="\n")
    print(*(f"# {note}" for note in NOTES), sep="\n")
    print(*row_lines(rows), sep="\n", flush=True)
    shared: list[dict[str, Any]] = []
    if args.model:
        arrays = Arrays(model_bytes, DType.FLOAT32, args.huge_pages)
        shared = ways.measure(args.model, arrays, threads, chunk, args.rounds)
        print(*(f"# {note}" for note in ways.NOTES), *ways.row_lines(shared), sep="\n", flush=True)
    if args.json:
        report.write_json(args.json, {"header": header, "rows": rows, "ways": shared})
    wrong = sum(row["wrong"] or 0 for row in [*rows, *shared])
    print(f"# {'all numbers right' if wrong == 0 else f'{wrong} numbers WRONG'}")
    return 0 if wrong == 0 else 1
