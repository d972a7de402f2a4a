"""One rank's control connection to one PBox: its messages, and the thread that reads them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from phub_collective.backends.pbox import protocol
from phub_collective.backends.pbox.handshake import (
    HANDSHAKE_SECONDS,
    Invitation,
    accept,
    open_lane,
)
from phub_collective.config import Config
from phub_collective.errors import PeerLost, PeerTimeout, PhubError, ProtocolError

# Called on the reader's thread with the number of the shard, a message, and its descriptors, which
# are the callee's to close.
OnMessage = Callable[[int, protocol.Message, list[int]], None]
OnEnd = Callable[[PhubError], None]  # with what ended the connection, on any thread


class Control:
    """Thread-safe.

    Attributes:
        shard: the number of this PBox among those that share the job's chunks.
        name: what errors call it.
        welcome: what it has said of itself.
        transport: "shm" or "tcp", of the lanes to it.
    """

    def __init__(
        self,
        invitation: Invitation,
        rank: int,
        config: Config,
        shard: int,
        on_message: OnMessage,
        on_end: OnEnd,
    ) -> None:
        """Join; nothing is read before `start`.

        Raises:
            AuthError: wrong token. ConfigError: the lane asked for cannot be had.
            PeerLost: nobody listens there.
        """
        self.shard = shard
        self._rank, self._config = rank, config
        self._on_message, self._on_end = on_message, on_end
        self._who, self._sock, self.welcome, self.transport = accept(invitation, rank, config.lane)
        protocol.limit_sending(self._sock, config.stall_timeout)  # ends before `unread_s`
        unread_s = int(config.stall_timeout + config.timeout) + 1
        protocol.keep_alive(self._sock, max(1, int(config.timeout)), unread_s)
        self.name = "the PBox server"
        if self.welcome.shards > 1:
            self.name = f"shard {shard} of {self.welcome.shards} ({self._who.address})"
        self._sending = threading.Lock()
        self._closed = False
        name = f"phub-control-{rank}-{shard}"
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._reader.start()

    def open_lane(self, core: int) -> tuple[socket.socket, list[int]]:
        """See `handshake.open_lane`."""
        return open_lane(self._who, self.welcome, core, self.transport, self._config.congestion)

    def _read(self) -> None:
        """The reader's thread."""
        try:
            while (received := self._next()) is not None:
                self._on_message(self.shard, *received)
        except PhubError as error:
            self._on_end(error)
        except Exception as error:  # whatever the server sends, those who wait must be told
            text = f"[pbox] rank {self._rank} got a malformed message from {self.name}: {error!r}"
            self._on_end(ProtocolError(text))

    def _next(self) -> tuple[protocol.Message, list[int]] | None:
        """The next message and its descriptors; None when the server is gone."""
        try:
            if self._sock.family == socket.AF_UNIX:
                return protocol.receive_with_descriptors(self._sock)
            return protocol.receive(self._sock), []
        except (PeerLost, OSError) as error:
            if not self._closed:
                self._on_end(self._lost(error))
            return None

    def _lost(self, error: Exception) -> PeerLost:
        rank = -1 if self.welcome.shards == 1 else -2 - self.shard
        return PeerLost(f"[pbox] rank {self._rank} lost {self.name}: {error}", rank)

    def send(self, message: protocol.Message, patience: float | None = None) -> None:
        """Send one message. `patience`: seconds for the messages of other threads to leave (None:
        config.stall_timeout).

        Raises:
            PeerLost, PeerTimeout: it cannot be sent, now or (but for `patience`) ever.
        """
        limit = self._config.stall_timeout
        silent = f"[pbox] {self.name} has taken nothing of rank {self._rank} for {limit:g} s"
        if not self._sending.acquire(timeout=limit if patience is None else patience):
            raise PeerTimeout(f"{silent}; is it stopped?")
        try:
            return protocol.send(self._sock, message)
        except BlockingIOError:
            lost: PhubError = PeerTimeout(f"{silent}; is it stopped?")
        except OSError as error:
            lost = self._lost(error)
        finally:
            self._sending.release()
        if not self._closed:
            self._on_end(lost)
        with contextlib.suppress(OSError):  # a part may have left: no other message can follow it
            self._sock.shutdown(socket.SHUT_RDWR)
        raise lost

    def close(self) -> None:
        """Say goodbye and disconnect; idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(PhubError, OSError):
            protocol.limit_sending(self._sock, HANDSHAKE_SECONDS)  # a silent server is left
            self.send({"op": "bye"}, HANDSHAKE_SECONDS)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if self._reader.is_alive() and threading.current_thread() is not self._reader:
            self._reader.join(HANDSHAKE_SECONDS)
        self._sock.close()
