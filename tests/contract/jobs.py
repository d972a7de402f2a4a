"""Jobs that the contract is run on: every backend that is usable here, on each of its lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ranks import ThreadRanks

from phub_collective import backends
from phub_collective.backends.base import Backend, Context

LANES = ("shm", "tcp")
WITH_LANES = ("pbox", "ring", "halving_doubling")  # the others choose their own transport


class Job:
    """Ranks, as threads, that are connected through one backend."""

    def __init__(self, name: str, lane: str, size: int, **settings: Any) -> None:
        self.ranks = ThreadRanks(size, lane=lane, **settings)
        self.backends = self.ranks.run(lambda context: backends.create(name, context))

    def check(self, promise: Callable[..., None], *args: Any) -> None:
        """Run ``promise(backend, *args)`` on every rank."""

        def body(context: Context) -> None:
            promise(self.backends[context.rank], *args)

        self.ranks.run(body)

    def close(self) -> None:
        try:
            self.check(Backend.close)
        finally:
            self.ranks.close()


def lineup(*sizes: int) -> list[Any]:
    """Parameters (backend, lane, size); what cannot be used here is skipped with the reason."""
    rows = []
    for name, reason in backends.available().items():
        marks = [] if reason is None else [pytest.mark.skip(reason=f"{name}: {reason}")]
        for lane in LANES if name in WITH_LANES else ("auto",):
            for size in sizes:
                id_ = f"{name}-{lane}-{size}"
                rows.append(pytest.param((name, lane, size), marks=marks, id=id_))
    return rows
