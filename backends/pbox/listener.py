"""The sockets on which a PBox listens, and a thread for every connection."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence

from phub_collective.backends.native import load
from phub_collective.backends.pbox.handshake import HANDSHAKE_SECONDS
from phub_collective.errors import ConfigError

log = logging.getLogger(__name__)

ACCEPT_PAUSE = 0.1  # seconds, when there are no descriptors or threads left for a connection
MAX_STRANGERS = 1024  # connections of those who have proved nothing yet; the oldest makes room


class Listener:
    """Accepts connections until it is stopped. Thread-safe.

    Attributes:
        unix: name of the abstract Unix socket: no file, and visible only to workers in the same
            network namespace.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        port: int,
        congestion: str,
        serve: Callable[[socket.socket], None],
    ) -> None:
        """`serve` is called on a thread of its own for every connection, which is closed when it
        returns. Nothing is accepted before `start`. `congestion`: control of TCP connections.

        Raises:
            ConfigError: an address cannot be listened on.
        """
        self._serve = serve
        self._listeners = _listen_on(addresses, port, congestion)
        self.unix = f"phub-{secrets.token_hex(8)}"
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind("\0" + self.unix)
        self._unix.listen(128)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._serving: dict[threading.Thread, socket.socket] = {}
        self._strangers: dict[threading.Thread, socket.socket] = {}  # of those, in order of arrival
        self._acceptors = [
            threading.Thread(target=self._accept, args=(listener,), daemon=True)
            for listener in [*self._listeners, self._unix]
        ]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """(address, port) of each TCP socket."""
        return [listener.getsockname()[:2] for listener in self._listeners]

    def connections(self) -> int:
        """Number of connections that are being served."""
        with self._lock:
            return len(self._serving)

    def start(self) -> None:
        """Begin to accept."""
        for thread in self._acceptors:
            thread.start()

    def authenticated(self) -> None:
        """The other end of the calling thread's connection has proved who it is."""
        with self._lock:
            self._strangers.pop(threading.current_thread(), None)

    def stop(self) -> None:
        """Accept no more; connections go on."""
        self._stopping.set()
        for listener in [*self._listeners, self._unix]:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for thread in self._acceptors:
            thread.join()

    def end(self) -> None:
        """End all connections; after `stop`."""
        with self._lock:
            serving = dict(self._serving)
        for thread, connection in serving.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(HANDSHAKE_SECONDS)

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = listener.accept()
                self._admit(connection)
            except (OSError, RuntimeError) as error:  # no descriptor, no thread
                if not self._stopping.is_set():
                    log.warning("cannot take connections: %s", error)
                    self._stopping.wait(ACCEPT_PAUSE)

    def _admit(self, connection: socket.socket) -> None:
        thread = threading.Thread(target=self._run, args=(connection,), daemon=True)
        with self._lock:
            self._serving[thread] = self._strangers[thread] = connection
            if len(self._strangers) > MAX_STRANGERS:
                oldest = self._strangers.pop(next(iter(self._strangers)))
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        try:
            thread.start()
        except BaseException:
            self._forget(thread, connection)
            raise

    def _run(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        finally:
            self._forget(threading.current_thread(), connection)

    def _forget(self, thread: threading.Thread, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(thread, None)
            connection.close()
            del self._serving[thread]


def _listen_on(addresses: Sequence[str], port: int, congestion: str) -> list[socket.socket]:
    with contextlib.ExitStack() as undo:
        listeners = []
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = undo.enter_context(socket.socket(family))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            load().choose_congestion(listener.fileno(), congestion)  # accepted sockets inherit it
            try:
                listener.bind((address, port))
            except OSError as error:
                raise ConfigError(
                    f"[pbox] cannot listen on {address} port {port}: {error.strerror}; "
                    "choose a free port, or 0 for any"
                ) from None
            listener.listen(128)
            listeners.append(listener)
        undo.pop_all()
        return listeners
