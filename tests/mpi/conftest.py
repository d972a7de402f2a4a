"""The job that mpirun started: one session for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from phub_collective.session import Session


@pytest.fixture(scope="session")
def job() -> Iterator[Session]:
    with Session.open() as session:
        yield session
