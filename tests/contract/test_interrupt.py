"""Ctrl-C ends a wait at once, also while the rank waits in native code for one that is late."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
from contract import checks
from contract.jobs import lineup
from ranks import run_processes

from phub_collective import backends
from phub_collective.backends.base import Buffer, Context, Kind, Operation


def interrupt_a_wait(context: Context, name: str) -> float:
    """Rank 0's seconds from its SIGINT until it is out of the wait."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    backend = backends.create(name, context)
    array = np.ones(1000, np.float32)
    for _ in range(3):
        checks.allreduce(backend, "gradient", array)
    seconds = 0.0
    operation = Operation(Kind.ALLREDUCE, "gradient", Buffer.of(array))
    if context.rank == 0:
        work = backend.submit(operation)
        sent: list[float] = []

        def interrupt() -> None:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(0.3, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            work.wait(20.0)
        seconds = time.monotonic() - sent[0]
        context.rendezvous.barrier("interrupted")
    else:
        context.rendezvous.barrier("interrupted")
        work = backend.submit(operation)
    work.wait(checks.WAIT_S)  # the interrupted operation is still in flight
    backend.close()
    return seconds


@pytest.mark.parametrize("arguments", lineup(2))
def test_ctrl_c_ends_a_wait(arguments: tuple[str, str, int]) -> None:
    name, lane, size = arguments
    seconds = run_processes(size, interrupt_a_wait, name, lane=lane)[0]
    assert seconds is not None
    assert seconds < 2.0
