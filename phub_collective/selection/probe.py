"""A short measurement of every candidate backend, for the cost model.

Sizes rise; the backends take turns within each, so that a disturbance of the machine meets all of
them; a turn takes as long as its slowest rank, and the lower quartile of the turns counts, since
other work on the machine only ever slows one down. A backend is not measured at sizes that would
take it too long.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

import numpy as np

from phub_collective.backends.base import Backend, Buffer, Kind, Operation
from phub_collective.rendezvous import Rendezvous
from phub_collective.selection.costmodel import Point

SIZES = (4 << 10, 32 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20)  # bytes
WARM_UP = 3  # operations before everything: a name's first uses may set something up
TURNS = 9
TURN_S = 4e-3  # a small operation is repeated within a turn for about so long
SLOW_S = 0.02  # slower operations get fewer turns
SLOW_TURNS = 5
LONGEST_S = 0.6  # a size at which one operation would take longer is left out


def probe(backends: Mapping[str, Backend], rendezvous: Rendezvous) -> dict[str, list[Point]]:
    """Measured points of each backend, equal on all ranks. Collective."""
    subjects = {name: _Subject(backend, rendezvous) for name, backend in backends.items()}
    points: dict[str, list[Point]] = {name: [] for name in backends}
    for nbytes in SIZES:
        racing = {
            name: subject
            for name, subject in subjects.items()
            if not points[name] or _expected(points[name][-1], nbytes) <= LONGEST_S
        }
        for subject in racing.values():
            subject.take(nbytes)
        for turn in range(TURNS):
            for subject in racing.values():
                if turn < subject.turns:
                    subject.take_turn()
        for name, subject in racing.items():
            turns = sorted(subject.agreed())
            points[name].append((nbytes, turns[len(turns) // 4]))
    for subject in subjects.values():
        subject.release()
    return points


def _expected(last: Point, nbytes: int) -> float:
    return last[1] * nbytes / last[0]


class _Subject:
    """One backend. Always under one name, so that it holds the memory of one size only."""

    def __init__(self, backend: Backend, rendezvous: Rendezvous) -> None:
        self._backend, self._rendezvous = backend, rendezvous
        self._operation = self._of(4)
        self._seconds: list[float] = []  # per operation, of each turn
        self._repeats = 1
        self.turns = TURNS
        for _ in range(WARM_UP):
            self._run()

    @staticmethod
    def _of(nbytes: int) -> Operation:
        buffer = Buffer.of(np.zeros(nbytes // 4, np.float32))
        return Operation(Kind.ALLREDUCE, "selector.probe", buffer)

    def _run(self) -> None:
        self._backend.submit(self._operation).wait()

    def take(self, nbytes: int) -> None:
        """Go to this size, and decide on all ranks alike how often it is measured."""
        self._operation, self._repeats, self._seconds = self._of(nbytes), 1, []
        self._run()
        self.take_turn()
        first = self.agreed()[0]
        self._seconds.clear()
        self._repeats = max(1, min(50, int(TURN_S / first)))
        self.turns = TURNS if first < SLOW_S else SLOW_TURNS

    def take_turn(self) -> None:
        if self._repeats > 1:
            self._run()  # it ends at about the same time on all ranks
        else:
            self._rendezvous.barrier("selector.turn")
        begin = time.perf_counter()
        for _ in range(self._repeats):
            self._run()
        self._seconds.append((time.perf_counter() - begin) / self._repeats)

    def agreed(self) -> list[float]:
        """Of each turn so far, the slowest rank's seconds; equal on all ranks. Collective."""
        mine = json.dumps(self._seconds).encode()
        ranks = self._rendezvous.all_gather("selector.probe", mine)
        return [max(turn) for turn in zip(*map(json.loads, ranks), strict=True)]

    def release(self) -> None:
        """Let go of the memory that the last size took."""
        self._operation = self._of(4)
        self._run()
