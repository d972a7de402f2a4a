"""How a mesh is connected when strangers come, and what is left of a handshake that failed."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import run_threads

from phub_collective.backends import mesh_lanes
from phub_collective.backends.base import Context
from phub_collective.backends.mesh_lanes import Handshake, connect_all
from phub_collective.backends.native import load
from phub_collective.config import Config
from phub_collective.errors import InternalError, PeerLost
from phub_collective.rendezvous import LocalRendezvous
from phub_collective.rendezvous.store.wire import pack

RING_BYTES = 1 << 16
SOON_S = 5.0  # half of the patience with one stranger who is silent
STRANGERS = 5

SAYINGS = {"nothing": b"", "half_a_hello": pack(b"x" * 16, b"1")[:9], "garbage": b"GET / HTTP"}


def connect(context: Context) -> list[int]:
    """The peers in the order in which they were connected; the links are closed again."""
    core = load()
    engine = core.Engine()
    peers = []
    for link in connect_all(context, "test", core, engine.bell(), RING_BYTES):
        peers.append(link.peer)
        for descriptor in (link.memory, link.bell):
            assert descriptor < 0 or not os.get_inheritable(descriptor)
        link.close()
    return peers


@pytest.mark.parametrize("lane", ["shm", "tcp"])
@pytest.mark.parametrize("saying", SAYINGS.values(), ids=SAYINGS.keys())
def test_strangers_hold_up_nobody(saying: bytes, lane: str) -> None:
    strangers: list[socket.socket] = []

    def body(context: Context) -> list[int]:
        if context.rank == 1:  # strangers come to rank 0 before it does
            card = json.loads(context.rendezvous.get("mesh.test/0/0", 30.0))
            for _ in range(STRANGERS):
                strangers.append(socket.create_connection((card["hosts"][0], card["port"])))
                strangers[-1].sendall(saying)
        return connect(context)

    begin = time.monotonic()
    assert run_threads(2, body, lane=lane) == [[1], [0]]
    assert time.monotonic() - begin < SOON_S
    assert len(strangers) == STRANGERS
    for stranger in strangers:
        stranger.settimeout(SOON_S)
        assert is_closed(stranger)
        stranger.close()


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:  # what it had said was not read
        return True


def test_an_error_of_ours_in_a_handshake_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise InternalError("no memory for rings")

    def body(context: Context) -> None:
        expected = InternalError if context.rank == 0 else PeerLost
        with pytest.raises(expected, match="no memory for rings|rank 0 cannot be reached"):
            connect(context)

    monkeypatch.setattr(mesh_lanes.Handshake, "accept", fail)
    run_threads(2, body)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("failing", [b"m", b"b"], ids=["rings", "bell"])
def test_a_failed_handshake_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, failing: bytes
) -> None:
    send_fds = socket.send_fds

    def send_some(sock: socket.socket, buffers: Any, fds: Any) -> int:
        if buffers == [failing]:
            raise BrokenPipeError("it has gone")
        return send_fds(sock, buffers, fds)

    monkeypatch.setattr(socket, "send_fds", send_some)
    core = load()
    bell = core.Engine().bell()

    def handshake(rank: int) -> Handshake:
        context = Context(rank, 2, rank, 2, LocalRendezvous(), Config())
        return Handshake(context, b"secret", core, bell, RING_BYTES)

    def run(shake: Callable[[], object], sock: socket.socket) -> None:
        with sock, pytest.raises(OSError, match="it has gone|closed|descriptors"):
            shake()

    before = open_descriptors()
    ours, theirs = socket.socketpair()
    connector = threading.Thread(target=run, args=(lambda: handshake(1).connect(ours, 0), ours))
    connector.start()
    run(lambda: handshake(0).accept(theirs, {1}), theirs)
    connector.join(SOON_S)
    assert open_descriptors() == before
