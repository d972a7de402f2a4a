"""How the processes of one job find each other: a small key-value store that all ranks share.

`LocalRendezvous` joins ranks that are threads of one process (tests, and jobs of one worker);
`StoreRendezvous` joins processes through a `StoreServer` (store/). Which one a process gets, and
where the server runs, is decided in topology.py.
"""

from __future__ import annotations

import abc
import threading
import time
from collections import defaultdict
from collections.abc import Sequence

from phub_collective.errors import PeerLost, PeerTimeout
from phub_collective.rendezvous.store import Board, Collected, StoreClient, StoreServer, slot

LINGER_S = 5.0  # how long the rank that serves the store stays for the others when it leaves


class Rendezvous(abc.ABC):
    """A small key-value store that all ranks of a job share. Thread-safe.

    Attributes:
        rank, size: this process's place in the job.
        timeout: seconds that a wait lasts when the call names none.
    """

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self._uses: defaultdict[str, int] = defaultdict(int)
        self._uses_lock = threading.Lock()

    @abc.abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Set `key`; a second put replaces the value."""

    @abc.abstractmethod
    def _wait_for(self, key: str, timeout: float) -> Collected:
        """Wait up to `timeout` seconds for one key; see `Board.finished` for what ends it."""

    @abc.abstractmethod
    def _gather(self, key: str, value: bytes, timeout: float) -> Collected:
        """Set this rank's slot of `key` and wait up to `timeout` seconds for everybody's."""

    @abc.abstractmethod
    def discard(self, key: str) -> None:
        """Forget `key` (nothing happens when it is not there)."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the job in good order, which is no loss to the others; idempotent."""

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """Wait for `key` and return its value.

        Raises:
            PeerTimeout: nobody set it within `timeout` seconds (None: `self.timeout`).
            PeerLost: it is not there and a rank of the job has died.
        """
        limit = self.timeout if timeout is None else timeout
        found = self._wait_for(key, limit)
        value = found.values[0]
        if value is not None:
            return value
        what = f"[rendezvous] rank {self.rank} waited for key {key!r}"
        if found.gone:
            raise PeerLost(f"{what}, but {_ranks(found.gone)} died", found.gone[0])
        raise PeerTimeout(f"{what}, got nothing within {limit:g} s")

    def all_gather(self, key: str, value: bytes, timeout: float | None = None) -> list[bytes]:
        """Everyone's value, in rank order. Collective; `key` may be used again: the n-th use on
        one rank meets the n-th use on the others.

        Raises:
            PeerTimeout: some ranks did not come within `timeout` seconds; `ranks` are those.
            PeerLost: a rank that has not contributed died or left.
        """
        limit = self.timeout if timeout is None else timeout
        with self._uses_lock:
            use = self._uses[key]
            self._uses[key] += 1
        found = self._gather(f"{key}/{use}", value, limit)
        missing = tuple(rank for rank, one in enumerate(found.values) if one is None)
        if missing:
            self._raise_missing(key, missing, found.gone, limit)
        if use > 0:
            # Everybody has come to this use, so everybody has read the one before.
            self.discard(slot(f"{key}/{use - 1}", self.rank))
        return [one for one in found.values if one is not None]

    def barrier(self, key: str = "barrier", timeout: float | None = None) -> None:
        """Wait until every rank has come here; errors as in `all_gather`."""
        self.all_gather(f"barrier:{key}", b"", timeout)

    def _raise_missing(
        self, key: str, missing: tuple[int, ...], gone: Sequence[int], limit: float
    ) -> None:
        what = f"[rendezvous] rank {self.rank} expected {self.size} ranks at {key!r}"
        if gone:
            raise PeerLost(
                f"{what}, but {_ranks(gone)} died or left; missing: {_ranks(missing)}", gone[0]
            )
        raise PeerTimeout(f"{what}, {_ranks(missing)} did not come within {limit:g} s", missing)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()


def _ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", or "ranks 1, 2, 5"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class LocalBoard:
    """What the `LocalRendezvous` of one job share: the board and its lock."""

    def __init__(self) -> None:
        self.board = Board()
        self.changed = threading.Condition()


class LocalRendezvous(Rendezvous):
    """Ranks that are threads of one process. Leaving a `with` block by an exception, or calling
    `abandon`, is this rank's death as the others see it."""

    def __init__(
        self, rank: int = 0, size: int = 1, shared: LocalBoard | None = None, timeout: float = 30.0
    ) -> None:
        super().__init__(rank, size, timeout)
        self._shared = shared or LocalBoard()

    @staticmethod
    def group(size: int, timeout: float = 30.0) -> list[LocalRendezvous]:
        """One rendezvous for each of `size` ranks, joined."""
        shared = LocalBoard()
        return [LocalRendezvous(rank, size, shared, timeout) for rank in range(size)]

    def put(self, key: str, value: bytes) -> None:
        with self._shared.changed:
            self._shared.board.values[key] = value
            self._shared.changed.notify_all()

    def _wait_for(self, key: str, timeout: float) -> Collected:
        return self._collect([key], False, timeout)

    def _gather(self, key: str, value: bytes, timeout: float) -> Collected:
        self.put(slot(key, self.rank), value)
        return self._collect([slot(key, rank) for rank in range(self.size)], True, timeout)

    def _collect(self, keys: Sequence[str], by_rank: bool, timeout: float) -> Collected:
        board, deadline = self._shared.board, time.monotonic() + timeout
        with self._shared.changed:
            while not board.finished(keys, by_rank):
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._shared.changed.wait(left)
            return board.collect(keys, by_rank)

    def discard(self, key: str) -> None:
        with self._shared.changed:
            self._shared.board.values.pop(key, None)

    def close(self) -> None:
        with self._shared.changed:
            self._shared.board.left.add(self.rank)
            self._shared.changed.notify_all()

    def abandon(self) -> None:
        """Die, as far as the other ranks can tell."""
        with self._shared.changed:
            self._shared.board.lost.add(self.rank)
            self._shared.changed.notify_all()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


class StoreRendezvous(Rendezvous):
    """Processes joined through a `StoreServer`, whose secret they share. The server notices when
    a process dies, since its connection closes without a farewell."""

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        secret: bytes,
        rank: int,
        size: int,
        timeout: float = 30.0,
        connect_timeout: float = 30.0,
        server: StoreServer | None = None,
    ) -> None:
        """Connect to the first of `addresses` that proves to know the secret. With `server`, the
        rank that serves the store: it is closed when this rank leaves.

        Raises:
            PeerTimeout: none of them answered within `connect_timeout` seconds.
            AuthError: something answered at each of them, but not with our secret.
        """
        super().__init__(rank, size, timeout)
        self._server = server
        self._client = StoreClient(addresses, secret, rank, connect_timeout)

    def put(self, key: str, value: bytes) -> None:
        self._client.put(key, value)

    def _wait_for(self, key: str, timeout: float) -> Collected:
        return self._client.wait_for(key, timeout)

    def _gather(self, key: str, value: bytes, timeout: float) -> Collected:
        return self._client.gather(key, value, self.size, timeout)

    def discard(self, key: str) -> None:
        self._client.discard(key)

    def close(self) -> None:
        self._client.close()
        if self._server is not None:
            self._server.close(linger=LINGER_S)
