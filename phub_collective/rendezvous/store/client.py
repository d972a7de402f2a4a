"""One rank's end of the store."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Sequence

from phub_collective.errors import AuthError, PeerLost, PeerTimeout, PhubError
from phub_collective.rendezvous.store import wire
from phub_collective.rendezvous.store.board import Collected

RETRY_S = 0.05  # between two rounds over the addresses


class StoreClient:
    """One rank's end of the store. Thread-safe: a request takes an idle connection or makes one,
    so that a thread that waits holds up no other."""

    def __init__(
        self, addresses: Sequence[tuple[str, int]], secret: bytes, rank: int, timeout: float
    ) -> None:
        self._secret, self._rank, self._timeout = secret, rank, timeout
        self._generation = -1
        self._lock = threading.Lock()
        self._closed = False
        self._primary = self._connect(addresses)
        self._address = self._primary.getpeername()[:2]
        self._idle = [self._primary]

    def _connect(self, addresses: Sequence[tuple[str, int]]) -> socket.socket:
        """A connection to the first address that proves to know the secret. Tries again until the
        timeout, since the server may start after us."""
        deadline = time.monotonic() + self._timeout
        while True:
            failures: list[Exception] = []
            for address in addresses:
                try:
                    return self._handshake(address)
                except (OSError, AuthError) as error:
                    failures.append(error)
            text = "; ".join(
                f"{host}:{port}: {error}"
                for (host, port), error in zip(addresses, failures, strict=True)
            )
            text = f"[rendezvous] rank {self._rank} found no store of its job: {text}"
            if failures and all(isinstance(error, AuthError) for error in failures):
                raise AuthError(f"{text}; are all processes of the same job?")
            if time.monotonic() >= deadline:
                raise PeerTimeout(f"{text}; gave up after {self._timeout:g} s")
            time.sleep(RETRY_S)

    def _handshake(self, address: tuple[str, int]) -> socket.socket:
        """Connect and prove the secret both ways; OSError, or AuthError when it was not proved."""
        sock = socket.create_connection(address, min(wire.HANDSHAKE_S, self._timeout))
        try:
            wire.keep_alive(sock)
            (challenge,) = wire.unpack(wire.receive(sock, wire.MAX_HELLO))
            nonce = secrets.token_bytes(wire.NONCE_BYTES)
            rank, generation = str(self._rank).encode(), str(self._generation).encode()
            proof = wire.mac(self._secret, b"hello", challenge, nonce, rank, generation)
            sock.sendall(wire.pack(nonce, rank, generation, proof))
            answer, proof = wire.unpack(wire.receive(sock, wire.MAX_HELLO))
            expected = wire.mac(self._secret, b"welcome", challenge, nonce, answer)
            if not hmac.compare_digest(proof, expected):
                raise ValueError("wrong proof")
            self._generation = int(answer)
        except (ValueError, ConnectionError) as error:
            sock.close()
            raise AuthError(f"it did not prove to know the job's secret ({error})") from error
        except OSError:
            sock.close()
            raise
        return sock

    def _ask(self, timeout: float, *fields: bytes) -> list[bytes]:
        """One request and its answer, which the server gives within `timeout` seconds."""
        with self._lock:
            if self._closed:
                raise PhubError(f"[rendezvous] rank {self._rank} uses its rendezvous after close()")
            sock = self._idle.pop() if self._idle else None
        if sock is None:
            sock = self._connect([self._address])
        try:
            sock.settimeout(timeout + wire.HANDSHAKE_S)
            sock.sendall(wire.pack(*fields))
            answer = wire.unpack(wire.receive(sock, wire.MAX_MESSAGE))
        except (OSError, ValueError) as error:
            sock.close()
            host, port = self._address
            raise PeerLost(
                f"[rendezvous] rank {self._rank} lost the job's store at {host}:{port} ({error}): "
                "the process that serves it (phubrun, or rank 0) has ended"
            ) from error
        with self._lock:
            if not self._closed:
                self._idle.append(sock)
                return answer
        sock.close()
        return answer

    def put(self, key: str, value: bytes) -> None:
        self._ask(0.0, b"put", key.encode(), value)

    def discard(self, key: str) -> None:
        self._ask(0.0, b"discard", key.encode())

    def wait_for(self, key: str, timeout: float) -> Collected:
        return self._wait(timeout, b"get", key)

    def gather(self, key: str, value: bytes, size: int, timeout: float) -> Collected:
        return self._wait(timeout, b"gather", key, str(size).encode(), value)

    def _wait(self, timeout: float, verb: bytes, key: str, *fields: bytes) -> Collected:
        limit = repr(float(timeout)).encode()
        gone, *values = self._ask(timeout, verb, limit, key.encode(), *fields)
        return Collected([one[1:] if one else None for one in values], json.loads(gone))

    def close(self) -> None:
        """Say farewell, so that our end is no loss to the others; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections, self._idle = set(self._idle) | {self._primary}, []
        try:
            self._primary.settimeout(wire.HANDSHAKE_S)
            self._primary.sendall(wire.pack(b"bye"))
        except OSError:
            pass  # the server is gone already
        for sock in connections:
            sock.close()
