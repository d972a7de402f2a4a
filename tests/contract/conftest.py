"""Fixtures: jobs that stay, since connecting is the slow part, and jobs that tests may break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from contract.jobs import Job

from phub_collective.backends.base import Context
from phub_collective.config import Config
from phub_collective.rendezvous import LocalRendezvous


@pytest.fixture(scope="module")
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    """One job for all tests with the same (backend, lane, size)."""
    job = Job(*request.param)
    yield job
    job.close()


@pytest.fixture
def fresh_job() -> Iterator[Callable[..., Job]]:
    """Makes jobs for one test only: ``fresh_job(backend, lane, size, **settings)``."""
    jobs: list[Job] = []

    def make(*args: Any, **settings: Any) -> Job:
        jobs.append(Job(*args, **settings))
        return jobs[-1]

    yield make
    for one in jobs:
        one.close()


@pytest.fixture
def alone() -> Context:
    """The context of a job of one rank."""
    return Context(0, 1, 0, 1, LocalRendezvous(), Config())
