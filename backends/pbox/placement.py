"""Where each chunk of a model is aggregated: chunk -> shard -> interface -> core. Pure arithmetic.

Every level is a longest-processing-time partition of the chunks' bytes: largest first, each to
the least loaded bin, whose heaviest bin is at most 4/3 - 1/(3 bins) times the best possible
(R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). Ties go to the lower index, so
all processes compute the same placement from the same key table and nothing is negotiated.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from phub_collective.backends.base import Key, layout
from phub_collective.config import Config
from phub_collective.errors import ConfigError


class Chunk(NamedTuple):
    """A slice of one key: the unit of transfer and of aggregation."""

    key: int
    offset: int  # bytes from the start of the arena
    nbytes: int


@dataclass(frozen=True)
class Placement:
    """The owner of each chunk.

    Attributes:
        chunks: in the order of the arena; a chunk's index here is its number on the wire.
        shard, interface, core: int32 arrays, one element per chunk. Interfaces and cores count
            from 0 within their shard.
        loads: bytes owned by each core, an int64 array of shape (shards, cores).
    """

    chunks: list[Chunk]
    shard: np.ndarray
    interface: np.ndarray
    core: np.ndarray
    loads: np.ndarray


def split(keys: Sequence[Key], chunk_bytes: int = Config.chunk_bytes) -> list[Chunk]:
    """Cut every key into chunks of `chunk_bytes`, the last one shorter. A chunk never straddles
    keys; a key without elements has no chunk."""
    offsets, _ = layout(keys)
    chunks = []
    for index, (key, offset) in enumerate(zip(keys, offsets, strict=True)):
        end = offset + key.nbytes
        for begin in range(offset, end, chunk_bytes):
            chunks.append(Chunk(index, begin, min(chunk_bytes, end - begin)))
    return chunks


def place(
    keys: Sequence[Key],
    chunk_bytes: int = Config.chunk_bytes,
    cores: int = 1,
    interfaces: int = 1,
    shards: int = 1,
) -> Placement:
    """Give every chunk to a core of an interface of a shard.

    Args:
        cores, interfaces: of each shard. Interface i is served by its own cores only (see
            `cores_of`), which balances the links first and then the cores of each link.

    Raises:
        ConfigError: a number is below 1.
    """
    for name, value in (("cores", cores), ("interfaces", interfaces), ("shards", shards)):
        if value < 1:
            raise ConfigError(f"[placement] expected at least 1 of {name}, got {value}")
    chunks = split(keys, chunk_bytes)
    sizes = np.array([chunk.nbytes for chunk in chunks], np.int64)
    shard, interface, core = (np.zeros(len(chunks), np.int32) for _ in range(3))

    shard[:] = partition(sizes, shards)
    for s in range(shards):
        on_shard = np.flatnonzero(shard == s)
        interface[on_shard] = partition(sizes[on_shard], interfaces)
        for i in range(interfaces):
            on_link = on_shard[interface[on_shard] == i]
            owners = cores_of(i, interfaces, cores)
            core[on_link] = owners.start + partition(sizes[on_link], len(owners))

    loads = np.zeros((shards, cores), np.int64)
    np.add.at(loads, (shard, core), sizes)
    return Placement(chunks, shard, interface, core, loads)


def cores_of(interface: int, interfaces: int, cores: int) -> range:
    """The cores that serve an interface: an even share of neighbouring cores, or, with fewer
    cores than interfaces, the one core that also serves its neighbours."""
    begin = interface * cores // interfaces
    return range(begin, max(begin + 1, (interface + 1) * cores // interfaces))


def partition(sizes: np.ndarray, bins: int) -> np.ndarray:
    """The bin of each item, by longest processing time; int32, one per item."""
    owner = np.zeros(len(sizes), np.int32)
    if bins == 1:
        return owner
    heap = [(0, index) for index in range(bins)]  # (load, bin): ties go to the lower bin
    order = np.argsort(-sizes, kind="stable")
    chosen = []
    for size in sizes[order].tolist():
        load, index = heap[0]
        chosen.append(index)
        heapq.heapreplace(heap, (load + size, index))
    owner[order] = chosen
    return owner
