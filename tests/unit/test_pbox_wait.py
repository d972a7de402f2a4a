"""A wait for the PBox ends in time, also when the PBox does not even say who is missing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from ranks import run_threads

from phub_collective import backends
from phub_collective.backends.base import Buffer, Context, Kind, Operation
from phub_collective.backends.pbox.backend import PboxBackend
from phub_collective.errors import PeerTimeout


def stop(pid: int) -> None:
    """Stop a process, and return when all of it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        while "State:\tT" not in (task / "status").read_text():
            assert time.monotonic() < deadline


@pytest.mark.parametrize("uses_before", [0, 2])
def test_a_stopped_server_does_not_prolong_a_wait(uses_before: int) -> None:
    def body(context: Context) -> float:
        backend = backends.create("pbox", context)
        assert isinstance(backend, PboxBackend)
        operation = Operation(Kind.ALLREDUCE, "x", Buffer.of(np.ones(9, np.float32)))
        for _ in range(uses_before):
            backend.submit(operation).wait(30.0)
        stop(backend.server_pids[0])
        try:
            work = backend.submit(operation)
            begin = time.monotonic()
            with pytest.raises(PeerTimeout, match="'x'"):
                work.wait(0.2)
            seconds = time.monotonic() - begin
        finally:
            os.kill(backend.server_pids[0], signal.SIGCONT)
        work.wait(30.0)
        backend.close()
        return seconds

    (seconds,) = run_threads(1, body)
    assert seconds < 1.5
