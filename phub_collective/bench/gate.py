"""A barrier between the ranks of one host that disturbs what is measured as little as possible.

`pause` sleeps in the kernel, so a rank that is done takes no processor time from one that is
still being timed. `start` adds a short spin on a shared page, so that the ranks leave as close
together as the scheduler allows.
"""

from __future__ import annotations

import mmap
import selectors
import socket
import time
from pathlib import Path

import numpy as np

from phub_collective.errors import PeerLost, PeerTimeout
from phub_collective.rendezvous import Rendezvous


class Gate:
    """Owned by one thread per rank. Rank 0 hears everyone and answers everyone."""

    def __init__(self, directory: Path, rendezvous: Rendezvous, timeout: float) -> None:
        """`directory`: one that all ranks share; `timeout`: seconds until a rank is missed."""
        self._rank, self._size, self._timeout = rendezvous.rank, rendezvous.size, timeout
        self._peers: dict[int, socket.socket] = {}
        self._generation = 0
        path = str(directory / "gate")
        if self._rank == 0:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(path)
            listener.listen(self._size)
            (directory / "page").write_bytes(bytes(8 * self._size))
        rendezvous.all_gather("bench/gate", b"")
        if self._rank == 0:
            self._accept(listener)
        else:
            self._connect(path)
        with (directory / "page").open("r+b") as page:
            self._arrived = np.frombuffer(mmap.mmap(page.fileno(), 8 * self._size), np.uint64)

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            listener.settimeout(self._timeout)
            for _ in range(self._size - 1):
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    raise self._late(set(range(1, self._size)) - set(self._peers)) from None
                peer.settimeout(self._timeout)
                self._peers[int.from_bytes(peer.recv(2), "little")] = peer

    def _connect(self, path: str) -> None:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(self._timeout)
        peer.connect(path)
        peer.sendall(self._rank.to_bytes(2, "little"))
        self._peers[0] = peer

    def _late(self, missing: set[int]) -> PeerTimeout:
        ranks = tuple(sorted(missing))
        return PeerTimeout(
            f"[bench] rank {self._rank} waited {self._timeout:g} s at a barrier for ranks {ranks}; "
            "see their output for the first error",
            ranks,
        )

    def _receive(self) -> None:
        """One byte from every peer."""
        deadline = time.monotonic() + self._timeout
        with selectors.DefaultSelector() as waiting:
            for rank, peer in self._peers.items():
                waiting.register(peer, selectors.EVENT_READ, rank)
            while missing := {key.data for key in waiting.get_map().values()}:
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise self._late(missing)
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
                    self._take_byte(key.data)

    def _take_byte(self, rank: int) -> None:
        try:
            byte = self._peers[rank].recv(1)
        except ConnectionError:
            byte = b""
        if not byte:
            raise PeerLost(f"[bench] rank {rank} ended before the others", rank)

    def _send(self) -> None:
        for rank, peer in self._peers.items():
            try:
                peer.sendall(b".")
            except ConnectionError:
                raise PeerLost(f"[bench] rank {rank} ended before the others", rank) from None

    def pause(self) -> None:
        """Wait, asleep, until every rank is here."""
        if self._rank == 0:
            self._receive()
            self._send()
        else:
            self._send()
            self._receive()

    def start(self) -> None:
        """Wait until every rank is here and leave together."""
        self.pause()
        self._generation += 1
        self._arrived[self._rank] = self._generation
        deadline = time.monotonic() + self._timeout
        while int(self._arrived.min()) < self._generation:
            # Not sched_yield: since Linux 6.18 each yield gives up a whole slice, and the rank that
            # was here first would be the last to run in what is timed.
            time.sleep(0)
            if time.monotonic() > deadline:
                behind = np.flatnonzero(self._arrived < self._generation)
                raise self._late({int(rank) for rank in behind})

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
