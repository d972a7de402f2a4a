"""Waiting for other ranks, in the same way everywhere: in slices, with a warning and a limit."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from phub_collective.config import Config
from phub_collective.errors import PeerTimeout

log = logging.getLogger(__name__)

SLICE_S = 0.5  # Python handles signals between two slices only, so Ctrl-C takes up to this long
NAMING_S = 2.0  # at most so long a wait that is over goes on to find out who was missing


@dataclass(frozen=True)
class Missing:
    """Who keeps a wait waiting.

    Attributes:
        ranks: those that have not come; empty when nobody is known.
        text: what is known beyond the ranks.
    """

    ranks: tuple[int, ...] = ()
    text: str = ""

    def __str__(self) -> str:
        if self.text:
            return self.text
        if self.ranks:
            return f"missing: ranks {', '.join(map(str, self.ranks))}"
        return "nobody is known to be missing: has every rank submitted it?"


@dataclass(frozen=True)
class Waiter:
    """How one rank waits in one backend."""

    backend: str
    rank: int
    config: Config

    def wait(
        self,
        step: Callable[[float], bool],
        what: str,
        missing: Callable[[float], Missing],
        timeout: float | None = None,
        slice_s: float = SLICE_S,
    ) -> None:
        """Call ``step(seconds)``, which blocks at most so long, until it returns True.

        Warns once, after config.stall_warning seconds.

        Args:
            what: what is waited for.
            missing: ``missing(seconds)`` finds out within so many seconds who has not come.
            timeout: seconds; None: config.stall_timeout.
            slice_s: seconds that one step gets at most.

        Raises:
            PeerTimeout: after `timeout` seconds, and those that `missing` took: at most
                NAMING_S, and never more than `timeout` itself.
        """
        limit = self.config.stall_timeout if timeout is None else timeout
        begin = time.monotonic()
        warn_at = self.config.stall_warning
        while True:
            left = min(limit, warn_at) - (time.monotonic() - begin)
            if step(max(0.0, min(left, slice_s))):
                return
            elapsed = time.monotonic() - begin
            if elapsed < min(limit, warn_at):
                continue
            is_over = elapsed >= limit
            who = missing(min(NAMING_S, limit if is_over else limit - elapsed))
            text = f"[{self.backend}] rank {self.rank} has waited {elapsed:.1f} s for {what}; {who}"
            if is_over:
                raise PeerTimeout(text, who.ranks)
            log.warning("%s; this becomes an error after %g s in all", text, limit)
            warn_at = math.inf
