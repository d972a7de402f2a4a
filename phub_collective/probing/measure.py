"""Measures the links between the hosts of a job, however many ranks each has.

For each direction of each pair: pings, for the latency, and then a stream, whose receiver takes the
rate. One rank of each host takes part, over the TCP connections of a mesh; which pairs do so at the
same time says the tournament.

    ping    (sender)    "p", answered by the same        as often as there is time for, then "s"
    stream  (sender)    block{BLOCK_BYTES} ...            a block begins with 1, the last with 0
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from phub_collective.backends.base import Context
from phub_collective.backends.mesh_lanes import connect_all
from phub_collective.errors import PeerLost, PeerTimeout
from phub_collective.probing.matrix import Host, Matrix
from phub_collective.probing.tournament import Pair, Turn, turns
from phub_collective.rendezvous.hosts import hosts_of
from phub_collective.rendezvous.store.wire import keep_alive

SECONDS = 0.5  # of a stream, unless the caller says another time
PINGS, PING_S = 50, 0.25  # at most, and for about so long at most
PING, STOP = b"p", b"s"
BLOCK_BYTES = 64 << 10
MORE, LAST = b"\1", b"\0"
# Of a stream's time, its beginning does not count: connections start slowly, and a shaper's full
# bucket lets the first bytes pass at once.
SKIPPED = 0.25

Result = TypeVar("Result")


def measure(
    context: Context, seconds: float = SECONDS, alone: bool = False, per_rank: bool = False
) -> Matrix:
    """Bandwidth and latency between all hosts; equal on all ranks. Collective.

    Args:
        seconds: of each stream.
        alone: one pair at a time, where links are shared beyond the hosts' own.
        per_rank: every rank counts as a host of its own.

    Raises:
        PeerLost, PeerTimeout: another rank died or was silent for config.timeout seconds.
    """
    rendezvous = context.rendezvous
    members = [[rank] for rank in range(context.size)] if per_rank else hosts_of(rendezvous)
    names = rendezvous.all_gather("probe.name", socket.gethostname().encode())
    hosts = [Host(names[ranks[0]].decode(), tuple(ranks)) for ranks in members]
    bandwidth: list[list[float | None]] = [[None] * len(hosts) for _ in hosts]
    latency: list[list[float | None]] = [[None] * len(hosts) for _ in hosts]
    with _connected(context) as sockets:
        prober = _Prober(context, hosts, sockets, seconds)
        for turn in turns(len(hosts), alone):
            for (sender, receiver), (trip, rate) in prober.take(turn).items():
                latency[sender][receiver], bandwidth[sender][receiver] = trip, rate
    return Matrix(tuple(hosts), _frozen(bandwidth), _frozen(latency), alone)


def _frozen(square: list[list[float | None]]) -> tuple[tuple[float | None, ...], ...]:
    return tuple(tuple(line) for line in square)


@contextlib.contextmanager
def _connected(context: Context) -> Iterator[dict[int, socket.socket]]:
    """A TCP connection to every other rank, also to those with which memory could be shared."""
    over_tcp = dataclasses.replace(context, config=dataclasses.replace(context.config, lane="tcp"))
    sockets: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        for link in connect_all(over_tcp, "probe", None, -1, 0):  # no core, bell, rings: no memory
            stack.callback(link.close)
            keep_alive(link.sock)
            link.sock.settimeout(context.config.timeout)
            sockets[link.peer] = link.sock
        yield sockets


class _Prober:
    """One rank's part; only the lowest rank of a host measures."""

    def __init__(
        self,
        context: Context,
        hosts: Sequence[Host],
        sockets: dict[int, socket.socket],
        seconds: float,
    ) -> None:
        self._rank, self._rendezvous = context.rank, context.rendezvous
        self._leaders = [host.ranks[0] for host in hosts]
        self._sockets, self._seconds = sockets, seconds

    def take(self, turn: Turn) -> dict[Pair, tuple[float, float]]:
        """(latency, bandwidth) of each pair of a turn. Collective."""
        trip = self._talk(turn, ping, answer)
        self._rendezvous.barrier("probe.pinged")  # streams of other pairs would delay pings
        rate = self._talk(turn, lambda sock: stream(sock, self._seconds), receive)
        mine = json.dumps([trip, rate]).encode()
        told = [json.loads(one) for one in self._rendezvous.all_gather("probe.turn", mine)]
        return {
            (sender, receiver): (told[self._leaders[sender]][0], told[self._leaders[receiver]][1])
            for sender, receiver in turn
        }

    def _talk(
        self,
        turn: Turn,
        as_sender: Callable[[socket.socket], Result],
        as_receiver: Callable[[socket.socket], Result],
    ) -> Result | None:
        """This rank's role in a turn; None where it has none."""
        for sender, receiver in turn:
            ends = self._leaders[sender], self._leaders[receiver]
            if self._rank == ends[0]:
                return self._with(ends[1], as_sender)
            if self._rank == ends[1]:
                return self._with(ends[0], as_receiver)
        return None

    def _with(self, peer: int, role: Callable[[socket.socket], Result]) -> Result:
        sock = self._sockets[peer]
        what = f"[probe] rank {self._rank} measured the link to rank {peer}"
        try:
            return role(sock)
        except TimeoutError as error:
            limit = sock.gettimeout()
            raise PeerTimeout(f"{what}, which was silent for {limit:g} s", (peer,)) from error
        except OSError as error:
            raise PeerLost(f"{what}, which is gone ({error}); see its output", peer) from error


def ping(sock: socket.socket) -> float | None:
    """Seconds of half a round trip: the median, without the first, which wakes the other up."""
    trips: list[float] = []
    end = time.monotonic() + PING_S
    while len(trips) < 2 or (len(trips) < PINGS and time.monotonic() < end):
        begin = time.perf_counter()
        sock.sendall(PING)
        _fill(sock, memoryview(bytearray(len(PING))))
        trips.append(time.perf_counter() - begin)
    sock.sendall(STOP)
    return statistics.median(trips[1:]) / 2


def answer(sock: socket.socket) -> float | None:
    """The other end of `ping`; it measures nothing."""
    told = bytearray(len(PING))
    while True:
        _fill(sock, memoryview(told))
        if told == STOP:
            return None
        sock.sendall(told)


def stream(sock: socket.socket, seconds: float) -> float | None:
    """Send blocks for so long, at least two; it measures nothing."""
    more = MORE.ljust(BLOCK_BYTES, b"\0")
    end = time.monotonic() + seconds
    sock.sendall(more)
    while time.monotonic() < end:
        sock.sendall(more)
    sock.sendall(LAST.ljust(BLOCK_BYTES, b"\0"))
    return None


def receive(sock: socket.socket) -> float | None:
    """The other end of `stream`: bytes per second."""
    block, arrivals = bytearray(BLOCK_BYTES), []
    while True:
        _fill(sock, memoryview(block))
        arrivals.append(time.perf_counter())
        if block[:1] == LAST:
            return steady_rate(arrivals, BLOCK_BYTES)


def steady_rate(arrivals: Sequence[float], nbytes: int) -> float:
    """Bytes per second of blocks of `nbytes` that were complete at these rising times, two at
    least, without the first part of the time (SKIPPED)."""
    last = len(arrivals) - 1
    begin = arrivals[0] + SKIPPED * (arrivals[last] - arrivals[0])
    first = min(bisect_left(arrivals, begin), last - 1)
    return (last - first) * nbytes / (arrivals[last] - arrivals[first])


def _fill(sock: socket.socket, view: memoryview) -> None:
    """Receive until `view` is full; ConnectionError at the end of the stream."""
    while view:
        count = sock.recv_into(view)
        if count == 0:
            raise ConnectionError("the connection was closed")
        view = view[count:]
