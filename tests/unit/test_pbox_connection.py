"""The worker's end of the control connection: answers that cannot be used, and a server that is
silent. Whoever waits is told by a typed error, and no descriptor is lost or closed twice."""

from __future__ import annotations

import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pbox_jobs import LANES, SOON, Box, Model, allreduce, box, spec_of, until

from phub_collective.backends.pbox import tenant
from phub_collective.backends.pbox.connection import Connection
from phub_collective.backends.pbox.exchange import PboxExchange
from phub_collective.backends.pbox.handshake import invitations
from phub_collective.backends.pbox.launch import start_server
from phub_collective.backends.pbox.service import create_service
from phub_collective.config import Config
from phub_collective.errors import InternalError, PeerTimeout, PhubError, ProtocolError


@pytest.fixture
def pbox() -> Iterator[Box]:
    """One for each test, so that descriptors of no other job come and go."""
    with box() as made:
        yield made


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def quiet_descriptors(pbox: Box) -> int:
    """`descriptors`, when only one rank's control connection and lanes are left."""
    gc.collect()  # what tracebacks of earlier tests hold
    until(lambda: pbox.server._listener.connections() == 1, "handshakes do not end")
    return descriptors()


class Descriptor:
    """What stands in for a memory file of the server."""

    def __init__(self) -> None:
        self.fd = os.open("/dev/null", os.O_RDONLY)

    def release_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the server send other memory files than it should."""
    find = tenant._shared_memories

    def install(change: Callable[[list[Any]], list[Any]]) -> None:
        def changed(registered: Any, rank: int | None = None) -> list[Any]:
            if rank is None:  # asked for when all are sent
                return [*find(registered), *false]
            sent = change(find(registered, rank))
            false.extend(memory for memory in sent if isinstance(memory, Descriptor))
            return sent

        false: list[Descriptor] = []
        monkeypatch.setattr(tenant, "_shared_memories", changed)

    return install


UNUSABLE = {
    "the first is no memory file": lambda files: [Descriptor(), files[1]],
    "the second is no memory file": lambda files: [files[0], Descriptor()],
    "one too few": lambda files: files[:1],
    "one too many": lambda files: [*files, Descriptor()],
}


@pytest.mark.parametrize("change", UNUSABLE.values(), ids=UNUSABLE)
def test_an_answer_that_cannot_be_mapped_is_told_once(pbox: Box, spoil: Any, change: Any) -> None:
    spoil(change)
    backend = pbox.job(1, "shm").backend(0)
    before = quiet_descriptors(pbox)
    for _ in range(2):  # the connection goes on
        with pytest.raises((ProtocolError, InternalError), match="memory file|two answer mem"):
            backend.submit(allreduce("x", 1)).wait(SOON)
        until(lambda: descriptors() == before, "descriptors are left, or too many are closed")
    assert backend.connection._error is None
    backend.close()


def test_a_model_that_cannot_be_mapped_leaves_no_descriptor(pbox: Box, spoil: Any) -> None:
    spoil(lambda files: [files[0], Descriptor(), *files[1:]])
    job = pbox.job(1, "shm")
    connection = job.connect(0)
    before = quiet_descriptors(pbox)
    shared = spec_of([(3,)], place="server", shared_model=True)
    with pytest.raises(ProtocolError, match="sealed memory file"):
        Model(connection, shared)
    until(lambda: descriptors() < before, "descriptors are left")  # Model has closed the rest


@pytest.mark.parametrize("changes", [{"ids": [1]}, {"ids": None}, {"name": 7}])
def test_a_malformed_answer_is_told_to_who_waits(
    pbox: Box, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    send = tenant.Member.send

    def changed(member: tenant.Member, message: dict[str, Any], *rest: Any) -> None:
        send(member, {**message, **changes} if message["op"] == "registered" else message, *rest)

    backend = pbox.job(1, "shm").backend(0)
    before = quiet_descriptors(pbox)
    monkeypatch.setattr(tenant.Member, "send", changed)
    work = backend.submit(allreduce("x", 1))
    if "name" in changes:  # an answer for nobody: what came with it is dropped
        until(lambda: descriptors() == before, "descriptors are left")
        assert not work.done()
    else:
        with pytest.raises(PhubError, match="malformed"):
            work.wait(SOON)
    backend.close()


@pytest.mark.parametrize("lane", LANES)
def test_a_stopped_server_is_a_stall_of_who_announces_a_large_table(lane: str) -> None:
    """And of nobody else: other threads are told within their own limits."""
    server = start_server(Config(pbox_cores=1), all_local=True)
    config = Config(lane=lane, timeout=1.0, stall_timeout=1.5)
    token = create_service(server.address, "job", 1)
    connection = Connection(invitations(server.address, "job", token), 0, config)
    (control,) = connection._controls
    try:
        server.process.send_signal(signal.SIGSTOP)
        control._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        large = spec_of([(1,)] * 20_000)
        with ThreadPoolExecutor(1) as pool:
            registering = pool.submit(PboxExchange, connection, large, 4096)
            until(control._sending.locked, "nothing is sent")
            start = time.monotonic()
            assert connection.stalled(0.1) == ({}, ["the PBox server"])
            assert time.monotonic() - start < 1.0
            with pytest.raises(PeerTimeout, match="rank 0 for 1.5 s; is it stopped"):
                registering.result(SOON)
        with pytest.raises(PeerTimeout):  # a part of it has left: nothing can follow
            Model(connection, spec_of([(1,)], name="small"))
    finally:
        server.process.send_signal(signal.SIGCONT)
        connection.close()
        server.stop()
