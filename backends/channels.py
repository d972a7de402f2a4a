"""Backends over libraries that need one order of operations on all ranks (MPI, Gloo).

A channel is such a library's communicator: all ranks start operations on it in one order. Names
may be submitted in any order, so an operation is announced and started when all ranks have
announced it, in the agreed order, on the shared channel. From its second use on a name has a
channel of its own, on which the n-th use meets the n-th use without any announcement: in the steady
state of training nothing is added to the library's own cost. (Broadcasts are always announced.)

A rank whose n-th use differs from what its channel was made for announces that, and those who
have started the n-th use announce theirs, so that both sides are named. All ranks may also differ
in the same way; then the channel serves the new shape.
"""

from __future__ import annotations

import abc
import logging
import secrets
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from phub_collective.backends.agreement import Agreement, Uses
from phub_collective.backends.base import Backend, Context, Kind, Operation, Work
from phub_collective.backends.negotiation import Announcement, Decision, Refuse, Start
from phub_collective.backends.operations import check, describe
from phub_collective.backends.transfer import Transfer
from phub_collective.backends.waiting import Missing, Waiter
from phub_collective.errors import (
    ConfigError,
    DuplicateName,
    InternalError,
    MismatchError,
    PeerLost,
    PhubError,
)

log = logging.getLogger(__name__)

REMEMBERED = 4096  # names used once, for which a second use is recognised
SLICE_S = 0.05  # a library's wait is looked after this often, for errors it does not know of
BLAME_S = 2.0  # after a library's error, how long to wait for the rendezvous to name who died


class Handle(Protocol):
    """An operation that the library is working on."""

    def wait(self, seconds: float) -> bool:
        """Block up to so long (0: only look); True when it has ended, well or not."""
        ...

    def check(self) -> None:
        """After it ended: raise what the library says went wrong, a RuntimeError."""


class Channel(Protocol):
    """A communicator of the library."""

    def start(self, transfer: Transfer | None, ended: Callable[[], None]) -> Handle:
        """Start an operation (None: a barrier). `ended` is called from another thread, some time
        after `Handle.wait` has become true, unless somebody has waited."""
        ...


@dataclass
class Named:
    """A name that has its own channel.

    Attributes:
        uses: how many uses this rank has submitted (agreed ones: started) on the channel.
        agree_at: the use that another rank has announced with another description.
        answered: we have announced a use that we had started on the channel already.
    """

    channel: Channel
    description: str
    uses: int = 1
    agree_at: int | None = None
    answered: bool = False


class ChannelWork:
    """See `Work`. `handle`, `error` and `over` change under the owner's lock only."""

    def __init__(self, owner: ChannelBackend, operation: Operation) -> None:
        self._owner, self._operation = owner, operation
        self.name = operation.name
        self.use = -1  # which use of its channel; -1: it was announced
        self.handle: Handle | None = None
        self.error: PhubError | None = None
        self.over = False
        self._completing = False
        self._transfer: Transfer | None = None

    def begin(self, channel: Channel) -> None:
        """Start on `channel`. Held lock: starts on one channel happen in their agreed order."""
        try:
            if self._operation.kind is not Kind.BARRIER:
                self._transfer = Transfer(self._operation, self._owner.context.size)
                if not self._transfer.array.size:
                    self.end(None)
                    return
            self.handle = channel.start(self._transfer, self.look)
        except Exception as error:
            self.end(self._owner.blame(self.name, error))
            return
        if self.handle.wait(0.0):  # so soon that `look` came too early
            self._complete(self.handle)

    def look(self) -> None:
        """Complete the operation if the library has ended it."""
        with self._owner.lock:  # not before begin() is through
            handle = self.handle
        if handle is not None and not self.over and handle.wait(0.0):
            self._complete(handle)

    def _complete(self, handle: Handle) -> None:
        with self._owner.lock:
            if self._completing or self.over:
                return
            self._completing = True  # here, without the lock: it may take milliseconds
        error: PhubError | None = None
        try:
            handle.check()
            if self._transfer is not None:
                self._transfer.finish()
        except Exception as failure:  # whoever waits must get it, whichever thread this is
            error = self._owner.blame(self.name, failure)
        with self._owner.lock:
            self.end(error)

    def end(self, error: PhubError | None) -> None:
        """Finished or failed; the first to say so counts. Held lock."""
        if not self.over:
            self.error, self.over = error, True
            self._owner.forget(self)

    def done(self) -> bool:
        self.look()
        return self.over

    def wait(self, timeout: float | None = None) -> None:
        owner = self._owner
        owner.waiter.wait(
            self._step, repr(self.name), lambda s: owner.missing(self, s), timeout, SLICE_S
        )
        if self.error is not None:
            raise self.error

    def _step(self, seconds: float) -> bool:
        """Wait at most so long; True when the operation is over."""
        lock, handle = self._owner.lock, self.handle
        if handle is None:
            with lock:
                lock.wait_for(lambda: self.handle is not None or self.over, seconds)
        elif not self.over and handle.wait(seconds):
            self._complete(handle)
            with lock:  # if another thread is at it already
                lock.wait_for(lambda: self.over, seconds)
        return self.over


class ChannelBackend(Backend):
    """See `Backend` and the head of this file.

    Attributes:
        max_channels: names beyond so many are announced at every use.
        label: equal on all ranks, unique in the job.
        waiter: how this rank waits.
        lock: guards all that changes in here and in the works.
    """

    max_channels: int

    def __init__(self, context: Context) -> None:
        self.context = context
        self.waiter = Waiter(self.name, context.rank, context.config)
        self.lock = threading.Condition(threading.RLock())
        self._flying: dict[str, ChannelWork] = {}
        self._abandoned: list[ChannelWork] = []  # failed, but the library may use their memory
        self._named: dict[str, Named] = {}
        self._once: OrderedDict[str, None] = OrderedDict()
        self._refusals: defaultdict[str, deque[MismatchError]] = defaultdict(deque)
        self._ended: PhubError | None = None
        self._lost = False
        self._closed = False
        self._opened = 0
        # Rank 0's choice; the next backend of this name in the same job has another one.
        labels = context.rendezvous.all_gather(
            self.name, secrets.token_hex(4).encode(), context.config.start_timeout
        )
        self.label = f"{self.name}.{labels[0].decode()}"
        self._shared = self._next_channel()
        self._agreement = Agreement(context, self.label, self)

    @abc.abstractmethod
    def open_channel(self, number: int) -> Channel:
        """Make the library's communicator `number`. Collective, in one order on all ranks.

        Raises:
            PeerLost, PeerTimeout: not all ranks came.
        """

    @abc.abstractmethod
    def disconnect(self, orderly: bool) -> None:
        """Give the library's resources back. `orderly`: nothing is left running on any rank."""

    def submit(self, operation: Operation) -> Work:
        check(operation, self.context.size, self.name)
        work = ChannelWork(self, operation)
        with self.lock:
            if self._closed:
                raise ConfigError(f"[{self.name}] {operation.name!r} was submitted after close()")
            if operation.name in self._flying:
                raise DuplicateName(
                    f"[{self.name}] rank {self.context.rank} submitted {operation.name!r} while its"
                    " last use is in flight; wait for it, or give the two different names"
                )
            if self._ended is not None:
                raise self._ended
            self._dispatch(work, describe(operation))
        return work

    def close(self) -> None:
        with self.lock:
            if self._closed:
                return
            self._closed = True
            flying = list(self._flying.values())
        deadline = time.monotonic() + self.context.config.timeout
        for work in flying:
            with suppress(PhubError):  # whoever waits for it gets it too
                work.wait(max(0.0, deadline - time.monotonic()))
        with self.lock:
            begun = {name: named.uses for name, named in self._named.items()}
        self._agreement.close(begun)
        with self.lock:
            orderly = not (self._lost or self._abandoned or self._flying)
        self.disconnect(orderly)

    def _dispatch(self, work: ChannelWork, description: str) -> None:
        """Start it on its own channel, or announce it. Held lock."""
        named = self._named.get(work.name)
        fits = named is not None and named.description == description
        self._flying[work.name] = work
        if named is not None and fits and named.uses != named.agree_at:
            work.use = named.uses
            named.uses += 1
            work.begin(named.channel)
            return
        use, differs = (0, False) if named is None else (named.uses, not fits)
        try:
            self._agreement.announce(Announcement(work.name, description, use, differs))
        except PhubError:
            del self._flying[work.name]
            raise
        refusals = self._refusals.get(work.name)
        if refusals:
            work.end(refusals.popleft())

    # What the agreement calls, on its thread.

    def announced(self, announcements: Sequence[Announcement]) -> None:
        with self.lock:
            for one in announcements:
                named = self._named.get(one.name)
                if named is None or named.answered or not one.differs:
                    continue
                if named.uses > one.use:
                    named.answered = True
                    answer = Announcement(one.name, named.description, one.use)
                    self._agreement.announce(answer)
                else:
                    named.agree_at = one.use

    def decided(self, decision: Decision) -> None:
        if isinstance(decision, Refuse):
            self._refuse(decision)
            return
        channel = self._channel_for(decision)
        with self.lock:
            work = self._flying.get(decision.name)
            if work is not None:  # else it has failed here meanwhile
                work.begin(channel)
                self.lock.notify_all()

    def has_begun(self, name: str, use: int) -> bool:
        with self.lock:
            named = self._named.get(name)
            return named is not None and named.uses > use

    def ended(self, error: PhubError, left: Sequence[Uses]) -> None:
        with self.lock:
            self._ended, self._lost = error, not left
            for work in list(self._flying.values()):
                # Those who left have finished what they had begun, so it will finish here too.
                stays_away = any(uses.get(work.name, 0) <= work.use for uses in left)
                if self._lost or work.handle is None or stays_away:
                    self._fail(work, error)

    def _channel_for(self, start: Start) -> Channel:
        """Chosen from what is equal on all ranks: the decisions so far."""
        with self.lock:
            if start.description.startswith(Kind.BROADCAST.value):
                # It may end on one rank before another has begun, too early to find a mismatch.
                self._named.pop(start.name, None)
                return self._shared
            named = self._named.get(start.name)
            if named is not None:
                named.description, named.agree_at = start.description, None
                named.uses += 1
                return named.channel
            if start.name not in self._once or len(self._named) >= self.max_channels:
                self._once[start.name] = None
                if len(self._once) > REMEMBERED:
                    self._once.popitem(last=False)
                return self._shared
        channel = self._next_channel()
        with self.lock:
            del self._once[start.name]
            self._named[start.name] = Named(channel, start.description)
        return channel

    def _next_channel(self) -> Channel:
        self._opened += 1
        return self.open_channel(self._opened)

    def _refuse(self, refuse: Refuse) -> None:
        error = MismatchError(
            f"[{self.name}] {refuse.name!r} differs between ranks: {refuse.text}; make them equal"
        )
        with self.lock:
            named = self._named.pop(refuse.name, None)
            self._once.pop(refuse.name, None)
            answered = named is not None and named.answered
            work = self._flying.get(refuse.name)
            # What was announced and started is an earlier use, which this does not concern.
            if work is not None and (answered or (work.use < 0 and work.handle is None)):
                self._fail(work, error)
            elif self.context.rank in refuse.waiting and not answered:
                self._refusals[refuse.name].append(error)

    # What the works call.

    def _fail(self, work: ChannelWork, error: PhubError) -> None:
        if work.handle is not None and not work.over:
            self._abandoned.append(work)
        work.end(error)

    def forget(self, work: ChannelWork) -> None:
        """`work` is over. Held lock."""
        if self._flying.get(work.name) is work:
            del self._flying[work.name]
        self.lock.notify_all()

    def missing(self, work: ChannelWork, seconds: float) -> Missing:
        """Whom `work` waits for, as far as can be found out in so many seconds."""
        if work.handle is None:
            return Missing(self._agreement.missing(work.name))
        if work.use < 0:
            return Missing()
        return Missing(self._agreement.absent((work.name, work.use), seconds))

    def blame(self, name: str, failure: Exception) -> PhubError:
        """The error for an exception: that of the lost rank, when the library failed for it."""
        what = f"[{self.name}] rank {self.context.rank}: {name!r} failed: "
        if not isinstance(failure, RuntimeError):  # not the library's
            log.error("%s%r", what, failure, exc_info=failure)
            return InternalError(f"{what}{failure!r}")
        with self.lock:
            self.lock.wait_for(lambda: self._ended is not None, BLAME_S)
            return self._ended or PeerLost(f"{what}{failure}")
