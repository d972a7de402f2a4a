"""The facts that a table of measurements is worth nothing without."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import numpy as np

from phub_collective.bench.plan import Plan
from phub_collective.config import Config
from phub_collective.machine import (
    CONGESTION,
    RESERVED_HUGE_PAGES,
    SHMEM_HUGE_PAGES,
    kernel_value,
    usable_cpus,
    version_of,
)
from phub_collective.rendezvous.identity import identify


def lane_of(backend: str, lane: str) -> str:
    """What carries a backend's bytes in a run with `--lane lane`. Some have only TCP; MPI is told
    by the driver to use TCP too when the lane is tcp."""
    return "tcp" if backend in ("gloo", "zmq_ps") else lane


def _mpi() -> str:
    """The MPI in use; only asked for when this process runs under it."""
    module = sys.modules.get("mpi4py.MPI")
    return module.Get_library_version().split("\n")[0].strip() if module else "not used"


def worker_facts(plan: Plan, config: Config) -> dict[str, Any]:
    """What only a worker knows: libraries loaded, settings in force where it runs."""
    return {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": version_of("torch"),
        "mpi": _mpi(),
        "cores": usable_cpus(),
        "omp_threads": os.environ.get("OMP_NUM_THREADS", "not set"),
        "kernel": platform.release(),
        "congestion_default": kernel_value(CONGESTION),
        "congestion_lanes": config.congestion or "first of cubic, reno, the default",
        "shmem_huge_pages": kernel_value(SHMEM_HUGE_PAGES),
        "reserved_huge_pages": kernel_value(RESERVED_HUGE_PAGES),
        "launcher": identify(os.environ).launcher,
        "lane": plan.lane,
        "compression": plan.compression,
        "warmup": plan.warmup,
        "chunk_bytes": config.chunk_bytes,
        "bucket_bytes": config.bucket_bytes if plan.overlap else "whole model",
    }
