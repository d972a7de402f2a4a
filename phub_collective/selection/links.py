"""What measured links between hosts (`phub probe`) say about the backends that use them. Pure.

A backend is as fast as its slowest link: a ring that between two neighbours, a PBox that of the
slowest worker. The selector measures backends over these same links, so its choice already holds
what is predicted here; this says which link it is, and what two levels would change.

Every pair of hosts counts as if it had a link of its own: a core that pairs share makes what uses
it at once slower than this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from math import inf
from typing import NamedTuple

from phub_collective.backends import schedule
from phub_collective.probing.groups import bandwidth_between
from phub_collective.probing.matrix import Matrix
from phub_collective.probing.tournament import turns
from phub_collective.selection import costmodel
from phub_collective.selection.costmodel import Form, Parameters
from phub_collective.selection.hierarchy import Racks

Flows = Counter[tuple[int, int]]  # ranks that send at the same time, by (sending, receiving) host
PLANS: dict[Callable[[int, int], Form], Callable[[int, int, int], list[schedule.Step]]] = {
    costmodel.ring: schedule.ring,
    costmodel.halving_doubling: schedule.halving_doubling,
}


class Bottleneck(NamedTuple):
    """The link that holds a backend up, between two hosts.

    Attributes:
        flows: ranks that send over it at the same time.
        bandwidth: bytes per second that each of them gets.
    """

    sender: int
    receiver: int
    flows: int
    bandwidth: float


def bottleneck(backend: str, matrix: Matrix) -> Bottleneck | None:
    """Where one rank's flow gets least; None where all ranks are on one host."""
    found: Bottleneck | None = None
    for flows in _flows(backend, matrix):
        for (sender, receiver), count in sorted(flows.items()):
            share = _value(matrix.bandwidth[sender][receiver]) / count
            if found is None or share < found.bandwidth:
                found = Bottleneck(sender, receiver, count, share)
    return found


def parameters(backend: str, matrix: Matrix) -> Parameters | None:
    """Those of the cost model, from links in place of a fit to measured times; None where all
    ranks are on one host. The time of summing is not in them."""
    found = bottleneck(backend, matrix)
    if found is None:
        return None
    uses = {link for flows in _flows(backend, matrix) for link in flows}
    latency = max(_value(matrix.latency[a][b]) for a, b in uses)
    bandwidth = found.bandwidth
    if costmodel.FORMS.get(backend) is costmodel.pbox:
        # Its form counts what all workers send to the server, whose own link carries at least the
        # fastest rate seen there.
        (pushes, _) = _flows(backend, matrix)
        fastest = max(_value(matrix.bandwidth[a][b]) for a, b in pushes)
        per_byte = max(1 / found.bandwidth, pushes.total() / fastest)
        bandwidth = matrix.size / per_byte
    return Parameters(latency, bandwidth)


def racks_of(matrix: Matrix, uplink: float | None = None, pbox_link: float | None = None) -> Racks:
    """The groups of hosts as racks, for the estimate of hierarchy.py.

    Args:
        uplink, pbox_link: bytes per second each way; None: the most that was seen to cross a
            group's border at once, which is a lower bound, and a worker's link.
    """
    groups = matrix.groups
    ranks = [len(host.ranks) for host in matrix.hosts]
    links = _host_links(matrix, groups)
    across = [
        _value(matrix.latency[a][b])
        for group in groups
        for a in group
        for b in range(len(ranks))
        if b not in group
    ]
    return Racks(
        tuple(sum(ranks[host] for host in group) for group in groups),
        min(link / count for link, count in zip(links, ranks, strict=True)),
        min(links) if pbox_link is None else pbox_link,
        _crossing(matrix, groups) if uplink is None else uplink,
        max(across, default=0.0),
    )


def _flows(backend: str, matrix: Matrix) -> Iterator[Flows]:
    """What goes over links at the same time, for each step of a backend. A PBox is taken to be on
    the first host, where a job starts one; of shards there is one on each host."""
    host_of = [matrix.host_of(rank) for rank in range(matrix.size)]
    form = costmodel.FORMS.get(backend, costmodel.ring)
    if form is costmodel.pbox:
        away = Counter(host for host in host_of if host != 0)
        yield Counter({(host, 0): count for host, count in away.items()})
        yield Counter({(0, host): count for host, count in away.items()})
        return
    if form is costmodel.pshard:
        here = Counter(host_of)
        yield Counter({(a, b): here[a] for a in here for b in here if a != b})
        yield Counter({(b, a): here[a] for a in here for b in here if a != b})
        return
    count = 1 << matrix.size.bit_length()  # elements: every piece of every block is whole
    plans = [PLANS[form](rank, matrix.size, count) for rank in range(matrix.size)]
    for steps in zip_longest(*plans):
        sends = (
            (host_of[rank], host_of[step.send_to])
            for rank, step in enumerate(steps)
            if step is not None and step.send_to != schedule.NOBODY
        )
        yield Counter(link for link in sends if link[0] != link[1])


def _host_links(matrix: Matrix, groups: Sequence[Sequence[int]]) -> list[float]:
    """Bytes per second of each host: its slowest link in its group, both directions counted; for
    a host alone its fastest to anybody, which is a lower bound."""
    hosts = range(len(matrix.hosts))
    found = {}
    for group in groups:
        for host in group:
            near = [bandwidth_between(matrix.bandwidth, host, b) for b in group if b != host]
            far = [bandwidth_between(matrix.bandwidth, host, b) for b in hosts if b != host]
            found[host] = min(near, default=max(far, default=inf))
    return [found[host] for host in hosts]


def _crossing(matrix: Matrix, groups: Sequence[Sequence[int]]) -> float:
    """The most that left, or entered, a group within one turn of the probe; of the group and the
    direction with the least of it."""
    least = inf
    for group in groups if len(groups) > 1 else ():
        leaving, entering = 0.0, 0.0
        for turn in turns(len(matrix.hosts), matrix.alone):
            rates = [(a in group, b in group, _value(matrix.bandwidth[a][b])) for a, b in turn]
            leaving = max(leaving, sum(rate for a, b, rate in rates if a and not b))
            entering = max(entering, sum(rate for a, b, rate in rates if b and not a))
        least = min(least, leaving, entering)
    return least


def _value(measured: float | None) -> float:
    """What stands outside of the diagonal of a matrix."""
    assert measured is not None
    return measured
