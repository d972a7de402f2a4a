"""A matrix of links as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from phub_collective.probing.groups import Square
from phub_collective.probing.matrix import Host, Matrix

GBIT = 8e-9  # Gbit/s of a byte per second
MICROSECOND = 1e6


def lines_of(matrix: Matrix) -> Iterator[str]:
    """Both tables, and the groups."""
    hosts = matrix.hosts
    how = "one pair at a time" if matrix.alone else "disjoint pairs at the same time"
    yield f"# {len(hosts)} hosts, {matrix.size} ranks; {how}"
    yield "# Gbit/s of TCP payload, from the hosts of the lines to those of the columns"
    yield from _table(hosts, matrix.bandwidth, GBIT)
    yield "# microseconds, half of a round trip"
    yield from _table(hosts, matrix.latency, MICROSECOND)
    groups = matrix.groups
    yield f"# {len(groups)} groups of hosts" if len(groups) > 1 else "# all hosts are one group"
    for number, group in enumerate(groups, 1):
        ranks = [rank for host in group for rank in hosts[host].ranks]
        yield f"group {number}: ranks {ranks_text(ranks)}"


def ranks_text(ranks: Sequence[int]) -> str:
    """ "0-3,6": runs of ranks."""
    ordered = sorted(ranks)
    ends = [a for a, b in pairwise(ordered) if b != a + 1] + ordered[-1:]
    begins = ordered[:1] + [b for a, b in pairwise(ordered) if b != a + 1]
    runs = zip(begins, ends, strict=True)
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _table(hosts: Sequence[Host], square: Square, factor: float) -> Iterator[str]:
    names = [f"{ranks_text(host.ranks)} {host.name}" for host in hosts]
    wide = max(map(len, names))
    yield " " * wide + "".join(f"{host.ranks[0]:>9}" for host in hosts)
    for name, line in zip(names, square, strict=True):
        cells = ("-" if value is None else f"{value * factor:.3g}" for value in line)
        yield f"{name:<{wide}}" + "".join(f"{cell:>9}" for cell in cells)
