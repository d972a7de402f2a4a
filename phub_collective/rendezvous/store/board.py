"""The state of a job's store: values, and the ranks that will bring no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def slot(key: str, rank: int) -> str:
    """Where a rank's contribution to a gather of `key` stands."""
    return f"{key}/{rank}"


@dataclass
class Collected:
    """What a wait for keys found: one value or None per key, and the ranks whose absence ended
    the wait early (empty when all values are there, or time ran out)."""

    values: list[bytes | None]
    gone: list[int]


@dataclass
class Board:
    """The state of one job's store. Not thread-safe: its owner locks."""

    values: dict[str, bytes] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)  # ranks that died
    left: set[int] = field(default_factory=set)  # ranks that closed in good order

    def _gone(self, keys: Sequence[str], by_rank: bool) -> list[int]:
        """The ranks because of whom the missing keys will not come: any rank that died (a job
        with a dead rank is over), and with `by_rank` (the i-th key is rank i's) one that left."""
        missing = [rank for rank, key in enumerate(keys) if key not in self.values]
        if not missing:
            return []
        left = self.left.intersection(missing) if by_rank else set()
        return sorted(self.lost | left)

    def finished(self, keys: Sequence[str], by_rank: bool) -> bool:
        """True when there is nothing to wait for: all keys are there, or they cannot come."""
        return all(key in self.values for key in keys) or bool(self._gone(keys, by_rank))

    def collect(self, keys: Sequence[str], by_rank: bool) -> Collected:
        return Collected([self.values.get(key) for key in keys], self._gone(keys, by_rank))
