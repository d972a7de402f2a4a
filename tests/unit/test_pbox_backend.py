"""Ad-hoc operations of the PBox backend when something is wrong; that they are right is in
tests/contract."""

from __future__ import annotations

import pytest
from pbox_jobs import SOON, allreduce, box, together, until

from phub_collective.errors import ConfigError, PeerLost


def test_a_name_submitted_again_after_a_loss_is_the_same_loss() -> None:
    with box() as made:
        job = made.job(2)
        backends = together(2, lambda rank: job.backend(rank))
        together(2, lambda rank: backends[rank].submit(allreduce("known", 1)).wait(SOON))
    backend = backends[0]
    until(lambda: backend.connection._error is not None, "the loss was not noticed")
    for name in ("known", "new", "new", "known"):
        with pytest.raises(PeerLost):
            backend.submit(allreduce(name, 1)).wait(SOON)
    for backend in backends:
        backend.close()


def test_who_waits_for_others_to_submit_a_name_is_told_when_the_backend_closes() -> None:
    with box() as made:
        job = made.job(2)
        backends = together(2, lambda rank: job.backend(rank))
        work = backends[0].submit(allreduce("alone", 1))
        assert not work.done()
        backends[0].close()
        assert work.done()
        with pytest.raises(ConfigError, match="rank 0 has left the job"):
            work.wait(SOON)
        backends[1].close()
