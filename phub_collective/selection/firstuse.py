"""The first use of a name where its size decides which backend does it.

Ranks whose sizes differ across a limit would go to two backends and wait in both. So with a name's
first use each rank tells the others its size, in a small operation that is the same for all of
them. From then on the name stays where it is, and that backend compares.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from phub_collective.backends.base import Backend, Buffer, Context, Kind, Operation, Work
from phub_collective.errors import MismatchError


class FirstUse:
    """See `Work`. Raises MismatchError, naming both sides, when ranks chose different backends;
    the operation of each then waits for the others in vain, and its name cannot be used again."""

    def __init__(
        self,
        context: Context,
        operation: Operation,
        choose: Callable[[int], str],
        backend: Backend,
        meeting: Backend,
    ) -> None:
        """Submit `operation` to `backend`, the choice for its size; `meeting` is one backend of
        all ranks, `choose` the name of the backend for a size."""
        self._context, self._operation, self._choose = context, operation, choose
        self._nbytes = np.zeros(context.size, np.int64)
        self._nbytes[context.rank] = size_of(operation)
        sizes = Operation(
            Kind.ALLREDUCE, f"{operation.name}: bytes on each rank", Buffer.of(self._nbytes)
        )
        self._told = meeting.submit(sizes)
        self._work: Work = backend.submit(operation)

    def done(self) -> bool:
        return self._told.done() and (self._difference() is not None or self._work.done())

    def wait(self, timeout: float | None = None) -> None:
        self._told.wait(timeout)
        difference = self._difference()
        if difference is not None:
            raise difference
        self._work.wait(timeout)

    def _difference(self) -> MismatchError | None:
        """Of the sizes that all ranks have told, those that lead to different backends."""
        chosen = [self._choose(int(nbytes)) for nbytes in self._nbytes]
        for rank, name in enumerate(chosen):
            if name != chosen[0]:
                return MismatchError(
                    f"[session] {self._operation.name!r} has {self._nbytes[0]} bytes on rank 0 "
                    f"(for {chosen[0]}), {self._nbytes[rank]} on rank {rank} (for {name}); make "
                    "them equal"
                )
        return None


def size_of(operation: Operation) -> int:
    """Bytes of an operation; 0 for a barrier."""
    return 0 if operation.buffer is None else int(operation.buffer.bytes.size)
