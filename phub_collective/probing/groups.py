"""Which hosts are near each other, told from the bandwidths between them. Pure.

Single-linkage clustering: groups are joined at the fastest link between them, which is Kruskal's
way to a maximum spanning tree, and the tree is cut where two consecutive joins differ most, as a
factor. A slow link between two hosts that others join does not count, so one disturbed measurement
seldom makes a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from phub_collective.errors import ConfigError

APART = 1.25  # times the slower join: where joins nowhere differ by as much, all is one group

Square = Sequence[Sequence[float | None]]  # from (line) to (column); None on the diagonal


def groups_of(bandwidth: Square) -> list[list[int]]:
    """Groups of hosts, each in rising order, by their lowest host.

    A pair is as fast as the slower of its directions. Of more than two levels of bandwidth only
    the two parts at the widest gap are told apart.

    Args:
        bandwidth: in any unit, from each host (line) to each other (column).

    Raises:
        ConfigError: one of them is missing or not positive.
    """
    joins = _single_linkage(bandwidth)
    near = joins[: _above_widest_gap([speed for speed, _, _ in joins])]
    group_of = list(range(len(bandwidth)))
    for _, one, other in near:
        group_of = _joined(group_of, one, other)
    return [
        [host for host, group in enumerate(group_of) if group == lowest]
        for lowest in sorted(set(group_of))
    ]


def bandwidth_between(bandwidth: Square, one: int, other: int) -> float:
    """Of the slower direction between two hosts.

    Raises:
        ConfigError: one of the two is missing or not positive.
    """
    slower = float("inf")
    for sender, receiver in ((one, other), (other, one)):
        line = bandwidth[sender]
        found = line[receiver] if receiver < len(line) else None
        if found is None or not found > 0:  # catches NaN too
            raise ConfigError(
                f"[probe] expected a value above 0 from host {sender} to host {receiver}, got "
                f"{found}; measure all pairs with phub probe"
            )
        slower = min(slower, found)
    return slower


def _single_linkage(bandwidth: Square) -> list[tuple[float, int, int]]:
    """The pairs that join two groups, with their bandwidth, from the fastest on."""
    hosts = range(len(bandwidth))
    pairs = [(bandwidth_between(bandwidth, a, b), a, b) for a in hosts for b in hosts if a < b]
    group_of, joins = list(hosts), []
    for speed, one, other in sorted(pairs, key=lambda pair: -pair[0]):
        if group_of[one] != group_of[other]:
            joins.append((speed, one, other))
            group_of = _joined(group_of, one, other)
    return joins


def _joined(group_of: list[int], one: int, other: int) -> list[int]:
    """The lowest host of everybody's group after those of two hosts have become one."""
    lowest, gone = sorted((group_of[one], group_of[other]))
    return [lowest if group == gone else group for group in group_of]


def _above_widest_gap(speeds: Sequence[float]) -> int:
    """How many of the falling speeds stand above their widest gap; all where it is narrow."""
    gaps = [faster / slower for faster, slower in pairwise(speeds)]
    widest = max(gaps, default=1.0)
    return gaps.index(widest) + 1 if widest >= APART else len(speeds)
