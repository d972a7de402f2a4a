"""The ZMQ baseline's parts that need no socket: bounds, flow control, pieces, messages, sums."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from phub_collective.backends.base import ALIGNMENT, SGD, DType, Key, ReduceOp
from phub_collective.errors import ConfigError, MismatchError, PeerLost, ProtocolError
from phub_collective.kernels import reference

zmq = pytest.importorskip("zmq")

from phub_collective.backends.zmq_ps.flow import Flow  # noqa: E402
from phub_collective.backends.zmq_ps.job import Job, Reply  # noqa: E402
from phub_collective.backends.zmq_ps.limits import PIECE_BYTES, QUEUE_BYTES, Limits  # noqa: E402
from phub_collective.backends.zmq_ps.pieces import of_buffer, of_model  # noqa: E402
from phub_collective.backends.zmq_ps.threads import SERIAL_BYTES, Threads  # noqa: E402
from phub_collective.backends.zmq_ps.wire import (  # noqa: E402
    HEADER,
    Flag,
    Header,
    Message,
    MessageKind,
    pack_error,
    pack_hyper,
    unpack_error,
    unpack_hyper,
)


@pytest.fixture(scope="module")
def threads() -> Iterator[Threads]:
    made = Threads(3)
    yield made
    made.close()


# --- bounds ---


@pytest.mark.parametrize("workers", [1, 2, 8, 16, 17, 100, 1000])
def test_all_windows_together_are_within_the_bound(workers: int) -> None:
    limits = Limits.of(workers)
    assert 2 * workers * limits.window <= QUEUE_BYTES
    assert 2 * (limits.piece + HEADER.size) <= limits.window
    assert limits.piece % ALIGNMENT == 0
    assert (limits.piece == PIECE_BYTES) == (workers <= 15)


def test_workers_that_cannot_share_the_bound_are_refused() -> None:
    with pytest.raises(ConfigError, match="100 workers do not fit"):
        Limits.of(100, 1 << 10)


def message(nbytes: int) -> Message:
    return Message(Header(MessageKind.PUSH), np.zeros(nbytes, np.uint8))


def into(queue: list[Message]) -> Callable[[Message], bool]:
    """What a flow sends with, into a queue without an end."""

    def send(one: Message) -> bool:
        queue.append(one)
        return True

    return send


def test_a_flow_never_has_more_than_its_window_on_its_way() -> None:
    """Two ends, and messages of all sizes; whatever the receiver does, all of them arrive."""
    window, random = 10_000, np.random.default_rng(0)
    sender, receiver = Flow(window), Flow(window)
    sizes = random.integers(0, window // 2 - HEADER.size, 500)
    for size in sizes:
        sender.put(message(int(size)))
    queue: list[Message] = []
    arrived: list[int] = []
    while len(arrived) < len(sizes):
        sender.flush(into(queue))
        assert sum(one.nbytes for one in queue) <= window
        assert queue, "the sender waits for credits that do not come"
        for one in [queue.pop(0) for _ in range(random.integers(1, len(queue) + 1))]:
            arrived.append(len(one.payload))
            receiver.took(one.nbytes)
        credits: list[Message] = []
        receiver.flush(into(credits))
        for one in credits:
            assert one.header.kind == MessageKind.CREDIT
            sender.credited(one.header.nbytes)
    assert arrived == sizes.tolist()
    assert sender.idle


def test_a_message_that_zmq_does_not_take_stays_in_its_place() -> None:
    flow = Flow(1 << 20)
    taken: list[Message] = []
    flow.put(message(10))
    flow.put(message(20))
    assert not flow.flush(lambda one: False)
    assert not flow.flush(lambda one: len(one.payload) == 10)
    assert flow.flush(into(taken))
    assert [len(one.payload) for one in taken] == [20]


# --- pieces ---


def test_keys_are_cut_at_4_mib_and_balanced_over_the_servers() -> None:
    keys = [
        Key("fc", (2_500_000,), DType.FLOAT32),
        Key("none", (0,), DType.FLOAT32),
        Key("bias", (10,), DType.FLOAT32),
    ]
    fc, none, bias = of_model(keys, PIECE_BYTES, 2)
    assert [piece.end - piece.begin for piece in fc] == [4 << 20, 4 << 20, 10_000_000 - (8 << 20)]
    assert [piece.server for piece in fc[:2]] == [0, 1]
    assert none == []
    assert (bias[0].begin, bias[0].end) == (10_000_000, 10_000_040)
    assert [piece.number for piece in (*fc, *bias)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("nbytes", "count"), [(0, 1), (1, 1), (100, 1), (101, 2), (1000, 10)])
def test_a_buffer_is_covered_once(nbytes: int, count: int) -> None:
    pieces = of_buffer(nbytes, 100, 3, table=7)
    assert len(pieces) == count
    assert [piece.begin for piece in pieces] == [100 * number for number in range(count)]
    assert [piece.end for piece in pieces[:-1]] == [piece.begin for piece in pieces[1:]]
    assert pieces[-1].end == nbytes
    assert [piece.server for piece in pieces] == [(7 + number) % 3 for number in range(count)]


# --- messages ---


def test_headers_and_hyperparameters_travel() -> None:
    header = Header(MessageKind.PUSH, 3, 2, Flag.ADOPT, 65535, 1 << 31, 5, 6, 4 << 20, 0.5, 0.25)
    assert Header.unpack(header.pack()) == header
    hyper = SGD(0.1, 0.9, 0.0, 1e-4, nesterov=True, maximize=False)
    assert unpack_hyper(pack_hyper(hyper)) == hyper
    error = unpack_error(pack_error(PeerLost("gone", 3)))
    assert isinstance(error, PeerLost)
    assert (str(error), error.rank) == ("gone", 3)


def test_other_bytes_are_protocol_errors() -> None:
    for data in (b"", b"x" * (HEADER.size + 1)):
        with pytest.raises(ProtocolError, match=f"header of {HEADER.size} bytes"):
            Header.unpack(data)
    with pytest.raises(ProtocolError, match="hyperparameters of 3 bytes"):
        unpack_hyper(b"abc")
    for data in (b"\xff", b"[]", b'{"error": "x"}'):
        assert isinstance(unpack_error(data), ProtocolError)


# --- sums ---


def test_threads_cover_every_element_once(threads: Threads) -> None:
    for count in (0, 1, SERIAL_BYTES // 4 - 1, SERIAL_BYTES // 4, 1_000_001):
        touched, names, lock = np.zeros(count, np.int32), set(), threading.Lock()

        def work(begin: int, end: int) -> None:
            touched[begin:end] += 1  # noqa: B023
            with lock:  # noqa: B023
                names.add(threading.current_thread().name)  # noqa: B023

        threads.run(count, 4, work)
        assert (touched == 1).all()
        assert len(names) == 1 or count * 4 >= SERIAL_BYTES


def test_an_error_in_any_thread_is_raised(threads: Threads) -> None:
    def work(begin: int, end: int) -> None:
        if begin > 0:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        threads.run(1 << 20, 4, work)


def push(
    dtype: DType, count: int, step: int = 0, op: int = 0, flags: int = 0, **more: Any
) -> Header:
    header = Header(MessageKind.PUSH, dtype, op, flags, table=1, piece=2, step=step)
    return header._replace(nbytes=count * dtype.itemsize, **more)


def answer(replies: list[Reply]) -> np.ndarray:
    (reply,) = replies
    assert reply.header.kind == MessageKind.ANSWER, bytes(reply.payload)
    return np.array(reply.payload)


def error_in(replies: list[Reply]) -> Exception:
    (reply,) = replies
    assert reply.header.kind == MessageKind.ERROR
    return unpack_error(reply.payload)


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("op", ReduceOp)
def test_sums_are_those_of_the_reference(threads: Threads, dtype: DType, op: ReduceOp) -> None:
    """Bit by bit, in the order of arrival; also where one rank has nothing, over some steps."""
    if dtype is DType.BOOL and op is ReduceOp.AVERAGE:
        pytest.skip("refused before it comes here")
    job, count, random = Job(3, threads), 70_001, np.random.default_rng(1)
    pre = 0.5 if dtype.is_floating else 1.0
    scale = reference.Scale(pre, 3.0 if dtype.is_floating else 1.0, 1)
    if op is ReduceOp.AVERAGE:
        scale = reference.Scale(pre, scale.post / 3, 3)
    post = 3.0 if dtype.is_floating else 1.0
    for step in range(3):
        arrays = [
            reference.narrow(random.integers(0, 5, count).astype(np.float32), dtype).astype(
                dtype.stored, copy=False
            )
            for _ in range(3)
        ]
        given = arrays[1:] if step == 1 else arrays
        header = push(dtype, count, step, op, prescale=pre, postscale=post)
        for rank, array in enumerate(arrays):
            if rank == 0 and step == 1:
                replies = job.take(0, header._replace(flags=Flag.EMPTY), None)
            else:
                replies = job.take(rank, header, array.view(np.uint8))
        expected = reference.reduce(dtype, op, given, scale)
        np.testing.assert_array_equal(answer(replies).view(dtype.stored), expected)


def test_an_answer_stands_while_the_next_step_is_summed(threads: Threads) -> None:
    job = Job(2, threads)
    one = np.ones(100, np.float32).view(np.uint8)
    job.take(0, push(DType.FLOAT32, 100), one)
    (first,) = job.take(1, push(DType.FLOAT32, 100), one)
    job.take(0, push(DType.FLOAT32, 100, step=1), one)
    np.testing.assert_array_equal(first.payload.view(np.float32), np.full(100, 2))


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16])
def test_weights_are_those_of_the_reference(threads: Threads, dtype: DType) -> None:
    job, count, random = Job(2, threads), 70_001, np.random.default_rng(2)
    hyper = SGD(0.01, 0.9, 0.1, 1e-3, nesterov=False, maximize=True)
    wide = np.float64 if dtype is DType.FLOAT64 else np.float32
    stored = reference.narrow(random.standard_normal(count).astype(wide), dtype)
    for rank in (1, 0):
        header = Header(MessageKind.HYPER, table=1, group=3)
        job.take(rank, header, np.frombuffer(pack_hyper(hyper), np.uint8))
    header = push(dtype, count, flags=Flag.OPTIMIZE | Flag.ADOPT)._replace(group=3)
    job.take(0, header._replace(flags=header.flags | Flag.EMPTY), None)
    to_root, to_others = job.take(1, header, stored.view(np.uint8))
    assert (to_root.ranks, to_root.payload, to_others.ranks) == ([1], None, [0])
    np.testing.assert_array_equal(to_others.payload.view(dtype.stored), stored)
    weights, momentum = reference.widen(stored, dtype), None
    header = push(dtype, count, op=ReduceOp.AVERAGE, flags=Flag.OPTIMIZE)._replace(group=3)
    for step in range(1, 5):
        header = header._replace(step=step)
        arrays = [
            reference.narrow(random.standard_normal(count).astype(wide), dtype) for _ in range(2)
        ]
        job.take(0, header, arrays[0].view(np.uint8))
        got = answer(job.take(1, header, arrays[1].view(np.uint8)))
        total = reference.accumulate(dtype, ReduceOp.SUM, arrays)
        weights, momentum = reference.sgd(hyper, weights, momentum, total, 0.5)
        np.testing.assert_array_equal(got.view(dtype.stored), reference.narrow(weights, dtype))
    header = header._replace(step=5, flags=Flag.OPTIMIZE | Flag.EMPTY)
    job.take(0, header, None)
    unchanged = answer(job.take(1, header, None))
    np.testing.assert_array_equal(unchanged.view(dtype.stored), reference.narrow(weights, dtype))


def test_hyperparameters_must_be_equal(threads: Threads) -> None:
    job, values = Job(2, threads), np.ones(5, np.float32).view(np.uint8)

    def set_hyper(rank: int, lr: float) -> None:
        header = Header(MessageKind.HYPER, table=1)
        job.take(rank, header, np.frombuffer(pack_hyper(SGD(lr)), np.uint8))

    header = push(DType.FLOAT32, 5, flags=Flag.OPTIMIZE)
    job.take(0, header._replace(flags=Flag.OPTIMIZE | Flag.ADOPT), values)
    job.take(1, header._replace(flags=Flag.OPTIMIZE | Flag.ADOPT | Flag.EMPTY), None)
    set_hyper(0, 0.5)
    job.take(0, header._replace(step=1), values)
    error = error_in(job.take(1, header._replace(step=1), values))
    assert isinstance(error, MismatchError)
    assert "rank 1 has not set hyperparameters" in str(error)

    job, header = Job(2, threads), header._replace(step=0)
    set_hyper(0, 0.5)
    set_hyper(1, 0.25)
    job.take(0, header._replace(flags=Flag.OPTIMIZE | Flag.ADOPT), values)
    job.take(1, header._replace(flags=Flag.OPTIMIZE | Flag.ADOPT | Flag.EMPTY), None)
    job.take(0, header._replace(step=1), values)
    error = error_in(job.take(1, header._replace(step=1), values))
    assert "rank 0 has lr 0.5" in str(error)
    assert "rank 1 has lr 0.25" in str(error)


def test_a_gradient_before_the_weights_is_an_error(threads: Threads) -> None:
    job, values = Job(1, threads), np.ones(5, np.float32).view(np.uint8)
    error = error_in(job.take(0, push(DType.FLOAT32, 5, flags=Flag.OPTIMIZE), values))
    assert isinstance(error, ConfigError)
    assert "initialize" in str(error)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (push(DType.FLOAT32, 5, step=1), "step 1"),
        (push(DType.FLOAT32, 6), "20 bytes as a piece of 24"),
        (push(DType.INT32, 5), "as one piece"),
        (push(DType.FLOAT32, 5, op=ReduceOp.MAX), "as one piece"),
        (push(DType.FLOAT32, 5, flags=Flag.EMPTY), "20 bytes"),
    ],
)
def test_what_does_not_fit_is_an_error_for_all(threads: Threads, second: Header, said: str) -> None:
    job, values = Job(2, threads), np.ones(5, np.float32).view(np.uint8)
    job.take(0, push(DType.FLOAT32, 5), values)
    (reply,) = job.take(1, second, values)
    assert reply.ranks == [0, 1]
    error = unpack_error(reply.payload)
    assert isinstance(error, ProtocolError)
    assert said in str(error)


@pytest.mark.parametrize(
    "header",
    [push(DType.FLOAT32, 5)._replace(dtype=99), push(DType.FLOAT32, 5)._replace(op=99)],
)
def test_an_unknown_type_is_an_error(threads: Threads, header: Header) -> None:
    error = error_in(Job(2, threads).take(0, header, np.zeros(20, np.uint8)))
    assert isinstance(error, ProtocolError)
    assert "no known type" in str(error)


def test_who_is_missing_is_told(threads: Threads) -> None:
    job = Job(3, threads)
    question = Header(MessageKind.MISSING, table=1, piece=2)

    def missing() -> list[int]:
        (reply,) = job.take(1, question, None)
        assert reply.ranks == [1]
        ranks: list[int] = reply.payload.view(np.uint32).tolist()
        return ranks

    assert missing() == [0, 1, 2]
    job.take(1, push(DType.FLOAT32, 5), np.zeros(20, np.uint8))
    assert missing() == [0, 2]


def test_who_waits_for_one_that_left_is_told_and_so_is_who_comes_later(threads: Threads) -> None:
    job, values = Job(3, threads), np.zeros(20, np.uint8)
    job.take(2, push(DType.FLOAT32, 5), values)
    bye = Header(MessageKind.BYE)
    (reply,) = job.take(0, bye, None)
    assert reply.ranks == [2]
    (late,) = job.take(1, push(DType.FLOAT32, 5), values)
    assert late.ranks == [1]
    for one in (reply, late):
        error = unpack_error(one.payload)
        assert isinstance(error, PeerLost)
        assert error.rank == 0
        assert "rank 0 closed its backend" in str(error)
    assert job.leave(0, "was lost") == []  # it has left already


def test_what_a_rank_had_pushed_before_it_left_is_answered(threads: Threads) -> None:
    job, values = Job(2, threads), np.zeros(20, np.uint8)
    job.take(0, push(DType.FLOAT32, 5), values)
    assert job.take(0, Header(MessageKind.BYE), None) == []
    answer(job.take(1, push(DType.FLOAT32, 5), values))


def test_a_dropped_table_is_an_error_for_who_goes_on(threads: Threads) -> None:
    job, values = Job(2, threads), np.zeros(20, np.uint8)
    job.take(0, push(DType.FLOAT32, 5), values)
    drop = Header(MessageKind.DROP, table=1)
    error = error_in(job.take(1, drop, None))
    assert isinstance(error, PeerLost)
    assert error.rank == 1
    assert job.take(0, drop, None) == []
    job.take(0, push(DType.FLOAT32, 5), values)  # another table, after the last rank's drop
    answer(job.take(1, push(DType.FLOAT32, 5), values))


def test_a_table_with_one_use_is_forgotten(threads: Threads) -> None:
    job, values = Job(1, threads), np.zeros(20, np.uint8)
    header = push(DType.FLOAT32, 5, flags=Flag.ONCE)
    for _ in range(2):
        answer(job.take(0, header, values))  # both are the first use
