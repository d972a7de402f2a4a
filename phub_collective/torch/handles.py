"""Handles of operations that were started and are waited for later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from phub_collective.backends.base import Work


class Handle:
    """A started collective: what `poll` and `synchronize` take.

    It keeps the memory that is exchanged alive; one that is dropped unsynchronized keeps the
    name of its operation taken.
    """

    def __init__(self, works: Sequence[Work], finish: Callable[[], Any]) -> None:
        """`finish` is called once, when all `works` are done, and returns the result."""
        self._works, self._finish = works, finish
        self._finished = False
        self._result: Any = None

    def done(self) -> bool:
        """True when `wait` would not block; never blocks itself."""
        return self._finished or all(work.done() for work in self._works)

    def wait(self) -> Any:
        """Block until done; the result, also when called again."""
        if not self._finished:
            for work in self._works:
                work.wait()
            self._result = self._finish()
            self._finished = True
        return self._result

    def then(self, convert: Callable[[Any], Any]) -> Handle:
        """The handle of the same operation with a converted result."""
        return Handle(self._works, lambda: convert(self.wait()))


def poll(handle: Handle) -> bool:
    """True when the operation is finished, so that `synchronize` will not block."""
    return handle.done()


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result: a tensor, or a list of them.

    Raises:
        PhubError: the operation failed; the subclass says why.
    """
    return handle.wait()
