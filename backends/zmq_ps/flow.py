"""Flow control between one worker and one server, the same at both ends.

ZMQ's high-water marks count messages, and one of ours has from 40 bytes to 4 MiB. So each end also
counts bytes: it has at most a window of them on their way, and the other end credits what it has
taken out of ZMQ's queue and used. What does not fit waits at its sender, where it is no copy: a
worker's arena, a server's sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from phub_collective.backends.zmq_ps.wire import Header, Message, MessageKind

HIGH_WATER = 1000  # messages that ZMQ queues per connection and direction, its own default
CREDIT_SHARE = 4  # a credit is sent when it is worth one part in so many of the window


class Flow:
    """One end of a connection. For one thread."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._waiting: deque[Message] = deque()
        self._on_its_way = 0  # bytes that the other end has not credited
        self._owed = 0  # bytes that this end has not credited

    @property
    def idle(self) -> bool:
        """Nothing waits to be sent."""
        return not self._waiting

    def put(self, message: Message) -> None:
        """Send it in its turn."""
        self._waiting.append(message)

    def took(self, nbytes: int) -> None:
        """A message of the other end was used, and its memory is free again."""
        self._owed += nbytes

    def credited(self, nbytes: int) -> None:
        """The other end has taken in so many bytes."""
        self._on_its_way -= nbytes

    def flush(self, send: Callable[[Message], bool]) -> bool:
        """Send what may leave now. `send` says whether ZMQ took the message; False: it did not,
        so this must be tried again."""
        if self._owed * CREDIT_SHARE >= self._window:
            if not send(Message(Header(MessageKind.CREDIT, nbytes=self._owed))):
                return False
            self._owed = 0
        while self._waiting:
            nbytes = self._waiting[0].nbytes
            if self._on_its_way + nbytes > self._window:
                break
            if not send(self._waiting[0]):
                return False
            self._waiting.popleft()
            self._on_its_way += nbytes
        return True
