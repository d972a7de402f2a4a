"""What runs the ranks of all other tests: failures are named, and waits end."""

from __future__ import annotations

import os
import signal
import time

import pytest
from ranks import ThreadRanks, run_processes, run_threads

from phub_collective.backends.base import Context


def its_rank(context: Context, factor: int) -> int:
    return context.rank * factor


def fail_on_rank_1(context: Context) -> None:
    if context.rank == 1:
        raise ValueError("wrong weather")
    context.rendezvous.all_gather("never complete", b"")


def die_on_rank_1(context: Context) -> int:
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return context.rank


def sleep_on_rank_1(context: Context, seconds: float) -> None:
    if context.rank == 1:
        time.sleep(seconds)


def test_results_are_in_the_order_of_ranks() -> None:
    assert run_threads(4, its_rank, 10) == [0, 10, 20, 30]
    assert run_processes(2, its_rank, 10) == [0, 10]


def test_ranks_that_are_threads_stay() -> None:
    with ThreadRanks(2) as ranks:
        assert ranks.run(its_rank, 1) == ranks.run(its_rank, 1) == [0, 1]


def test_the_first_failure_is_reported_with_its_rank() -> None:
    with pytest.raises(ValueError, match="wrong weather") as caught:
        run_threads(3, fail_on_rank_1)
    assert caught.value.__notes__[0] == "raised on rank 1 of 3"
    echoes = sorted(caught.value.__notes__[1:])
    assert [note.partition(":")[0] for note in echoes] == ["and on rank 0", "and on rank 2"]
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 failed.*ValueError: wrong weather"):
        run_processes(2, fail_on_rank_1)


def test_a_late_rank_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 3 did not return within 0.3 s"):
        run_threads(3, sleep_on_rank_1, 3.0, limit=0.3)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2"):
        run_processes(2, sleep_on_rank_1, 300.0, limit=5.0)
    assert time.monotonic() - begin < 30


def test_a_death_is_an_error_unless_it_is_expected() -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 2 failed: died"):
        run_processes(2, die_on_rank_1)
    assert run_processes(2, die_on_rank_1, dying={1}) == [0, None]
    with pytest.raises(RuntimeError, match="rank 0 of 2 failed: did not die"):
        run_processes(2, die_on_rank_1, dying={0, 1})
