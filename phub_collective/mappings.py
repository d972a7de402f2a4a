"""This process's memory as the kernel tells it, in /proc/self/smaps."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass
class Mapping:
    """One range of addresses; sizes in bytes."""

    begin: int
    end: int
    is_file: bool  # or a memory file
    sizes: dict[str, int] = field(default_factory=dict)

    @property
    def huge(self) -> int:
        """Bytes that stand in huge pages of any kind."""
        return self.reserved + sum(
            self.sizes.get(name, 0) for name in ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped")
        )

    @property
    def reserved(self) -> int:
        """Bytes from the reserve of huge pages, which PSS leaves out."""
        return self.sizes.get("Shared_Hugetlb", 0) + self.sizes.get("Private_Hugetlb", 0)


def mappings() -> list[Mapping]:
    """All of them, by address."""
    found: list[Mapping] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+)", line):
            found.append(Mapping(int(head[1], 16), int(head[2], 16), head[3] != "0"))
        elif size := re.match(r"(\w+):\s+(\d+) kB", line):
            found[-1].sizes[size[1]] = int(size[2]) << 10
    return found


def pages_of(array: np.ndarray) -> str:
    """In which pages the memory of an array of bytes begins: "huge pages" or "plain pages"."""
    if not array.size:
        return "no memory"
    array[:1].max()  # a page that was never touched has no kind yet
    address = int(array.__array_interface__["data"][0])
    here = next(one for one in mappings() if one.begin <= address < one.end)
    return "huge pages" if here.huge else "plain pages"
