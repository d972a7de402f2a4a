"""Measurements kept between jobs, by what they depend on: hosts, ranks, settings, version.

Only rank 0 reads and writes files. A file that cannot be read or written costs a new measurement
and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import phub_collective
from phub_collective.backends.base import Context
from phub_collective.machine import host_hint, usable_cpus
from phub_collective.selection.costmodel import Point

# Settings that change how fast a backend is.
SETTINGS = (
    "lane",
    "pbox",
    "pbox_cores",
    "shards",
    "chunk_bytes",
    "congestion",
    "socket_buffer",
    "spin_us",
)

Points = dict[str, list[Point]]


def key(context: Context, candidates: Sequence[str]) -> str:
    """What the measurements depend on, as a readable text; equal on all ranks. Collective."""
    host = f"{socket.gethostname()} {host_hint()} {usable_cpus()} CPUs"
    hosts = context.rendezvous.all_gather("selector.host", host.encode())
    return json.dumps(
        {
            "version": phub_collective.__version__,
            "hosts": [name.decode() for name in hosts],
            "candidates": list(candidates),
            **{name: getattr(context.config, name) for name in SETTINGS},
        },
        sort_keys=True,
    )


def load(context: Context, what: str) -> tuple[Points | None, str]:
    """Rank 0's stored measurements, or None, and where they are from; equal on all ranks.
    Collective."""
    mine = b""
    if context.rank == 0:
        path = _path(what)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["key"] == what and all(stored["points"].values()):
                mine = json.dumps([stored["points"], f"cached in {path}"]).encode()
    shared = context.rendezvous.all_gather("selector.cache", mine)[0]
    if not shared:
        return None, ""
    points, source = json.loads(shared)
    return points, source


def store(context: Context, what: str, points: Mapping[str, Sequence[Point]]) -> None:
    """Keep measurements for the next job on these hosts (rank 0)."""
    if context.rank != 0:
        return
    path = _path(what)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            json.dump({"key": what, "points": points}, file)
        os.replace(file.name, path)


def _path(what: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.sha256(what.encode()).hexdigest()[:16]
    return Path(base) / "phub_collective" / f"select-{digest}.json"
