"""Where a rank of a mesh accepts: its listening sockets, and the handshakes of all who come.

Anybody may connect, so each handshake has a thread of its own: strangers who say nothing, or only
little by little, hold up nobody who is expected.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from phub_collective.backends.base import Context
from phub_collective.backends.native import load
from phub_collective.errors import AuthError
from phub_collective.machine import own_addresses

log = logging.getLogger(__name__)

STRANGERS = 64  # whose handshakes may be under way besides those of all ranks
PAUSE_S = 0.05  # when nobody can be accepted, for want of descriptors


@dataclass(frozen=True)
class Link:
    """An authenticated connection to another rank.

    Attributes:
        memory: descriptor of the rings, or -1: the lane is TCP on the socket itself.
        bell: descriptor of the other end's bell (with memory only).
        first: this end made the memory.
    """

    peer: int
    sock: socket.socket
    memory: int = -1
    bell: int = -1
    first: bool = False

    def close(self) -> None:
        """For a link that nobody takes."""
        self.sock.close()
        for descriptor in (self.memory, self.bell):
            if descriptor >= 0:
                os.close(descriptor)


class Doors:
    """The sockets on which this rank accepts. Use as a context.

    Attributes:
        unix: name of the abstract Unix socket; empty when there is none.
        hosts, port: of the TCP socket.
    """

    def __init__(self, context: Context) -> None:
        one_host = context.local_size == context.size
        self._sockets = [socket.create_server(("127.0.0.1" if one_host else "", 0))]
        load().choose_congestion(self._sockets[0].fileno(), context.config.congestion)
        self.unix = ""
        if context.config.lane != "tcp":
            self.unix = f"phub-mesh-{secrets.token_hex(16)}"
            unix = socket.socket(socket.AF_UNIX)
            unix.bind("\0" + self.unix)
            self._sockets.append(unix)
        self._bell = os.eventfd(0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        for door in self._sockets:
            door.listen(socket.SOMAXCONN)  # strangers may come before we begin to accept
            door.setblocking(False)
            self._selector.register(door, selectors.EVENT_READ)
        self.hosts = ["127.0.0.1"] if one_host else own_addresses()
        self.port = int(self._sockets[0].getsockname()[1])

    def ring(self) -> None:
        """End an `accept` in another thread."""
        os.eventfd_write(self._bell, 1)

    def accept(self, seconds: float) -> list[socket.socket]:
        """Whoever has come, after at most so long or a `ring`."""
        visitors = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj == self._bell:
                os.eventfd_read(self._bell)
                continue
            door: Any = key.fileobj
            try:
                visitors.append(door.accept()[0])
            except OSError:  # it has gone away again, or we have no descriptor for it
                time.sleep(PAUSE_S)
        return visitors

    def __enter__(self) -> Doors:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        os.close(self._bell)
        for door in self._sockets:
            door.close()


class Reception:
    """Handshakes with all who come through the doors. Use as a context, by one thread.

    Args:
        greet: a handshake; OSError, ValueError, AuthError: it is nobody we expect.
        expected: how many ranks may come.
    """

    def __init__(
        self, doors: Doors, greet: Callable[[socket.socket], Link], expected: int, rank: int
    ) -> None:
        self._doors, self._greet_one, self._rank = doors, greet, rank
        self._pool = ThreadPoolExecutor(expected + STRANGERS, f"phub-mesh-{rank}")
        self._arrived: queue.SimpleQueue[Link | Exception] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._visitors: set[socket.socket] = set()  # of handshakes under way or to come

    def next(self, deadline: float) -> Link | None:
        """The next who has proved to be one of us; None at `deadline` (of time.monotonic)."""
        while True:
            with contextlib.suppress(queue.Empty):
                arrived = self._arrived.get_nowait()
                if isinstance(arrived, Exception):
                    raise arrived
                return arrived
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            for sock in self._doors.accept(left):
                with self._lock:
                    self._visitors.add(sock)
                self._pool.submit(self._greet, sock)

    def _greet(self, sock: socket.socket) -> None:
        arrived: Link | Exception | None = None
        try:
            arrived = self._greet_one(sock)
        except (OSError, ValueError, AuthError) as error:
            log.warning("[mesh] rank %d refused a connection: %s", self._rank, error)
        except Exception as error:  # ours, so `next` raises it
            arrived = error
        with self._lock:
            self._visitors.discard(sock)
            if not isinstance(arrived, Link):
                sock.close()
        if arrived is not None:
            self._arrived.put(arrived)
        self._doors.ring()

    def __enter__(self) -> Reception:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for sock in self._visitors:
                with contextlib.suppress(OSError):  # it has gone by itself
                    sock.shutdown(socket.SHUT_RDWR)  # which ends the waiting of its thread
        self._pool.shutdown(wait=True, cancel_futures=True)
        for sock in self._visitors:
            sock.close()
        while not self._arrived.empty():
            late = self._arrived.get()
            if isinstance(late, Link):
                late.close()
