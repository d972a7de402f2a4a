"""The log of a job's workers: what PHUB_LOG_LEVEL=info tells, and that the default is silence."""

from __future__ import annotations

import logging
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from phub_collective import backends
from phub_collective.logs import PACKAGE, set_level
from phub_collective.mappings import pages_of

WORKER = """
import numpy as np
from phub_collective.backends.base import Buffer, DType, ExchangeSpec, Key, Kind, Operation
from phub_collective.session import Session

with Session.open() as session:
    work = session.submit(Operation(Kind.ALLREDUCE, "x", Buffer.of(np.ones(4, np.float32))))
    work.wait()
    session.open_exchange(ExchangeSpec("model", [Key("w", (40_000,), DType.FLOAT32)])).close()
    session.submit(Operation(Kind.BARRIER, "end")).wait()
"""


def run_job(*flags: str) -> str:
    """What two workers and phubrun wrote to standard error."""
    launcher = [sys.executable, "-m", "phub_collective.launch.cli", "-np", "2", *flags]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PHUB_")}
    done = subprocess.run(
        [*launcher, sys.executable, "-c", WORKER],
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.skipif(backends.unavailable_reason("pbox") is not None, reason="no native core")
@pytest.mark.parametrize(("lane", "carrier"), [("shm", "shm"), ("tcp", "tcp (")])
def test_info_tells_backends_transport_pages_and_choice(lane: str, carrier: str) -> None:
    backend = "ring:<64KiB,pbox"
    said = run_job("--backend", backend, "--lane", lane, "--pbox-cores", "1", "--verbose")
    assert f"[selector] PHUB_BACKEND={backend}" in said
    for rank in range(2):
        assert f"[session] rank {rank}: connected ring in" in said
        assert f"[ring] rank {rank}: {carrier}" in said
        assert f"[pbox] rank {rank}: {carrier}" in said
        assert f"[session] rank {rank}: model: 1 keys, 156.2KiB by pbox in " in said


def test_by_default_nothing_is_said() -> None:
    assert run_job("--backend", "gloo") == ""


@pytest.fixture
def package_logger() -> Iterator[logging.Logger]:
    """The logger as it is before anything was set."""
    logger = logging.getLogger(PACKAGE)
    before = logger.level, list(logger.handlers), logger.propagate
    logger.handlers.clear()
    yield logger
    logger.level, logger.handlers[:], logger.propagate = before


def test_handlers_of_the_application_are_left_alone(package_logger: logging.Logger) -> None:
    own = logging.NullHandler()
    package_logger.addHandler(own)
    set_level("debug")
    assert package_logger.handlers == [own]
    assert package_logger.level == logging.DEBUG


def test_without_handlers_there_is_one(package_logger: logging.Logger) -> None:
    package_logger.propagate = False  # pytest's own stand at the root
    for _ in range(2):
        set_level("info")
    assert len(package_logger.handlers) == 1


def test_pages_are_those_of_the_kernel() -> None:
    with mmap.mmap(-1, 4 << 20) as memory:  # the heap may stand in huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        array = np.frombuffer(memory, np.uint8)
        assert pages_of(array) == "plain pages"
        del array
    assert pages_of(np.zeros(0, np.uint8)) == "no memory"
