"""`phub doctor`: what this machine and installation offer, and the command that mends a lack."""

from __future__ import annotations

import argparse
import importlib
import platform
import resource
import sys
from collections.abc import Iterator

import phub_collective
from phub_collective.machine import (
    CONGESTION,
    CONGESTION_OFFERED,
    SHMEM_HUGE_PAGES,
    kernel_value,
    usable_cpus,
    version_of,
)

NATIVE = "phub_collective.backends.native._core"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`phub doctor` takes none."""


def main(args: argparse.Namespace) -> int:
    """Print one line per finding; 1 when the native core is missing, since little works then."""
    native_ok, native = _native()
    lines = [
        ("phub_collective", phub_collective.__version__),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        *((name, version_of(name)) for name in ("numpy", "torch", "mpi4py", "pyzmq", "cupy")),
        ("native core", native),
        ("usable CPUs", str(usable_cpus())),
        *_memory(),
        *_network(),
    ]
    for name, finding in lines:
        print(f"{name:<20} {finding}")
    return 0 if native_ok else 1


def _native() -> tuple[bool, str]:
    try:
        return True, str(importlib.import_module(NATIVE).__file__)
    except ImportError as error:
        return False, f"cannot be imported ({error}): run pip install -e . with a C++20 compiler"


def _memory() -> Iterator[tuple[str, str]]:
    try:
        text = SHMEM_HUGE_PAGES.read_text()
        chosen = text[text.index("[") + 1 : text.index("]")]
        mend = f"; to turn them on, as root: echo advise > {SHMEM_HUGE_PAGES}"
        yield "shared huge pages", chosen + (mend if chosen in ("never", "deny") else "")
    except (OSError, ValueError):
        yield "shared huge pages", "not offered by this kernel"
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    yield "lockable memory", "unlimited" if unlimited else f"{soft >> 10} KiB (ulimit -l)"


def _network() -> Iterator[tuple[str, str]]:
    offered = ", ".join(kernel_value(CONGESTION_OFFERED).split())
    yield "congestion control", f"{kernel_value(CONGESTION)} (offered: {offered})"
