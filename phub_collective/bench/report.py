"""How measurements are shown: `#` header lines, one aligned row each, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phub_collective.sizes import size_text

NOTES = (
    "time, min, p90: ms; over iterations, of each iteration's slowest rank; time is the median",
    "algbw, busbw: GB/s, busbw as in nccl-tests; exch/s: exchanges per second, all workers summed",
    "wrong: wrong elements over all ranks and iterations, warm-up included; every one is compared",
    "floor: ms to move over memory what any algorithm must; - where a cache holds it",
    "worker+, server+: MB of peak memory in opening and warm-up beyond the model's own arrays",
)
WORKER_STEP_NOTE = (
    "a backend that runs no optimizer reduces in its arena, then each worker steps with torch's "
    "fused SGD; both are timed"
)
TEXT_COLUMNS = 5  # the first ones; numbers follow, which are aligned to the right


def header_lines(header: Mapping[str, Any], modes: set[str]) -> list[str]:
    """The `#` lines above the rows."""
    facts = [f"# {name}: {number(value)}" for name, value in header.items()]
    stepping = not all(mode.startswith("allreduce") for mode in modes)
    notes = [*NOTES, WORKER_STEP_NOTE] if stepping else NOTES
    return [*facts, *(f"# {note}" for note in notes)]


def row_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A title line and one aligned line per row."""
    titles = (
        "backend", "mode", "lane", "workload", "dtype", "bytes", "time", "min", "p90",
        "algbw", "busbw", "exch/s", "wrong", "floor", "xfloor", "worker+", "server+",
    )  # fmt: skip
    return table([titles, *(_cells(row) for row in rows)], TEXT_COLUMNS)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["backend"],
        row["mode"],
        row["lane"],
        row["model"] or size_text(row["bytes"]),
        row["dtype"],
        str(row["bytes"]),
        *(number(row[name], 1e3) for name in ("median_s", "min_s", "p90_s")),
        *(number(row[name]) for name in ("algbw_GBps", "busbw_GBps", "exchanges_per_s")),
        str(row["wrong"]),
        number(row["floor_s"], 1e3),
        number(row["times_floor"]),
        *(number(row[name], 1e-6) for name in ("worker_beyond_bytes", "server_beyond_bytes")),
    )


def number(value: Any, scale: float = 1.0) -> str:
    """A number with about four digits ("-" for None); other values as they are."""
    if value is None:
        return "-"
    if isinstance(value, bool | str) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) and scale == 1.0:
        return str(value)
    scaled = value * scale
    digits = 1 if abs(scaled) >= 100 else 2 if abs(scaled) >= 10 else 3
    return f"{scaled:.{digits}f}"


def table(lines: Sequence[Sequence[str]], text_columns: int) -> list[str]:
    """Aligned lines: the first `text_columns` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def write_json(path: Path, results: Mapping[str, Any]) -> None:
    """{"header": {...}, "rows": [...]}"""
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
