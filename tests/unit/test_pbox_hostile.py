"""Strangers and hostile workers: what they send ends their connection or their own job, while
another job on the same server trains on exactly. (Frames on lanes: tests/native.)"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pbox_jobs import (
    SOON,
    Box,
    Job,
    box,
    bystander,
    hang_up,
    spec_of,
    together,
    until,
)

from phub_collective.backends.pbox import protocol, server
from phub_collective.backends.pbox.connection import RegisteredTable
from phub_collective.backends.pbox.exchange import PboxExchange
from phub_collective.backends.pbox.handshake import Identity, Talk, join, open_lane
from phub_collective.errors import (
    AuthError,
    ConfigError,
    PeerLost,
    PhubError,
    ProtocolError,
)


@pytest.fixture(scope="module")
def pbox() -> Iterator[Box]:
    with box() as made:
        yield made


@pytest.fixture
def undisturbed(pbox: Box) -> Iterator[None]:
    """Another job trains during the test, and is right at its end."""
    with bystander(pbox):
        yield


def dial(pbox: Box) -> socket.socket:
    host, port = pbox.server.addresses[0]
    return socket.create_connection((host, port), SOON)


def dial_unix(pbox: Box) -> socket.socket:
    with dial(pbox) as sock:
        protocol.send(sock, {"op": "where"})
        name = protocol.receive(sock)["unix"]
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(SOON)
    sock.connect("\0" + name)
    return sock


def ends(sock: socket.socket) -> None:
    """The server closes the connection."""
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass


def frame(kind: int, id: int = 0, length: int = 0, sender: int = 1) -> bytes:
    return struct.pack("<BBHIII", kind, 0, sender, id, 0, length)


# --- before the handshake ---


@pytest.mark.usefixtures("undisturbed")
def test_garbage_ends_its_connection(pbox: Box) -> None:
    rng = random.Random(1)
    messages = [
        b"GET / HTTP/1.1\r\nHost: pbox\r\n\r\n",
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", protocol.MAX_GREETING + 1) + b"{}",
        struct.pack("<I", 0),
        *(struct.pack("<I", len(b)) + b for b in (b"\xff\xfe", b"[]", b"{", b"null", b"[" * 9000)),
        *(struct.pack("<I", 40) + rng.randbytes(40) for _ in range(50)),
        *(rng.randbytes(rng.randrange(1, 100)) for _ in range(50)),
    ]
    for message in messages:
        with dial(pbox) as sock:
            with contextlib.suppress(OSError):  # it may have ended already
                sock.sendall(message)
                sock.shutdown(socket.SHUT_WR)
            ends(sock)


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"op": None},
        {"op": ["create"]},
        {"op": "no such"},
        {"op": "create"},
        {"op": "create", "name": "n", "workers": "many", "chunk_bytes": 4096},
        {"op": "create", "name": "n", "workers": float("inf"), "chunk_bytes": 4096},
        {"op": "create", "name": "n", "workers": [1], "chunk_bytes": 4096},
        {"op": "create", "name": {}, "workers": 1, "chunk_bytes": -1},
        {"op": "connect"},
        {"op": "connect", "job": 5, "rank": {}},
        {"op": "lane", "job": "x", "rank": 0, "core": "first"},
        {"op": "lane", "job": "x", "rank": 0, "core": 1e999},
    ],
)
def test_requests_that_make_no_sense_get_an_error(pbox: Box, request_: dict[str, Any]) -> None:
    with dial(pbox) as sock:
        protocol.send(sock, request_)
        answer = protocol.receive(sock)
        if "nonce" in answer:
            protocol.send(sock, {"proof": 7})
            answer = protocol.receive(sock)
        with pytest.raises(PhubError):
            protocol.raise_error(answer)
        ends(sock)
    assert "n" not in pbox.server.jobs()


@pytest.mark.usefixtures("undisturbed")
def test_silence_blocks_nobody_and_ends(pbox: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.5)
    silent = [dial(pbox) for _ in range(30)]
    silent += [dial_unix(pbox) for _ in range(10)]
    for index, sock in enumerate(silent):
        sock.sendall([b"", b"\x20", b"\x20\0\0\0{"][index % 3])
    pbox.job(1).service(0).close()  # others come in meanwhile
    for sock in silent:
        ends(sock)
        sock.close()


def test_a_message_cannot_be_dragged_out(pbox: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 0.5)
    with dial(pbox) as sock:
        start = time.monotonic()
        sock.sendall(struct.pack("<I", 1000))
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - start < SOON:  # a byte now and then: never silent for long
                sock.send(b" ")
                sock.settimeout(0.1)
                with contextlib.suppress(TimeoutError):
                    if not sock.recv(1 << 16):
                        break
        assert time.monotonic() - start < SOON


def test_descriptors_of_strangers_are_not_kept() -> None:
    with box() as pbox:
        before = descriptors()
        reading, writing = os.pipe()
        for body in (b"{}", b"{", b'{"op": "where"}'):
            with dial_unix(pbox) as sock:
                socket.send_fds(sock, [struct.pack("<I", len(body)) + body], [reading] * 8)
                ends(sock)
        os.close(reading)
        os.close(writing)
        until(lambda: descriptors() == before, "descriptors are left")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_proof_is_good_for_one_rank_and_one_purpose(pbox: Box) -> None:
    job = pbox.job(2)
    host, port = pbox.server.addresses[0]
    for claims in (("connect", job.name, 1), ("lane", job.name, 0), ("connect", "other", 0)):
        talk = Talk(lambda: socket.create_connection((host, port)), "the server")
        talk.say(op="connect", job=job.name, rank=0)
        talk.prove(job.token, *claims)
        with pytest.raises(AuthError):
            talk.hear()
        talk.sock.close()


# --- workers on their control connection ---


class Rank:
    """A rank that has joined and speaks to the server message by message."""

    def __init__(self, job: Job, rank: int) -> None:
        self.who = Identity(job.address, job.name, job.token, rank)
        self.sock, self.welcome, _ = join(self.who, "auto")
        self.sock.settimeout(SOON)

    def lane(self, core: int, transport: str = "tcp") -> tuple[socket.socket, list[int]]:
        return open_lane(self.who, self.welcome, core, transport)

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


TABLE: dict[str, Any] = {
    "name": "t",
    "keys": [{"name": "k", "shape": [3], "dtype": 0, "strides": [], "group": 0}],
    "op": 0,
    "prescale": 1.0,
    "postscale": 1.0,
    "chunk_bytes": 4096,
    "model": True,
    "server": False,
    "shared": False,
    "states": 0,
    "deterministic": False,
    "staleness": 0,
    "first_keys_first": False,
    "compression": {"packing": 0, "parameter": 0.0},
}


def table(**changes: Any) -> dict[str, Any]:
    key = {name: changes.pop(name) for name in list(changes) if name in TABLE["keys"][0]}
    return {**TABLE, "keys": [{**TABLE["keys"][0], **key}], **changes}


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    "message",
    [
        {"op": "no such"},
        {"no": "op"},
        {"op": "register"},
        {"op": "register", "table": []},
        {"op": "register", "table": table(shape=[-1])},
        {"op": "register", "table": table(shape="abc")},
        {"op": "register", "table": table(dtype=99)},
        {"op": "register", "table": table(group=-1)},
        {"op": "register", "table": table(chunk_bytes=0)},
        {"op": "register", "table": {**TABLE, "keys": [1, 2]}},
        {"op": "register", "table": {**TABLE, "keys": None}},
        {"op": "register", "table": table(op=77)},
        {"op": "register", "table": table(prescale="x")},
        {"op": "register", "table": table(compression={"packing": 3, "parameter": -1})},
        {"op": "register", "table": table(shape=[1e999])},
        {"op": "register", "table": table(states=-1)},
        {"op": "register", "table": table(staleness=-1)},
    ],
)
def test_a_message_that_makes_no_sense_ends_its_job(pbox: Box, message: dict[str, Any]) -> None:
    job = pbox.job(2)
    honest = job.service(0)
    with Rank(job, 1) as hostile:
        protocol.send(hostile.sock, message)
        with pytest.raises(ProtocolError, match="rank 1"):
            honest.init({"w": np.zeros(3, np.float32)})
    honest.close()


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"shape": [1 << 60]}, "chunks"),
        ({"shape": [1 << 36]}, "MiB|chunks"),
        ({"group": 1 << 31}, "parameter groups"),
        ({"name": "n" * 5000}, "name"),
        ({"chunk_bytes": 1 << 20}, "was made for"),
        ({"chunk_bytes": 4097, "shape": [5000]}, "splits an element"),
        ({"shared": True, "server": True}, "shm lanes"),
        ({"states": 9, "server": True}, "3 at most"),
        ({"staleness": 1}, "optimizer on the server"),
    ],
)
def test_a_table_out_of_bounds_is_refused(pbox: Box, changes: dict[str, Any], text: str) -> None:
    with Rank(pbox.job(1, chunk_bytes=8192), 0) as rank:
        protocol.send(rank.sock, {"op": "register", "table": table(**changes)})
        with pytest.raises(ConfigError, match=text):
            protocol.raise_error(protocol.receive(rank.sock))


@pytest.mark.usefixtures("undisturbed")
def test_who_does_not_read_its_answers_holds_up_nobody(pbox: Box) -> None:
    job = pbox.job(2)
    honest = job.service(0)
    with Rank(job, 1) as hostile:
        hostile.sock.settimeout(0.05)
        question = struct.pack("<I", 16) + b'{"op":"stalled"}'
        with contextlib.suppress(OSError):  # the server gives it up
            while True:
                with contextlib.suppress(TimeoutError):
                    hostile.sock.send(question * 1000)
        with pytest.raises(PeerLost) as caught:
            honest.init({"w": np.zeros(3, np.float32)})
        assert caught.value.rank == 1
        # Losses in other jobs are still told to their ranks.
        one, two = pbox.job(2, "tcp").services()
        together(2, lambda rank: (one, two)[rank].init({"w": np.zeros(3, np.float32)}))
        hang_up(two._connection)
        with pytest.raises(PeerLost):
            one.push_pull("w", np.zeros(3, np.float32), SOON)
        one.close()
        two.close()
    honest.close()


# --- lanes ---


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"core": 2}, r"cores 0\.\.1"),
        ({"core": -1}, r"cores 0\.\.1"),
        ({"transport": "pigeon"}, "pigeon"),
        ({"transport": "shm"}, "shm"),  # over a TCP connection
    ],
)
def test_a_lane_that_cannot_be_is_refused(pbox: Box, changes: dict[str, Any], text: str) -> None:
    job = pbox.job(1)
    host, port = pbox.server.addresses[0]
    hello = {"core": 0, "transport": "tcp", **changes}
    with Rank(job, 0):
        talk = Talk(lambda: socket.create_connection((host, port)), "the server")
        talk.say(op="lane", job=job.name, rank=0, **hello)
        talk.prove(job.token, "lane", job.name, 0, hello["core"], hello["transport"])
        with pytest.raises(ConfigError, match=text):
            talk.hear()
        talk.sock.close()


def test_a_lane_without_a_control_connection_or_twice_is_refused(pbox: Box) -> None:
    job = pbox.job(2)
    with Rank(job, 0) as rank:
        stranger = Identity(job.address, job.name, job.token, 1)
        with pytest.raises(ConfigError, match="before its control connection"):
            open_lane(stranger, rank.welcome, 0, "tcp")
        first, _ = rank.lane(0)
        with pytest.raises(ConfigError, match="has a lane to core 0 already"):
            rank.lane(0)
        first.close()


@pytest.mark.usefixtures("undisturbed")
@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        frame(99),
        frame(1, id=1 << 30, length=12) + bytes(12),
        frame(1, length=0xFFFFFFFF),
        frame(1, sender=0),
        frame(17) * 100,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_garbage_on_a_lane_ends_its_job_and_names_the_rank(pbox: Box, data: bytes) -> None:
    job = pbox.job(2, "tcp")
    honest = job.service(0)
    with Rank(job, 1) as hostile:
        lane, _ = hostile.lane(1)
        lane.sendall(data)
        with pytest.raises(ProtocolError, match="rank 1"):
            honest.init({"w": np.zeros(3, np.float32)})
        lane.close()
    honest.close()


@pytest.mark.usefixtures("undisturbed")
def test_a_worker_that_scribbles_over_its_rings_ends_its_job(pbox: Box) -> None:
    rng = random.Random(3)
    for _ in range(5):
        job = pbox.job(2)
        honest = job.service(0)
        with Rank(job, 1) as hostile:
            lane, (memory,) = hostile.lane(0, "shm")
            with mmap.mmap(memory, 4096) as positions:
                positions[:] = rng.randbytes(4096)
            with contextlib.suppress(OSError):  # it may have seen it already
                lane.send(b"x")  # wakes the core
            with pytest.raises(ProtocolError, match="rank 1"):
                honest.init({"w": np.zeros(3, np.float32)})
            lane.close()
            os.close(memory)
        honest.close()


def refuses_to_shrink(memory: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(memory, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory, 1 << 30)


def refuses_to_be_written(memory: int) -> None:
    with pytest.raises(PermissionError):
        os.pwrite(memory, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(memory, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def test_rings_of_the_server_are_sealed(pbox: Box) -> None:
    job = pbox.job(1)
    with Rank(job, 0) as rank:
        lane, (rings,) = rank.lane(0, "shm")
        refuses_to_shrink(rings)
        lane.close()
        os.close(rings)


def test_a_shared_model_is_sealed(pbox: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[int] = []
    registers = PboxExchange._register

    def copies(exchange: PboxExchange) -> RegisteredTable:
        registered = registers(exchange)
        received.extend(os.dup(fd) for fd in registered.descriptors)  # mapping closes the others
        return registered

    monkeypatch.setattr(PboxExchange, "_register", copies)
    job = pbox.job(1)
    with job.exchange(0, spec_of([(1000,)], place="server", shared_model=True)):
        arena, *weights = received
        refuses_to_shrink(arena)
        assert len(weights) == 2
        for memory in weights:
            refuses_to_shrink(memory)
            refuses_to_be_written(memory)
    for memory in received:
        os.close(memory)
