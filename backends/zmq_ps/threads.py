"""Wide aggregation: all threads work on one array at a time, and wait for each other after it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from phub_collective.backends.base import ALIGNMENT

SERIAL_BYTES = 256 << 10  # a smaller array is done sooner by one thread than handed to several


class Threads:
    """The threads of a server's aggregation, the caller's included."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="phub-wide")

    def run(self, count: int, itemsize: int, work: Callable[[int, int], None]) -> None:
        """Call ``work(begin, end)`` for slices of `count` elements that cover them all; returns
        when all of it is done. `work` must release the interpreter's lock while it computes."""
        if self._count == 1 or count * itemsize < SERIAL_BYTES:
            work(0, count)
            return
        share = -(-count // self._count // ALIGNMENT) * ALIGNMENT
        others = [
            self._pool.submit(work, begin, min(begin + share, count))
            for begin in range(share, count, share)
        ]
        work(0, share)
        for one in others:
            one.result()

    def close(self) -> None:
        self._pool.shutdown()
