"""The facts that a table of measurements is worth nothing without."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from phub_collective.bench.plan import Plan
from phub_collective.config import Config
from phub_collective.rendezvous.identity import identify

THP = Path("/sys/kernel/mm/transparent_hugepage")
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def lane_of(backend: str, lane: str) -> str:
    """What carries a backend's bytes in a run with `--lane lane`. Gloo has only TCP; MPI is told
    by the driver to use TCP too when the lane is tcp."""
    return "tcp" if backend == "gloo" else lane


def read(path: Path) -> str:
    """Stripped text of a kernel file, "unknown" where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _mpi() -> str:
    """The MPI in use; only asked for when this process runs under it."""
    module = sys.modules.get("mpi4py.MPI")
    return module.Get_library_version().split("\n")[0].strip() if module else "not used"


def worker_facts(plan: Plan, config: Config) -> dict[str, Any]:
    """What only a worker knows: libraries loaded, settings in force where it runs."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": _version("torch"),
        "mpi": _mpi(),
        "cores": os.cpu_count(),
        "omp_threads": os.environ.get("OMP_NUM_THREADS", "not set"),
        "kernel": platform.release(),
        "congestion_default": read(CONGESTION),
        "congestion_lanes": config.congestion or "first of cubic, reno, the default",
        "shmem_huge_pages": read(THP / "shmem_enabled"),
        "reserved_huge_pages": read(Path("/proc/sys/vm/nr_hugepages")),
        "launcher": identify(os.environ).launcher,
        "lane": plan.lane,
        "warmup": plan.warmup,
        "chunk_bytes": config.chunk_bytes,
        "bucket_bytes": config.bucket_bytes if plan.overlap else "whole model",
    }
