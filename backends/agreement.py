"""How ranks agree on one order of operations: the rounds, over the job's rendezvous.

Thread contract: public methods from any thread; the listener is called on the agreement's own
thread only, and without its lock. A round costs two visits to the rendezvous and happens only when
somebody has something to say, so what is used over and over should say little (see channels.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Protocol

from phub_collective.backends.base import Context
from phub_collective.backends.negotiation import Announcement, Decision, Negotiation
from phub_collective.errors import InternalError, PeerLost, PeerTimeout, PhubError

BELL_S = 60.0  # how long one wait for a round may last before it is begun again
CLOSE_S = 5.0  # how long `close` waits for the other ranks' last round

Use = tuple[str, int]  # a name, and how many times it was used before
Uses = dict[str, int]  # how many times each name was used


class Listener(Protocol):
    """Who acts on what was agreed."""

    def announced(self, announcements: Sequence[Announcement]) -> None:
        """What all ranks announced in this round; comes before its decisions."""

    def decided(self, decision: Decision) -> None:
        """The next decision; the same ones in the same order on every rank."""

    def has_begun(self, name: str, use: int) -> bool:
        """Whether this rank has come to this use of a name."""
        ...

    def ended(self, error: PhubError, left: Sequence[Uses]) -> None:
        """No more decisions: ranks have `left` in good order, or (none did) one was lost."""


@dataclass
class Words:
    """What one rank says in one round."""

    announced: list[Announcement] = field(default_factory=list)
    asked: list[Use] = field(default_factory=list)  # who has not begun this use?
    begun: dict[str, bool] = field(default_factory=dict)  # answers to the last round's questions
    leaving: Uses | None = None  # with what it has begun

    def pack(self) -> bytes:
        announced = [astuple(one) for one in self.announced]
        return json.dumps([announced, self.asked, self.begun, self.leaving]).encode()

    @staticmethod
    def unpack(data: bytes) -> Words:
        announced, asked, begun, leaving = json.loads(data)
        uses = [(name, use) for name, use in asked]
        return Words([Announcement(*one) for one in announced], uses, begun, leaving)


class Agreement:
    """One rank's part in the rounds; `label` is the same on all ranks and unique in the job."""

    def __init__(self, context: Context, label: str, listener: Listener) -> None:
        # Of a round: a rank that is only late stalls it, and one that is lost ends it at once.
        self._rank, self._timeout = context.rank, context.config.stall_timeout
        self._rendezvous, self._label, self._listener = context.rendezvous, label, listener
        self._changed = threading.Condition()
        # guarded by _changed
        self._negotiation = Negotiation(context.size)
        self._mine = Words()
        self._round = 0  # the round in which `_mine` is said
        self._rung = False  # this rank has rung the bell of that round
        self._absent: dict[str, tuple[int, ...]] = {}  # the answers to questions
        self._ended: PhubError | None = None
        self._thread = threading.Thread(target=self._run, name=f"phub-{label}", daemon=True)
        self._thread.start()

    def announce(self, announcement: Announcement) -> None:
        """Tell all ranks in the next round. Raises the error that ended the agreement."""
        with self._changed:
            if self._ended is not None:
                raise self._ended
            self._mine.announced.append(announcement)
            self._ring()

    def missing(self, name: str) -> tuple[int, ...]:
        """The ranks that have not announced `name`, as far as is known here."""
        with self._changed:
            return self._negotiation.missing(name)

    def absent(self, use: Use, seconds: float) -> tuple[int, ...]:
        """Ask all ranks: those that have not begun this use; empty when not all answer in time."""
        with self._changed:
            if self._ended is None:
                self._mine.asked.append(use)
                self._ring()
                key = _key(use)
                self._changed.wait_for(lambda: key in self._absent or self._ended, seconds)
                return self._absent.pop(key, ())
        return ()

    def close(self, begun: Uses) -> None:
        """Leave after these uses, so that what the others announce next, or have begun without
        us, is an error and not a wait; idempotent."""
        with self._changed:
            if self._ended is None and self._mine.leaving is None:
                self._mine.leaving = begun
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
            self._end(error)
        except Exception as error:  # a thread that ends silently would leave waits without end
            self._end(InternalError(f"[{self._label}] {error!r}"))
            raise

    def _take_part(self) -> bool:
        """Wait for the next round and go through it; False after the last."""
        bell = self._bell(self._round)
        try:
            self._rendezvous.get(bell, BELL_S)
        except PeerTimeout:
            return True  # nobody had anything to say
        with self._changed:
            mine, self._mine = self._mine, Words()
            self._round += 1
            self._rung = False
        answers = self._rendezvous.all_gather(f"{self._label}/round", mine.pack(), self._timeout)
        if self._rank == 0:
            self._rendezvous.discard(bell)
        heard = [Words.unpack(answer) for answer in answers]
        self._note_answers(heard)
        self._answer({use for words in heard for use in words.asked})
        self._listener.announced([one for words in heard for one in words.announced])
        with self._changed:
            decisions = self._negotiation.take([words.announced for words in heard])
        for decision in decisions:
            self._listener.decided(decision)
        return self._stays(heard)

    def _note_answers(self, heard: Sequence[Words]) -> None:
        with self._changed:
            for key in {key for words in heard for key in words.begun}:
                self._absent[key] = tuple(
                    rank for rank, words in enumerate(heard) if not words.begun.get(key, True)
                )
            self._changed.notify_all()

    def _answer(self, uses: set[Use]) -> None:
        begun = {_key(use): self._listener.has_begun(*use) for use in uses}
        if begun:
            with self._changed:
                self._absent.clear()  # of questions that nobody waits for any more
                self._mine.begun.update(begun)
                self._ring()

    def _stays(self, heard: Sequence[Words]) -> bool:
        """Whether all ranks stay; if not, this was the last round for everybody."""
        gone = {r: words.leaving for r, words in enumerate(heard) if words.leaving is not None}
        if gone:
            first = min(gone)
            text = (
                f"[{self._label}] rank {self._rank}: rank {first} closed its backend; close it "
                "on all ranks after the last operation"
            )
            self._end(PeerLost(text, first), list(gone.values()))
        return not gone

    def _end(self, error: PhubError, left: Sequence[Uses] = ()) -> None:
        with self._changed:
            self._ended = error
            self._changed.notify_all()
        self._listener.ended(error, left)


def _key(use: Use) -> str:
    """A use as a key of JSON."""
    return f"{use[1]} {use[0]}"
