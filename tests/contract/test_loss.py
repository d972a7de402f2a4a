"""A rank is killed: every survivor gets a typed error soon, and nothing waits for the dead."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
from contract import checks
from contract.jobs import SETTINGS, lineup
from ranks import run_processes

from phub_collective import backends
from phub_collective.backends.base import Buffer, Context, Kind, Operation
from phub_collective.errors import PeerLost

VICTIM = 1
TIMEOUT_S = 8.0


def die_between_two_operations(context: Context, name: str) -> tuple[int, float]:
    """The rank that the survivor's error names, and the seconds until it came."""
    backend = backends.create(name, context)
    array = np.ones(100_000, np.float32)
    for _ in range(3):
        checks.allreduce(backend, "gradient", array)
    if context.rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        backend.submit(Operation(Kind.ALLREDUCE, "gradient", Buffer.of(array))).wait()
    seconds = time.monotonic() - begin
    for later in ("gradient", "another", "another"):  # and so does everything after it
        with pytest.raises(PeerLost):
            backend.submit(Operation(Kind.ALLREDUCE, later, Buffer.of(array))).wait()
    backend.close()
    return caught.value.rank, seconds


@pytest.mark.parametrize("arguments", lineup(3))
def test_survivors_are_told_who_died(arguments: tuple[str, str, int]) -> None:
    name, lane, size = arguments
    survivors = run_processes(
        size,
        die_between_two_operations,
        name,
        dying={VICTIM},
        lane=lane,
        timeout=TIMEOUT_S,
        limit=60.0,
        **SETTINGS.get(name, {}),
    )
    for rank, outcome in enumerate(survivors):
        if rank == VICTIM:
            continue
        assert outcome is not None
        lost, seconds = outcome
        assert lost == VICTIM
        assert seconds < TIMEOUT_S
