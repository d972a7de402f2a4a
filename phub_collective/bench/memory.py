"""Memory of processes and of arrays, as the kernel counts it (Linux, /proc).

PSS divides a shared page among the processes that map it at that moment, so the sum over a job's
processes is what the job holds. The share of one of them changes as others map a page or not;
therefore memory that a server shares with its workers is summed over all of them and counted as
the server's.
"""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from phub_collective.mappings import mappings


@dataclass(frozen=True)
class Pss:
    """Proportional set size of a process, in bytes: shared memory, and everything else."""

    shared: int
    other: int

    @staticmethod
    def of(pid: int) -> Pss:
        """As it is now; zeros when the process is gone."""
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return Pss(0, 0)
        sizes = {
            name: int(kib) << 10 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)
        }
        shared = sizes.get("Pss_Shmem", 0)
        return Pss(shared, sizes.get("Pss", 0) - shared)


def settle() -> None:
    """Give back what is no longer used, so that it neither vanishes nor is used again, unseen,
    while somebody measures."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


class PeakMeter:
    """Samples a job's memory while the block runs. For untimed work only: a sample costs
    milliseconds.

    Attributes:
        worker: highest rise of any worker since the block began, in bytes; without what it
            shares when there is a server.
        server: the same of all servers together, and of what all processes share; None without a
            server.
    """

    INTERVAL = 0.01  # seconds between samples

    def __init__(self, workers: Sequence[int], servers: Sequence[int] = ()) -> None:
        self._workers, self._servers = workers, servers
        self._begin = {pid: Pss.of(pid) for pid in [*workers, *servers]}
        self.worker = 0
        self.server = 0 if servers else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def _sample(self) -> None:
        rises = {}
        for pid, begin in self._begin.items():
            now = Pss.of(pid)
            rises[pid] = Pss(now.shared - begin.shared, now.other - begin.other)
        shared = sum(rise.shared for rise in rises.values())
        for pid in self._workers:
            own = rises[pid].other + (0 if self._servers else rises[pid].shared)
            self.worker = max(self.worker, own)
        if self.server is not None:
            self.server = max(self.server, shared + sum(rises[p].other for p in self._servers))

    def _watch(self) -> None:
        while not self._stop.wait(self.INTERVAL):
            self._sample()

    def __enter__(self) -> PeakMeter:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()


@dataclass(frozen=True)
class Held:
    """What some arrays of this process hold, in bytes; reserved huge pages are in `huge` only."""

    private: int
    shared: int
    huge: int


def held(arrays: Iterable[np.ndarray]) -> Held:
    """Look the arrays' mappings up. An array in a part of a mapping gets its part of the pages."""
    known = mappings()
    private = shared = huge = 0
    for array in arrays:
        address = int(array.__array_interface__["data"][0])
        for mapping in known:
            overlap = min(mapping.end, address + array.nbytes) - max(mapping.begin, address)
            if overlap <= 0:
                continue
            part = overlap / (mapping.end - mapping.begin)
            huge += int(part * mapping.huge)
            counted = overlap - int(part * mapping.reserved)
            if mapping.is_file:
                shared += counted
            else:
                private += counted
    return Held(private, shared, huge)
