"""The rendezvous, over both of its forms: threads of one process, and the TCP store."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from phub_collective.errors import AuthError, PeerLost, PeerTimeout, PhubError
from phub_collective.rendezvous import LocalRendezvous, Rendezvous, StoreRendezvous
from phub_collective.rendezvous.store import StoreServer, wire

T = TypeVar("T")
R = TypeVar("R", bound=Rendezvous)
Join = Callable[[int], Sequence[Rendezvous]]


def together(ranks: Sequence[R], act: Callable[[R], T]) -> list[T]:
    """Run `act` on all ranks at once; the results in rank order."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [one.result(timeout=30) for one in [pool.submit(act, rank) for rank in ranks]]


@pytest.fixture
def server() -> Iterator[StoreServer]:
    store = StoreServer()
    yield store
    store.close()


@pytest.fixture(params=["local", "store"])
def join(request: pytest.FixtureRequest, server: StoreServer) -> Iterator[Join]:
    made: list[Rendezvous] = []

    def make(size: int) -> Sequence[Rendezvous]:
        address = [("127.0.0.1", server.port)]
        made.extend(
            LocalRendezvous.group(size)
            if request.param == "local"
            else [StoreRendezvous(address, server.secret, rank, size) for rank in range(size)]
        )
        return made

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_gather_is_in_rank_order_use_by_use(join: Join, size: int) -> None:
    def three_uses(one: Rendezvous) -> list[list[bytes]]:
        return [one.all_gather("k", f"{one.rank}.{use}".encode()) for use in range(3)]

    expected = [[f"{rank}.{use}".encode() for rank in range(size)] for use in range(3)]
    assert together(join(size), three_uses) == [expected] * size


def test_empty_and_large_values_pass(join: Join) -> None:
    large = os.urandom(3 << 20)
    values = [b"", large, b"\0"]
    assert together(join(3), lambda one: one.all_gather("v", values[one.rank])) == [values] * 3


def test_get_waits_for_put(join: Join) -> None:
    one, two = join(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(two.get, "address", 20)
        one.put("address", b"here")
        assert waiting.result(timeout=30) == b"here"
    one.put("address", b"moved")
    assert two.get("address") == b"moved"


def test_a_waiting_thread_does_not_hold_up_another_of_its_rank(join: Join) -> None:
    (one,) = join(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.get, "later", 20)
        one.put("other", b"1")
        assert one.get("other") == b"1"
        one.put("later", b"2")
        assert waiting.result(timeout=30) == b"2"


def test_timeouts_name_key_and_missing_ranks(join: Join) -> None:
    ranks = join(4)
    with pytest.raises(PeerTimeout, match="rank 1 waited for key 'nothing'"):
        ranks[1].get("nothing", timeout=0.05)
    with pytest.raises(PeerTimeout, match="ranks 1, 2 did not come") as caught:
        together([ranks[0], ranks[3]], lambda one: one.all_gather("step", b"", timeout=0.3))
    assert caught.value.ranks == (1, 2)


def test_barrier_holds_until_the_last_comes(join: Join) -> None:
    first, last = join(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.barrier)
        with pytest.raises(PeerTimeout):
            last.get("never", timeout=0.2)
        assert not waiting.done()
        last.barrier()
        waiting.result(timeout=10)


def test_waiting_for_a_rank_that_left_ends_at_once(join: Join) -> None:
    one, two = join(2)
    two.close()
    started = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 died or left") as caught:
        one.all_gather("end", b"", timeout=30)
    assert caught.value.rank == 1
    assert time.monotonic() - started < 5


def test_a_key_that_came_before_its_rank_left_is_still_there(join: Join) -> None:
    one, two = join(2)
    two.put("address", b"x")
    two.close()
    assert one.get("address") == b"x"


def test_a_failing_thread_is_lost_to_the_others() -> None:
    one, two = LocalRendezvous.group(2)

    def fail() -> None:
        with two:
            raise ValueError("this rank fails")

    with pytest.raises(ValueError, match="fails"):
        fail()
    with pytest.raises(PeerLost, match="rank 1 died"):
        one.get("from rank 1", timeout=30)


MEMBER = """
import sys
from phub_collective.rendezvous import StoreRendezvous
secret = bytes.fromhex(sys.stdin.readline())
one = StoreRendezvous([("127.0.0.1", int(sys.argv[1]))], secret, int(sys.argv[2]), 3)
one.all_gather("up", b"")
one.get("never", timeout=60)
"""


def test_a_killed_process_is_named_at_once_by_all_others(server: StoreServer) -> None:
    address = [("127.0.0.1", server.port)]
    victim = subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(server.port), "2"], stdin=subprocess.PIPE
    )
    try:
        assert victim.stdin is not None
        victim.stdin.write(server.secret.hex().encode() + b"\n")
        victim.stdin.flush()
        survivors = [StoreRendezvous(address, server.secret, rank, 3) for rank in range(2)]
        together(survivors, lambda one: one.all_gather("up", b""))
    finally:
        victim.send_signal(signal.SIGKILL)
        victim.wait(10)

    def lost(one: StoreRendezvous) -> int:
        with pytest.raises(PeerLost, match="rank 2 died") as caught:
            one.all_gather("next", b"", timeout=30)
        return caught.value.rank

    started = time.monotonic()
    assert together(survivors, lost) == [2, 2]
    assert time.monotonic() - started < 5


def test_a_rank_may_come_again(server: StoreServer) -> None:
    address = [("127.0.0.1", server.port)]
    for life in (b"first", b"second"):
        ranks = [StoreRendezvous(address, server.secret, rank, 2) for rank in range(2)]
        gathered = together(
            ranks, functools.partial(StoreRendezvous.all_gather, key="k", value=life)
        )
        assert gathered == [[life, life]] * 2
        for one in ranks:
            one.close()


def test_wrong_secret_is_refused(server: StoreServer) -> None:
    with pytest.raises(AuthError, match="same job"):
        StoreRendezvous([("127.0.0.1", server.port)], b"wrong", 0, 1)


def test_a_server_that_does_not_know_the_secret_is_not_trusted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(wire.pack(b"n" * wire.NONCE_BYTES))
                wire.receive(peer, wire.MAX_HELLO)
                peer.sendall(wire.pack(b"0", b"p" * 32))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(AuthError, match="wrong proof"):
            StoreRendezvous([listener.getsockname()], b"secret", 0, 1)
        thread.join(10)


def test_the_first_address_that_proves_itself_is_taken(server: StoreServer) -> None:
    with StoreServer() as other_job, socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = taken.getsockname()
        taken.close()
        addresses = [nobody, ("127.0.0.1", other_job.port), ("127.0.0.1", server.port)]
        with StoreRendezvous(addresses, server.secret, 0, 1) as one:
            assert one.all_gather("k", b"v") == [b"v"]


def test_nobody_there_is_an_error_after_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    with pytest.raises(PeerTimeout, match="gave up after 0.2 s"):
        StoreRendezvous([address], b"s", 0, 1, connect_timeout=0.2)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0" * 64, b"\4\0\0\0\1\1\1\1"]
)
def test_garbage_closes_its_own_connection_only(server: StoreServer, garbage: bytes) -> None:
    with StoreRendezvous([("127.0.0.1", server.port)], server.secret, 0, 1) as one:
        with socket.create_connection(("127.0.0.1", server.port), 10) as stranger:
            stranger.sendall(garbage)
            received = stranger.recv(1 << 10)
            while received:  # the challenge, then the end
                received = stranger.recv(1 << 10)
        assert one.all_gather("k", b"v") == [b"v"]


def test_a_lost_server_is_an_error_at_once(server: StoreServer) -> None:
    one = StoreRendezvous([("127.0.0.1", server.port)], server.secret, 0, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.get, "never", 30)
        server.close()
        with pytest.raises(PeerLost, match="lost the job's store"):
            waiting.result(timeout=10)
    one.close()
    with pytest.raises(PhubError, match="after close"):
        one.put("k", b"v")


def test_a_closing_server_hands_out_what_is_due() -> None:
    with StoreServer() as server:
        address = [("127.0.0.1", server.port)]
        ranks = [StoreRendezvous(address, server.secret, rank, 2) for rank in range(2)]
        large = bytes(8 << 20)

        def last(one: StoreRendezvous) -> int:
            gathered = one.all_gather("last", large)
            if one.rank == 0:
                server.close()
            return len(gathered)

        assert together(ranks, last) == [2, 2]
