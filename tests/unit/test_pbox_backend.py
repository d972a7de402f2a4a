"""Ad-hoc operations of the PBox backend when something is wrong; that they are right is in
tests/contract."""

from __future__ import annotations

import dataclasses
import os
import socket

import pytest
from pbox_jobs import SOON, allreduce, box, together, until
from ranks import run_threads

from phub_collective.backends import create
from phub_collective.backends.base import Context
from phub_collective.backends.pbox import deploy
from phub_collective.backends.pbox.backend import PboxBackend
from phub_collective.backends.pbox.connection import Connection
from phub_collective.backends.pbox.handshake import Invitation
from phub_collective.errors import (
    BackendUnavailable,
    ConfigError,
    InternalError,
    PeerLost,
    PhubError,
)
from phub_collective.machine import own_addresses


def test_a_name_submitted_again_after_a_loss_is_the_same_loss() -> None:
    with box() as made:
        job = made.job(2)
        backends = together(2, lambda rank: job.backend(rank))
        together(2, lambda rank: backends[rank].submit(allreduce("known", 1)).wait(SOON))
    survivor = backends[0]
    until(lambda: survivor.connection._error is not None, "the loss was not noticed")
    for name in ("known", "new", "new", "known"):
        with pytest.raises(PeerLost):
            survivor.submit(allreduce(name, 1)).wait(SOON)
    for one in backends:
        one.close()


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


# --- finding the PBox ---


def address_of(connection: Connection) -> str:
    (control,) = connection._controls
    return control._who.address


def far_apart(context: Context) -> Context:
    """As if every rank were on a host of its own."""
    return dataclasses.replace(context, local_rank=0, local_size=1)


def test_the_pbox_of_several_hosts_is_not_on_loopback_and_leaves_no_token_behind() -> None:
    before = dict(os.environ)

    def rank(context: Context) -> str:
        made = create("pbox", far_apart(context))
        assert isinstance(made, PboxBackend)
        operation = allreduce("x", 1, 2)
        made.submit(operation).wait(SOON)
        assert operation.buffer is not None
        assert operation.buffer.array().tolist() == [2, 4]
        made.close()
        return address_of(made.connection)

    addresses = run_threads(2, rank, pbox_cores=1, lane="tcp")
    assert dict(os.environ) == before
    beyond = [host for host in own_addresses() if not host.startswith("127.")]
    assert all(address.rpartition(":")[0] in (beyond or ["127.0.0.1"]) for address in addresses)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [(OSError("no such"), InternalError), (BackendUnavailable("[x] none"), BackendUnavailable)],
)
def test_why_rank_0_has_no_pbox_is_told_to_all(
    monkeypatch: pytest.MonkeyPatch, cause: Exception, kind: type[PhubError]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise cause

    monkeypatch.setattr(deploy, "start_server", fails)

    def rank(context: Context) -> None:
        with pytest.raises(kind, match="none|no such"):
            create("pbox", context)

    run_threads(2, rank)


def test_the_first_address_that_knows_the_job_is_taken() -> None:
    with box() as made, box() as other, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen
        job = made.job(1)
        nobody = f"127.0.0.1:{silent.getsockname()[1]}"
        addresses = [nobody, other.address, made.address]
        connection = Connection([Invitation(addresses, job.name, job.token)], 0, job.config)
        assert address_of(connection) == made.address
        connection.close()
        with pytest.raises(PeerLost, match=f"none of its.*{nobody}.*wrong token"):
            Connection([Invitation(addresses[:2], job.name, job.token)], 0, job.config)
