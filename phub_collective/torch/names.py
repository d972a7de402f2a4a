"""Names of operations that the caller did not name."""

from __future__ import annotations

from collections import defaultdict


class OperationNames:
    """Gives "allreduce.float32.100.0": the operation's signature, and its position among those
    of the same signature that were submitted and not yet synchronized.

    So a loop that reduces the same kind of tensor uses the same name each time, and finds it
    registered. It asks that all ranks submit and synchronize unnamed operations of one signature
    in the same order; where they cannot, operations need names.
    """

    def __init__(self) -> None:
        self._taken: defaultdict[str, set[int]] = defaultdict(set)

    def take(self, signature: str) -> str:
        """The free name of `signature` with the lowest position."""
        taken = self._taken[signature]
        position = next(i for i in range(len(taken) + 1) if i not in taken)
        taken.add(position)
        return f"{signature}.{position}"

    def release(self, name: str) -> None:
        """`name`, which `take` gave, is synchronized. Names of others are ignored."""
        signature, _, position = name.rpartition(".")
        if position.isdecimal():
            self._taken[signature].discard(int(position))
