"""Names and ends of tables on a PBox: ranks that do not agree are told, and by name."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from pbox_jobs import Box, Model, box, bystander, outcomes, spec_of, together, until

from phub_collective.backends.base import SGD, ReduceOp
from phub_collective.errors import DuplicateName, PeerLost


@pytest.fixture(scope="module")
def pbox() -> Iterator[Box]:
    with box() as made:
        yield made


def test_a_name_in_use_is_refused(pbox: Box) -> None:
    connection = pbox.job(1).connect(0)
    first = Model(connection, spec_of([(3,)]))
    with pytest.raises(DuplicateName):
        first.exchange.__class__(connection, first.spec, connection.chunk_bytes)
    first.exchange.close()
    Model(connection, spec_of([(4,)])).close()  # free again


@pytest.mark.parametrize("lane", ["shm", "tcp"])
def test_who_closes_a_table_that_others_exchange_is_named(pbox: Box, lane: str) -> None:
    job = pbox.job(2, lane)
    models = together(2, lambda rank: job.exchange(rank, spec_of([(3,)])))
    zeros = [np.zeros(3, np.float32)]
    together(2, lambda rank: models[rank].step(list(zeros)))
    models[1].exchange.close()
    with pytest.raises(PeerLost, match="rank 1 has closed 'model'") as caught:
        models[0].step(list(zeros))
    assert caught.value.rank == 1
    for model in models:
        model.close()


@pytest.mark.parametrize("lane", ["shm", "tcp"])
def test_a_table_closed_in_mid_exchange_ends_the_job_and_nothing_else(pbox: Box, lane: str) -> None:
    """What was pushed may still be on its way: its memory must outlive the exchange."""
    job = pbox.job(2, lane)
    models = together(2, lambda rank: job.exchange(rank, spec_of([(3_000_000,), (3,)])))
    models[0].exchange.push(0)
    models[0].exchange.close()
    del models[0].exchange.arena
    with pytest.raises(PeerLost, match="rank 0 has closed"):
        models[1].step([np.zeros(3_000_000, np.float32), np.zeros(3, np.float32)])
    for model in models:
        model.close()


def test_no_rank_can_register_when_another_has_left(pbox: Box) -> None:
    job = pbox.job(2)
    services = job.services()
    services[0].close()
    until(lambda: bool(pbox.server._jobs[job.name]._left), "rank 0 is still there")
    with pytest.raises(PeerLost, match="rank 0 has ended") as caught:
        services[1].init({"w": np.zeros(3, np.float32)})
    assert caught.value.rank == 0
    services[1].close()


def test_different_roots_are_an_error_on_every_rank(pbox: Box) -> None:
    job = pbox.job(2)
    models = together(2, lambda rank: job.exchange(rank, spec_of([(3,)], op=ReduceOp.SUM)))
    for error in outcomes(2, lambda rank: models[rank].exchange.initialize(1 - rank)):
        assert "must name the same root" in str(error)
    for model in models:
        model.close()


def test_other_tenants_cannot_be_reached(pbox: Box) -> None:
    """Keys of one job have no number in another."""
    with bystander(pbox), pbox.job(1).service(0) as service:
        service.init({"w": np.zeros((300, 40), np.float32)}, SGD(lr=1.0))
        for _ in range(20):
            service.push_pull("w", np.full((300, 40), 1e6, np.float32))
