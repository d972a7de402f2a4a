"""One contract for every backend, on each of its lanes, with 1 to 8 ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from contract import checks
from contract.jobs import Job, lineup

PROMISES = [
    checks.reductions_are_exact,
    checks.broadcasts_are_exact,
    checks.late_submission_does_not_block,
    checks.finishes_without_a_wait,
    checks.several_threads_submit,
    checks.shape_may_change_on_all_ranks,
    checks.invalid_operations_are_refused,
]


@pytest.mark.parametrize("job", lineup(1, 2, 3, 4, 5, 6, 7, 8), indirect=True)
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_promise(job: Job, promise: Callable[..., None]) -> None:
    job.check(promise)


@pytest.mark.parametrize("job", lineup(1, 2, 5), indirect=True)
def test_barrier_waits_for_everyone(job: Job) -> None:
    job.check(checks.barrier_waits_for_everyone, [0] * job.size)


@pytest.mark.parametrize("job", lineup(2, 3), indirect=True)
def test_duplicate_names_are_refused(job: Job) -> None:
    job.check(checks.duplicate_names_are_refused)


@pytest.mark.parametrize("job", lineup(2, 3), indirect=True)
def test_a_missing_rank_is_a_timeout(job: Job) -> None:
    job.check(checks.a_missing_rank_is_a_timeout)


@pytest.mark.parametrize("arguments", lineup(3))
@pytest.mark.parametrize("uses_before", [0, 3])
@pytest.mark.parametrize("what", checks.SIDES)
def test_mismatch_names_both_sides(
    fresh_job: Callable[..., Job], arguments: tuple[str, str, int], what: str, uses_before: int
) -> None:
    job = fresh_job(*arguments)
    job.check(checks.mismatch_names_both_sides, what, uses_before)


@pytest.mark.parametrize("arguments", lineup(3))
def test_a_rank_that_left_is_an_error(
    fresh_job: Callable[..., Job], arguments: tuple[str, str, int]
) -> None:
    fresh_job(*arguments).check(checks.a_rank_that_left_is_an_error)


@pytest.mark.parametrize("arguments", lineup(2))
def test_nothing_works_after_close(
    fresh_job: Callable[..., Job], arguments: tuple[str, str, int]
) -> None:
    fresh_job(*arguments).check(checks.nothing_works_after_close)
