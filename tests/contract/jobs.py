"""Jobs that the contract is run on: every backend that is usable here, on each of its lanes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from ranks import ThreadRanks

from phub_collective import backends
from phub_collective.backends.base import Backend, Context
from phub_collective.errors import PhubError

LANES = ("shm", "tcp")
WITH_LANES = ("pbox", "pshard", "ring", "halving_doubling")  # others choose their own transport
TCP_SIZES = (2, 3, 5, 8)  # of what is run on every number of ranks over shared memory
SHORT_SIZES = (1, 2, 3, 4, 5, 8)  # without PHUB_TEST_LONG
# A server for every rank takes its time to start: fewer sizes. On one host it is asked for.
SIZES = {("pshard", "shm"): (1, 4), ("pshard", "tcp"): (2, 3)}
SETTINGS: dict[str, dict[str, Any]] = {"pshard": {"shards": "rank"}}
LARGEST_BASELINE = 4  # ranks


class Job:
    """Ranks, as threads, that are connected through one backend. After a failed check the next
    one gets new ranks, so that it fails for its own reasons only."""

    def __init__(self, name: str, lane: str, size: int, **settings: Any) -> None:
        self._name, self.size = name, size
        self._settings = {"lane": lane, **SETTINGS.get(name, {}), **settings}
        self._connect()

    def _connect(self) -> None:
        self._ranks = ThreadRanks(self.size, **self._settings)
        self._broken = True  # until all are connected
        self._backends: dict[int, Backend] = {}

        def connect(context: Context) -> None:
            self._backends[context.rank] = backends.create(self._name, context)

        self._ranks.run(connect)
        self._broken = False

    def check(self, promise: Callable[..., None], *args: Any) -> None:
        """Run ``promise(backend, *args)`` on every rank."""
        if self._broken:
            self.close()
            self._connect()

        def body(context: Context) -> None:
            promise(self._backends[context.rank], *args)

        self._broken = True
        self._ranks.run(body)
        self._broken = False

    def close(self) -> None:
        def close(context: Context) -> None:
            with suppress(PhubError) if self._broken else nullcontext():
                self._backends[context.rank].close()

        try:
            self._ranks.run(close)
        finally:
            self._ranks.close()


def lineup(*sizes: int) -> list[Any]:
    """Parameters (backend, lane, size); what cannot be used here is skipped with the reason."""
    rows = []
    for name, reason in backends.available().items():
        marks = [] if reason is None else [pytest.mark.skip(reason=f"{name}: {reason}")]
        for lane in LANES if name in WITH_LANES else ("auto",):
            for size in sizes:
                if size not in SIZES.get((name, lane), TCP_SIZES if lane == "tcp" else sizes):
                    continue
                if size not in SHORT_SIZES and not os.environ.get("PHUB_TEST_LONG"):
                    continue
                if name in backends.BASELINES and size > LARGEST_BASELINE:
                    continue
                id_ = f"{name}-{lane}-{size}"
                rows.append(pytest.param((name, lane, size), marks=marks, id=id_))
    return rows
