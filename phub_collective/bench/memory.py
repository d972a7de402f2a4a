"""Memory of processes and of arrays, as the kernel counts it (Linux, /proc).

PSS counts a shared page once for all processes that map it, so the sum over the workers and the
server is what the job really holds.
"""

from __future__ import annotations

import ctypes
import gc
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np


def pss(pid: int | None = None) -> int:
    """Proportional set size in bytes of process `pid` (None: this one); 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid or 'self'}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    match = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) << 10 if match else 0


def settle() -> None:
    """Give back what is no longer used, so that it neither vanishes nor is used again, unseen,
    while somebody measures."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


class PeakMeter:
    """Samples the PSS of some processes while the block runs; `rise[pid]` is the highest sample
    less the first one, in bytes. For untimed work only: a sample costs milliseconds."""

    INTERVAL = 0.01  # seconds between samples

    def __init__(self, pids: Iterable[int]) -> None:
        self._first = {pid: pss(pid) for pid in pids}
        self._peak = dict(self._first)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def _sample(self) -> None:
        for pid in self._peak:
            self._peak[pid] = max(self._peak[pid], pss(pid))

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

    @property
    def rise(self) -> dict[int, int]:
        return {pid: self._peak[pid] - self._first[pid] for pid in self._peak}


@dataclass
class Mapping:
    """One line range of /proc/self/smaps; sizes in bytes."""

    begin: int
    end: int
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def huge(self) -> int:
        """Bytes that stand in huge pages of any kind."""
        names = (
            "AnonHugePages",
            "ShmemPmdMapped",
            "FilePmdMapped",
            "Shared_Hugetlb",
            "Private_Hugetlb",
        )
        return sum(self.sizes.get(name, 0) for name in names)


def _mappings() -> list[Mapping]:
    found: list[Mapping] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if head:
            found.append(Mapping(int(head[1], 16), int(head[2], 16)))
        elif size := re.match(r"(\w+):\s+(\d+) kB", line):
            found[-1].sizes[size[1]] = int(size[2]) << 10
    return found


@dataclass(frozen=True)
class Held:
    """What some arrays of this process hold, in bytes."""

    nbytes: int  # their sizes
    share: int  # the part of it that PSS charges to this process
    huge: int  # the part of it in huge pages


def held(arrays: Iterable[np.ndarray]) -> Held:
    """Look the arrays' mappings up. An array within a larger mapping gets its fraction of it."""
    mappings = _mappings()
    nbytes = share = huge = 0
    for array in arrays:
        address, size = int(array.__array_interface__["data"][0]), int(array.nbytes)
        nbytes += size
        share += size
        for mapping in mappings:
            overlap = min(mapping.end, address + size) - max(mapping.begin, address)
            if overlap <= 0:
                continue
            resident = mapping.sizes.get("Rss", 0)
            if resident:
                share -= int(overlap * (1 - mapping.sizes["Pss"] / resident))
            elif mapping.huge:
                share -= overlap  # hugetlbfs pages are in neither RSS nor PSS
            huge += int(overlap * mapping.huge / (mapping.end - mapping.begin))
    return Held(nbytes, share, huge)
