"""Matrices of links as a probe would find them, for tests of what is told from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from experiments import published

from phub_collective.probing.matrix import Host, Matrix

# The paper's Figure 6, hosts counted from 0.
FIGURE_6_GROUPS = [[host - 1 for host in group] for group in published.FIGURE_6_GROUPS]

GBIT = 1e9 / 8  # bytes per second
MICROSECOND = 1e-6

Square = list[list[float | None]]


def square(count: int, value: Callable[[int, int], float]) -> Square:
    """``value(sender, receiver)`` everywhere but on the diagonal."""
    hosts = range(count)
    return [[None if a == b else value(a, b) for b in hosts] for a in hosts]


def grouped(groups: Iterable[Iterable[int]], inside: float, across: float) -> Square:
    """One value between hosts of a group, another between others."""
    sets = [set(group) for group in groups]
    count = sum(map(len, sets))
    return square(count, lambda a, b: inside if any({a, b} <= one for one in sets) else across)


def figure_6() -> Square:
    """Gbit/s between the paper's eight hosts."""
    return grouped(FIGURE_6_GROUPS, published.FIGURE_6_INSIDE, published.FIGURE_6_ACROSS)


def matrix_of(
    gbits: Square, ranks: Sequence[Sequence[int]] | None = None, alone: bool = False
) -> Matrix:
    """A matrix of these Gbit/s; 100 us between all. `ranks` of each host: one, if not given."""
    count = len(gbits)
    hosts = tuple(
        Host(f"node{i}", tuple(ranks[i]) if ranks is not None else (i,)) for i in range(count)
    )
    latency = square(count, lambda a, b: 100 * MICROSECOND)
    return Matrix(
        hosts,
        tuple(tuple(None if one is None else one * GBIT for one in line) for line in gbits),
        tuple(tuple(line) for line in latency),
        alone,
    )
