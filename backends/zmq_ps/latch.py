"""Waiting for the answers to what was pushed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from phub_collective.errors import PhubError


class Latch:
    """Opens when as many answers have come as were asked for, or with an error.

    A `Handle` of channels.py. `arrive` is for one thread, everything else for any.
    """

    def __init__(self, count: int, opened: Callable[[], None] | None = None) -> None:
        """`opened` is called by the last `arrive`, on its thread; not for an error."""
        self._left, self._opened = count, opened
        self._error: PhubError | None = None
        self._open = threading.Event()
        if count == 0:
            self._open.set()

    def arrive(self) -> None:
        """One more answer is there."""
        self._left -= 1
        if self._left == 0:
            self._open.set()
            if self._opened is not None:
                self._opened()

    def fail(self, error: PhubError) -> None:
        """The answers will not come; the first error counts."""
        self._error = self._error or error
        self._open.set()

    def wait(self, seconds: float) -> bool:
        """Block up to so long (0: only look); True when it is open."""
        return self._open.wait(seconds) if seconds > 0 else self._open.is_set()

    def check(self) -> None:
        """After it opened: raise what went wrong."""
        if self._error is not None:
            raise self._error
