"""The torch face under mpirun, each rank one process of it: ``mpirun -n 2 python -m pytest
--with-mpi tests/mpi``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_scenarios as scenarios
import torch_training as training

import phub_collective.torch as hvd
from phub_collective import backends

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    torch.set_num_threads(1)
    hvd.init(backend="mpi")
    yield
    hvd.shutdown()


def test_identity() -> None:
    from mpi4py import MPI

    assert (hvd.rank(), hvd.size()) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert hvd.mpi_built()


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.reduce_every_dtype,
        scenarios.reduce_in_all_spellings,
        scenarios.reduce_groups,
        scenarios.submit_in_different_orders,
        scenarios.exchange_objects,
        scenarios.broadcast_optimizers,
    ],
    ids=lambda fn: fn.__name__,
)
def test_collectives(scenario: Callable[[], None]) -> None:
    scenario()


@pytest.mark.parametrize(
    "options",
    [{"backend": "mpi"}, {"backend": "pbox"}, {"backend": "pbox", "optimizer_place": "server"}],
    ids=lambda options: "-".join(options.values()),
)
def test_training_equals_the_single_process(options: dict[str, Any]) -> None:
    reason = backends.unavailable_reason(options["backend"])
    if reason is not None:
        pytest.skip(reason)
    assert training.train(options) <= 1e-5
