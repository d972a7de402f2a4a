"""Backends over libraries: what fails on our side of the library, and ranks that are only late."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest
from contract import checks
from contract.jobs import Job
from ranks import run_processes, run_threads

from phub_collective import backends
from phub_collective.backends.base import Backend, Buffer, Context, Kind, Operation
from phub_collective.backends.gloo import GlooBackend
from phub_collective.backends.transfer import Transfer
from phub_collective.errors import InternalError, PeerLost, PeerTimeout

pytest.importorskip("torch")

SILENCE_S = 1.0


def operation(array: np.ndarray) -> Operation:
    return Operation(Kind.ALLREDUCE, "x", Buffer.of(array))


@pytest.mark.parametrize("uses_before", [0, 3])
@pytest.mark.parametrize("where", ["__init__", "finish"])
def test_an_exception_beside_the_library_ends_the_operation(
    fresh_job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, where: str, uses_before: int
) -> None:
    """Also when it is the library's thread or the agreement's that meets it."""
    job = fresh_job("gloo", "auto", 2)

    def fails(backend: Backend) -> None:
        with pytest.raises(InternalError, match=r"'x' failed: MemoryError\('no room'\)"):
            backend.submit(operation(np.ones(9, np.float32))).wait(10.0)

    def works(backend: Backend) -> None:
        array = np.ones(9, np.float32)
        backend.submit(operation(array)).wait(checks.WAIT_S)
        assert (array == 2).all()

    for _ in range(uses_before):
        job.check(works)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise MemoryError("no room")

        patch.setattr(Transfer, where, fail)
        job.check(fails)
    job.check(works)  # the name is free and the channels are in step


def stop_a_rank(context: Context) -> bool:
    """Rank 0 stops rank 1 for longer than a lost rank is waited for, once in a round that makes a
    channel and once in one that does not."""
    pid = int(context.rendezvous.all_gather("pid", str(os.getpid()).encode(), 30.0)[1])
    backend = backends.create("gloo", context)
    for use in range(3):
        array = np.full(10, context.rank + use, np.float32)
        context.rendezvous.barrier(f"use {use}", 30.0)
        if context.rank == 0:
            os.kill(pid, signal.SIGSTOP)
            work = backend.submit(operation(array))
            with pytest.raises(PeerTimeout):
                work.wait(2.5 * SILENCE_S)
            os.kill(pid, signal.SIGCONT)
        else:
            work = backend.submit(operation(array))
        work.wait(checks.WAIT_S)
        assert (array == 1 + 2 * use).all()
    context.rendezvous.barrier("over", 30.0)
    backend.close()
    return True


def test_a_stopped_rank_is_late_and_not_lost() -> None:
    assert run_processes(2, stop_a_rank, timeout=SILENCE_S) == [True, True]


def connect_late(context: Context) -> None:
    backend = backends.create("gloo", context)
    assert isinstance(backend, GlooBackend)
    if context.rank == 1:
        time.sleep(2.5 * SILENCE_S)  # this is how late it is
    channel = backend.open_channel(99)
    context.rendezvous.barrier("over", 30.0)
    del channel  # only now, since that closes its connections
    backend.close()


def test_a_channel_waits_for_a_late_rank() -> None:
    run_threads(2, connect_late, timeout=SILENCE_S)


def test_a_channel_does_not_wait_for_a_lost_rank() -> None:
    def body(context: Context) -> float:
        backend = backends.create("gloo", context)
        assert isinstance(backend, GlooBackend)
        begin = time.monotonic()
        if context.rank == 1:
            context.rendezvous.abandon()  # type: ignore[attr-defined]  # ranks are threads
            return 0.0
        with pytest.raises(PeerLost) as caught:
            backend.open_channel(99)
        assert caught.value.rank == 1
        return time.monotonic() - begin

    assert max(run_threads(2, body)) < 5.0
