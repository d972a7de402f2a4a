"""How ranks agree on one order of operations: the rounds, over the job's rendezvous.

Thread contract: `announce` and `close` from any thread; the listener is called on the agreement's
own thread only. A round costs two visits to the rendezvous and happens only when somebody has
announced something, so what is used over and over should announce rarely (see channels.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Protocol

from phub_collective.backends.base import Context
from phub_collective.backends.negotiation import Announcement, Decision, Negotiation
from phub_collective.errors import InternalError, PeerLost, PeerTimeout, PhubError

BELL_S = 60.0  # how long one wait for a round may last before it is begun again
CLOSE_S = 5.0  # how long `close` waits for the other ranks' last round


class Listener(Protocol):
    """Who acts on what was agreed."""

    def announced(self, announcements: Sequence[Announcement]) -> None:
        """What all ranks announced in this round; comes before its decisions."""

    def decided(self, decision: Decision) -> None:
        """The next decision; the same ones in the same order on every rank."""

    def ended(self, error: PhubError, is_loss: bool) -> None:
        """No more decisions: a rank was lost, or (`is_loss` false) closed in good order."""


class Agreement:
    """One rank's part in the rounds; `label` is the same on all ranks and unique in the job."""

    def __init__(self, context: Context, label: str, listener: Listener) -> None:
        self._rank, self._timeout = context.rank, context.config.timeout
        self._rendezvous, self._label, self._listener = context.rendezvous, label, listener
        self._lock = threading.Lock()
        # guarded by _lock
        self._negotiation = Negotiation(context.size)
        self._mine: list[Announcement] = []
        self._round = 0  # the round that takes what is announced now
        self._rung = False  # this rank has rung the bell of that round
        self._leaving = False
        self._ended: PhubError | None = None
        self._thread = threading.Thread(target=self._run, name=f"phub-{label}", daemon=True)
        self._thread.start()

    def announce(self, announcement: Announcement) -> None:
        """Tell all ranks in the next round. Raises the error that ended the agreement."""
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._mine.append(announcement)
            self._ring()

    def missing(self, name: str) -> tuple[int, ...]:
        """The ranks that have not announced `name`, as far as is known here."""
        with self._lock:
            return self._negotiation.missing(name)

    def close(self) -> None:
        """Leave, so that the others' next announcement is an error and not a wait; idempotent."""
        with self._lock:
            if self._ended is None and not self._leaving:
                self._leaving = True
                self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _bell(self, number: int) -> str:
        return f"{self._label}/bell/{number}"

    def _ring(self) -> None:
        """Call every rank to the next round. Held lock: the bell must be heard before this rank
        takes part in the round, since it is removed right after the round."""
        if not self._rung:
            self._rendezvous.put(self._bell(self._round), b"1")
            self._rung = True

    def _run(self) -> None:
        try:
            while self._take_part():
                pass
        except PhubError as error:
            self._end(error, is_loss=True)
        except Exception as error:  # a thread that ends silently would leave waits without end
            self._end(InternalError(f"[{self._label}] {error!r}"), is_loss=True)
            raise

    def _take_part(self) -> bool:
        """Wait for the next round and go through it; False after the last."""
        bell = self._bell(self._round)
        try:
            self._rendezvous.get(bell, BELL_S)
        except PeerTimeout:
            return True  # nobody had anything to say
        with self._lock:
            mine, self._mine = self._mine, []
            leaving = self._leaving
            self._round += 1
            self._rung = False
        said = json.dumps([leaving, [[a.name, a.description, a.use, a.differs] for a in mine]])
        answers = self._rendezvous.all_gather(f"{self._label}/round", said.encode(), self._timeout)
        if self._rank == 0:
            self._rendezvous.discard(bell)
        heard = [json.loads(answer) for answer in answers]
        round_ = [[Announcement(*fields) for fields in many] for _, many in heard]
        self._listener.announced([one for many in round_ for one in many])
        with self._lock:
            decisions = self._negotiation.take(round_)
        for decision in decisions:
            self._listener.decided(decision)
        gone = [rank for rank, (left, _) in enumerate(heard) if left]
        if gone:
            self._end(
                PeerLost(
                    f"[{self._label}] rank {self._rank}: rank {gone[0]} closed its backend; "
                    "close it on all ranks after the last operation",
                    gone[0],
                ),
                is_loss=False,
            )
        return not gone

    def _end(self, error: PhubError, is_loss: bool) -> None:
        with self._lock:
            self._ended = error
        self._listener.ended(error, is_loss)
