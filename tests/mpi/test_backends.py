"""The contract under mpirun: the mpi backend, which exists nowhere else, and the others there.

mpirun -n 4 python -m pytest --with-mpi tests/mpi
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from contract import checks
from contract.test_backends import PROMISES
from contract.test_exchange import exchanges_are_exact, initialize_makes_all_equal

from phub_collective import backends
from phub_collective.backends.base import Backend, ReduceOp
from phub_collective.errors import ConfigError
from phub_collective.session import Session

pytestmark = pytest.mark.mpi

NAMES = [name for name, reason in backends.available().items() if reason is None]


@pytest.fixture
def backend(job: Session, request: pytest.FixtureRequest) -> Backend:
    return job.backend(request.param)


on_all = pytest.mark.parametrize("backend", NAMES, indirect=True, ids="on_{}".format)


def test_mpi_is_available_here() -> None:
    assert "mpi" in NAMES


def test_ranks_are_those_of_mpi(job: Session) -> None:
    from mpi4py import MPI

    assert (job.rank, job.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert job.size > 1


@on_all
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_promise(backend: Backend, promise: Callable[..., None]) -> None:
    promise(backend)


@on_all
def test_duplicate_names_are_refused(backend: Backend) -> None:
    checks.duplicate_names_are_refused(backend)


@on_all
def test_a_missing_rank_is_a_timeout(backend: Backend) -> None:
    checks.a_missing_rank_is_a_timeout(backend)


@on_all
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVERAGE])
def test_exchange(backend: Backend, op: ReduceOp) -> None:
    exchanges_are_exact(backend, op, 4096)


@on_all
def test_initialize(backend: Backend) -> None:
    initialize_makes_all_equal(backend)


@pytest.mark.parametrize("uses_before", [0, 3])
@pytest.mark.parametrize("what", checks.SIDES)
def test_mismatch_names_both_sides(job: Session, what: str, uses_before: int) -> None:
    """On a backend of its own: what MPI has started for a mismatch never ends."""
    backend = backends.create("mpi", job.context)
    checks.mismatch_names_both_sides(backend, what, uses_before)
    backend.close()


def test_wrong_ranks_are_refused_on_all(job: Session) -> None:
    """MPI must know the ranks by the same numbers as the job does."""
    import dataclasses

    larger = dataclasses.replace(job.context, size=job.size + 1)
    with pytest.raises(ConfigError, match=f"is rank 0 of {job.size} in MPI"):
        backends.create("mpi", larger)


def test_a_rank_that_left_is_an_error(job: Session) -> None:
    backend = backends.create("mpi", job.context)
    checks.a_rank_that_left_is_an_error(backend)
    backend.close()


def test_close_ends_the_backend(job: Session) -> None:
    checks.nothing_works_after_close(backends.create("mpi", job.context))
