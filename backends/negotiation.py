"""How ranks agree on one order of operations without a coordinator: the pure part.

Libraries such as MPI and Gloo want every rank to start the same operations in the same order, but
our operations are matched by name and may be submitted in any order. So ranks exchange, in rounds,
what they submitted since the last round; everyone sees the same rounds, runs the same rules below,
and so comes to the same decisions in the same order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Announcement:
    """One rank submitted an operation.

    Attributes:
        description: what all ranks must agree on (kind, dtype, count, reduction), readable.
        use: how many times the name had been used on its channel before (see channels.py).
        differs: the name has a channel, but this rank's description is not the channel's.
    """

    name: str
    description: str
    use: int = 0
    differs: bool = False


@dataclass(frozen=True)
class Start:
    """All ranks submitted `name` with one description: start it now."""

    name: str
    description: str


@dataclass(frozen=True)
class Refuse:
    """Ranks submitted `name` with different descriptions; `text` names both sides.

    Attributes:
        waiting: ranks that have not submitted it yet, and must fail when they do.
    """

    name: str
    text: str
    waiting: frozenset[int]


Decision = Start | Refuse


class Negotiation:
    """What was announced and is not decided. Not thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pending: dict[str, dict[int, str]] = {}  # name -> rank -> description
        # name -> rank -> how many of its announcements are still to come for refused uses
        self._late: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def take(self, round_: Sequence[Sequence[Announcement]]) -> list[Decision]:
        """Add one round (what each rank announced, by rank); the decisions, in their order."""
        decisions = [self._add(rank, one) for rank, many in enumerate(round_) for one in many]
        return [decision for decision in decisions if decision is not None]

    def missing(self, name: str) -> tuple[int, ...]:
        """The ranks that have not announced `name`; empty when nobody has."""
        announced = self._pending.get(name)
        if announced is None:
            return ()
        return tuple(rank for rank in range(self._size) if rank not in announced)

    def _add(self, rank: int, announcement: Announcement) -> Decision | None:
        name, description = announcement.name, announcement.description
        if self._belongs_to_refused(name, rank):
            return None
        announced = self._pending.setdefault(name, {})
        announced[rank] = description
        for other, theirs in announced.items():
            if theirs != description:
                return self._refuse(name, {other: theirs, rank: description})
        if len(announced) < self._size:
            return None
        del self._pending[name]
        return Start(name, description)

    def _belongs_to_refused(self, name: str, rank: int) -> bool:
        if self._late[name][rank] == 0:
            belongs = False
        else:
            self._late[name][rank] -= 1
            belongs = True
        if not self._late[name].total():
            del self._late[name]
        return belongs

    def _refuse(self, name: str, sides: dict[int, str]) -> Refuse:
        announced = self._pending.pop(name)
        waiting = frozenset(range(self._size)) - announced.keys()
        if waiting:
            self._late[name].update(waiting)
        text = ", ".join(f"rank {rank} has {sides[rank]}" for rank in sorted(sides))
        return Refuse(name, text, waiting)
