"""The ZMQ baseline when something ends, is slow, or does not belong to the job."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ranks import run_processes, run_threads

from phub_collective.backends.base import (
    Buffer,
    Context,
    DType,
    ExchangeSpec,
    Key,
    Kind,
    Operation,
    ReduceOp,
)
from phub_collective.errors import PeerLost

zmq = pytest.importorskip("zmq")

from zmq_jobs import SOON, TOKEN, connected, running, view  # noqa: E402

from phub_collective.backends.zmq_ps import sockets  # noqa: E402
from phub_collective.backends.zmq_ps.client import Client  # noqa: E402
from phub_collective.backends.zmq_ps.latch import Latch  # noqa: E402
from phub_collective.backends.zmq_ps.limits import Limits  # noqa: E402
from phub_collective.backends.zmq_ps.link import Link  # noqa: E402
from phub_collective.backends.zmq_ps.slot import Slot  # noqa: E402
from phub_collective.backends.zmq_ps.wire import Header, Message, MessageKind  # noqa: E402

MIB = 1 << 20
TIMEOUT_S = 8.0
KEYS = [Key(f"p{index}", (1000,), DType.FLOAT32) for index in range(4)]
MODEL = ExchangeSpec("model", KEYS, ReduceOp.SUM)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, also as a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that nobody signals."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- the bound of the queue ---


def test_a_server_that_stands_still_queues_no_more_than_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 MiB are pushed at a server that may queue 8 MiB, half of them in this direction: what its
    worker gives to ZMQ is all that can be queued anywhere."""
    go, add, put = threading.Event(), Slot.add, sockets.put
    handed: list[int] = []

    def slow(self: Slot, rank: int, header: Header, payload: np.ndarray | None) -> bool:
        assert go.wait(SOON)
        return add(self, rank, header, payload)

    def counted(socket: sockets.Socket, message: Message, to: bytes | None = None) -> bool:
        if not put(socket, message, to):
            return False
        handed.extend([message.nbytes] if to is None else [])
        return True

    monkeypatch.setattr(Slot, "add", slow)
    monkeypatch.setattr(sockets, "put", counted)
    queue_bytes, total = 8 * MIB, 64 * MIB
    limits = Limits.of(1, queue_bytes)
    given, got = np.ones(total, np.uint8), np.zeros(total, np.uint8)
    with running(1, queue_bytes=queue_bytes) as server:
        context: sockets.Context = zmq.Context()
        link = Link(context, server.address, TOKEN, 0, 30.0)
        client = Client(context, [link], 0, limits.window, lambda lost: lost)
        client.start()
        starts = range(0, total, limits.piece)
        latch = Latch(len(starts))
        for piece, begin in enumerate(starts):
            part = slice(begin, begin + limits.piece)
            header = Header(MessageKind.PUSH, DType.UINT8, table=1, piece=piece)
            header = header._replace(nbytes=given[part].size)
            client.push(0, header, given[part], got[part], latch)
        until(lambda: sum(handed) > limits.window - limits.piece)
        time.sleep(0.3)
        assert sum(handed) <= limits.window <= queue_bytes // 2
        assert not latch.wait(0.0)
        go.set()
        assert latch.wait(SOON)
        latch.check()
        assert sum(handed) > total
        client.close(PeerLost("over"))
    assert (got == 1).all()


# --- strangers ---


def test_a_stranger_disturbs_nobody() -> None:
    def body(context: Context) -> None:
        backend = connected(context)
        exchange = backend.open_exchange(MODEL)
        for step in range(20):
            for key in range(len(KEYS)):
                view(exchange, key, MODEL)[...] = step
                exchange.push(key)
            exchange.wait(SOON)
            assert (view(exchange, 3, MODEL) == 2 * step).all()
            context.rendezvous.barrier("step", SOON)
        backend.close()

    with running(2) as server:
        strangers: sockets.Context = zmq.Context()
        for rank, password in enumerate(("", "a guess")):
            one = strangers.socket(zmq.DEALER)
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.ROUTING_ID, sockets.identity(rank))
            if password:
                one.setsockopt_string(zmq.PLAIN_USERNAME, sockets.USER)
                one.setsockopt_string(zmq.PLAIN_PASSWORD, password)
            one.connect(f"tcp://{server.address}")
            for _ in range(100):
                one.send_multipart([Header(MessageKind.BYE).pack()])
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port))) as garbage:
            garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            run_threads(2, body, zmq_servers=server.address, token=TOKEN)
        strangers.destroy(linger=0)


# --- losses ---


def test_a_killed_server_is_an_error_on_all_ranks() -> None:
    def body(context: Context) -> float:
        backend = connected(context)
        exchange = backend.open_exchange(MODEL)
        exchange.initialize(0)
        context.rendezvous.barrier("initialized", SOON)
        if backend.server_pid is not None:
            os.kill(backend.server_pid, signal.SIGKILL)
        begin = time.monotonic()
        with contextlib.suppress(PeerLost):
            exchange.push(context.rank)  # the other rank does not push this key
        with pytest.raises(PeerLost, match="lost the server at 127.0.0.1") as caught:
            exchange.wait_key(context.rank, SOON)
        assert caught.value.rank == -1
        seconds = time.monotonic() - begin
        for name in ("a", "b"):
            operation = Operation(Kind.ALLREDUCE, name, Buffer.of(np.ones(5, np.float32)))
            with pytest.raises(PeerLost):
                backend.submit(operation).wait(SOON)
        context.rendezvous.barrier("over", SOON)
        backend.close()
        return seconds

    assert max(run_threads(2, body)) < TIMEOUT_S


def die_in_mid_step(context: Context, victim: int) -> tuple[int, float]:
    """The rank that the survivor's error names, and the seconds until it came."""
    backend = connected(context)
    pid = context.rendezvous.all_gather("pid", str(backend.server_pid or 0).encode())[0]
    exchange = backend.open_exchange(MODEL)
    for key in range(len(KEYS)):
        if key == 2 and context.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange.push(key)
    begin = time.monotonic()
    with pytest.raises(PeerLost) as caught:
        exchange.wait()
    seconds = time.monotonic() - begin
    with contextlib.suppress(PeerLost):
        exchange.close()
    backend.close()
    until(lambda: is_gone(int(pid)))
    return caught.value.rank, seconds


@pytest.mark.parametrize("victim", [0, 1], ids=["starter of the server", "another"])
def test_a_killed_rank_is_named_and_no_server_stays(victim: int) -> None:
    outcomes = run_processes(2, die_in_mid_step, victim, dying={victim}, timeout=TIMEOUT_S)
    outcome = outcomes[1 - victim]
    assert outcome is not None
    lost, seconds = outcome
    assert lost == victim
    assert seconds < TIMEOUT_S


def test_a_rank_that_leaves_in_good_order_is_named() -> None:
    def body(context: Context) -> None:
        backend = connected(context)
        exchange = backend.open_exchange(MODEL)
        exchange.initialize(0)
        if context.rank == 1:
            exchange.push(0)
            backend.close()
            return
        exchange.push(0)
        exchange.wait_key(0, SOON)
        exchange.push(1)
        with pytest.raises(PeerLost, match="rank 1 closed its backend") as caught:
            exchange.wait_key(1, SOON)
        assert caught.value.rank == 1
        backend.close()

    run_threads(2, body)


def test_a_server_finds_out_who_cannot_be_reached() -> None:
    """A dedicated server ends also when its workers never said farewell."""
    with running(1) as server:
        context: sockets.Context = zmq.Context()
        link = Link(context, server.address, TOKEN, 0, 30.0)
        sockets.put(link.socket, Message(Header(MessageKind.CREDIT)))
        time.sleep(0.2)
        link.close(at_once=True)
        context.term()
