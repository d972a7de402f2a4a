"""How the processes of one job find each other (contract; see Rendezvous)."""

from __future__ import annotations

from typing import Protocol


class Rendezvous(Protocol):
    """A small key-value store that all ranks of a job share."""

    rank: int
    size: int

    def put(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """Wait for `key`; PeerTimeout after `timeout` seconds (None: the job's timeout)."""
        ...

    def all_gather(self, key: str, value: bytes) -> list[bytes]:
        """Everyone's value, in rank order. Collective; `key` may be used again: the n-th use on
        one rank meets the n-th use on the others. PeerTimeout names the missing ranks."""
        ...
