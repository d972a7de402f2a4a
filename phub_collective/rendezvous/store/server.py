"""The store's server: one thread over all connections of a job.

It sees at once when a rank's connection closes, also while that rank or others wait. A rank may
connect again after it left (a second `init` in one process): its n-th arrival, its generation,
meets only the n-th arrivals of the others.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

from phub_collective.rendezvous.store import wire
from phub_collective.rendezvous.store.board import Board, slot

FLUSH_S = 5.0  # how long a closing server goes on handing out answers that are due


@dataclass(eq=False)
class _Connection:
    """One client connection, as the server sees it."""

    sock: socket.socket
    nonce: bytes
    hello_by: float  # monotonic time
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    rank: int = -1  # -1: has not proved to know the secret
    generation: int = -1
    primary: bool = False  # its end without "bye" is the rank's death
    keys: list[str] | None = None  # what it waits for
    by_rank: bool = False
    wait_until: float = 0.0

    def wait_for(self, limit: float, keys: list[str], by_rank: bool) -> None:
        self.wait_until = time.monotonic() + limit
        self.keys, self.by_rank = keys, by_rank

    def deadline(self) -> float | None:
        if self.rank < 0:
            return self.hello_by
        return None if self.keys is None else self.wait_until


class StoreServer:
    """Serves the store of one job until `close`. Its thread owns all state.

    Attributes:
        port: TCP port it listens on.
        secret: what clients must know.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, secret: bytes = b"") -> None:
        self.secret = secret or secrets.token_bytes(16)
        self._listener = socket.create_server((host, port), backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._boards: defaultdict[int, Board] = defaultdict(Board)
        self._arrivals: defaultdict[int, int] = defaultdict(int)
        self._connections: set[_Connection] = set()
        self._dropped = False  # since the waiting ones were last looked at
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stop, self._stopped = socket.socketpair()
        self._selector.register(self._stopped, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="phub-store", daemon=True)
        self._thread.start()

    def close(self, linger: float = 0.0) -> None:
        """Hand out the answers that are due, wait up to `linger` seconds for the clients to
        leave, and close what is left; idempotent."""
        if self._thread.is_alive():
            self._stop.send(struct.pack("<d", linger))
            self._thread.join(linger + FLUSH_S + 1)
        self._stop.close()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        linger_until = give_up = float("inf")
        try:
            while time.monotonic() < give_up:
                for key, events in self._selector.select(self._next_timeout(linger_until)):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._stopped:
                        self._selector.unregister(self._stopped)
                        (linger,) = struct.unpack("<d", self._stopped.recv(8))
                        linger_until = time.monotonic() + linger
                        give_up = linger_until + FLUSH_S
                    else:
                        self._move(key.data, events)
                self._answer_waiting()
                lingering = self._connections and time.monotonic() < linger_until
                due = any(c.outbox for c in self._connections)
                if give_up < float("inf") and not lingering and not due:
                    return
        finally:
            for connection in self._connections:
                connection.sock.close()
            self._listener.close()
            self._stopped.close()
            self._selector.close()

    def _next_timeout(self, linger_until: float) -> float | None:
        if self._dropped:
            return 0.0
        deadlines = [d for c in self._connections if (d := c.deadline()) is not None]
        soonest = min([linger_until, *deadlines])
        return None if soonest == float("inf") else max(0.0, soonest - time.monotonic())

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it was gone again before we came
        sock.setblocking(False)
        wire.keep_alive(sock)
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        connection = _Connection(sock, nonce, time.monotonic() + wire.HANDSHAKE_S)
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._send(connection, wire.pack(nonce))

    def _move(self, connection: _Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(connection, b"")
        if events & selectors.EVENT_READ and connection in self._connections:
            self._receive(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        connection.inbox += data
        while connection in self._connections and len(connection.inbox) >= wire.LENGTH.size:
            (length,) = wire.LENGTH.unpack_from(connection.inbox)
            if length > (wire.MAX_HELLO if connection.rank < 0 else wire.MAX_MESSAGE):
                self._drop(connection)
                return
            end = wire.LENGTH.size + length
            if len(connection.inbox) < end:
                return
            body = bytes(connection.inbox[wire.LENGTH.size : end])
            del connection.inbox[:end]
            self._take(connection, body)

    def _take(self, connection: _Connection, body: bytes) -> None:
        """Handle one message; whoever breaks the grammar is dropped."""
        try:
            fields = wire.unpack(body)
            if connection.rank < 0:
                self._hello(connection, *fields)
            else:
                self._request(connection, fields[0], fields[1:])
        except (ValueError, TypeError, IndexError):
            self._drop(connection)

    def _hello(
        self, c: _Connection, nonce: bytes, rank: bytes, generation: bytes, mac: bytes
    ) -> None:
        if not hmac.compare_digest(
            mac, wire.mac(self.secret, b"hello", c.nonce, nonce, rank, generation)
        ):
            raise ValueError("wrong secret")
        c.rank, c.generation = int(rank), int(generation)
        c.primary = c.generation < 0
        if c.primary:
            c.generation = self._arrivals[c.rank]
            self._arrivals[c.rank] += 1
        answer = str(c.generation).encode()
        self._send(c, wire.pack(answer, wire.mac(self.secret, b"welcome", c.nonce, nonce, answer)))

    def _request(self, connection: _Connection, verb: bytes, fields: list[bytes]) -> None:
        board = self._boards[connection.generation]
        if verb == b"get":
            limit, key = fields
            connection.wait_for(float(limit), [key.decode()], by_rank=False)
            return
        if verb == b"gather":
            limit, key, size, value = fields
            board.values[slot(key.decode(), connection.rank)] = value
            slots = [slot(key.decode(), rank) for rank in range(int(size))]
            connection.wait_for(float(limit), slots, by_rank=True)
            return
        if verb == b"put":
            key, value = fields
            board.values[key.decode()] = value
        elif verb == b"discard":
            board.values.pop(fields[0].decode(), None)
        elif verb == b"bye":
            board.left.add(connection.rank)
            return
        else:
            raise ValueError(f"unknown request {verb!r}")
        self._send(connection, wire.pack())

    def _answer_waiting(self) -> None:
        self._dropped = False
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.rank < 0 and connection.hello_by <= now:
                self._drop(connection)
            elif connection.keys is not None:
                self._answer_one(connection, connection.keys, connection.wait_until <= now)

    def _answer_one(self, connection: _Connection, keys: list[str], late: bool) -> None:
        board = self._boards[connection.generation]
        if late or board.finished(keys, connection.by_rank):
            found = board.collect(keys, connection.by_rank)
            connection.keys = None
            values = [b"" if one is None else b"=" + one for one in found.values]
            self._send(connection, wire.pack(json.dumps(found.gone).encode(), *values))

    def _send(self, connection: _Connection, data: bytes) -> None:
        connection.outbox += data
        try:
            sent = connection.sock.send(connection.outbox)
            del connection.outbox[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outbox else 0)
        self._selector.modify(connection.sock, events, connection)

    def _drop(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._dropped = True
        self._selector.unregister(connection.sock)
        connection.sock.close()
        board = self._boards[connection.generation]
        if connection.primary and connection.rank not in board.left:
            board.lost.add(connection.rank)
