"""What a job may ask of a PBox: numbers that no honest job reaches, and its share of the memory
that is there. Checked before anything is made, since a server that runs out fails all jobs."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, fields
from pathlib import Path

from phub_collective.backends.base import Key
from phub_collective.backends.pbox import protocol
from phub_collective.backends.pbox.keytable import TableSpec
from phub_collective.errors import ConfigError

MAX_JOB_NAME = 200  # characters
MAX_SHARDS = 256  # of a job
MAX_NAME = 1000  # of a key or table
MAX_GROUPS = 4096
MAX_TABLES = 1 << 14  # of one job, like the next two; ad-hoc names are tables, too
MAX_KEYS = 1 << 20
MAX_CHUNKS = 1 << 22  # 128 GiB in chunks of 32 KiB
DESCRIBED_KEY, DESCRIBED_CHUNK = 1000, 200  # bytes of a table's description, about
PAGE_BYTES = 4096
RING_MAPPINGS = 5  # of one shm lane: its page of controls, and each ring twice
MEMINFO = Path("/proc/meminfo")
MAX_MAPPINGS = Path("/proc/sys/vm/max_map_count")
OWN_MAPPINGS = Path("/proc/self/maps")


@dataclass(frozen=True)
class JobSpec:
    """What CreateService asks for.

    Attributes:
        shard, shards: which part of the job's chunks this PBox gets, of how many.
    """

    name: str
    workers: int
    chunk_bytes: int
    shard: int = 0
    shards: int = 1

    @staticmethod
    def from_json(message: protocol.Message) -> JobSpec:
        name, workers = str(message.get("name", "")), int(message.get("workers", 0))
        part = int(message.get("shard", 0)), int(message.get("shards", 1))
        return JobSpec(name, workers, int(message.get("chunk_bytes", 0)), *part)

    def check(self, max_workers: int, max_payload: int) -> None:
        """Raise ConfigError when a number is out of range."""
        if not 0 < len(self.name) <= MAX_JOB_NAME or not self.name.isprintable():
            raise ConfigError(f"[pbox] a job's name has 1 to {MAX_JOB_NAME} printable characters")
        if not 1 <= self.workers <= max_workers:
            raise ConfigError(f"[pbox] a job has 1 to {max_workers} workers, got {self.workers}")
        if not 64 <= self.chunk_bytes <= max_payload:
            raise ConfigError(
                f"[pbox] chunks of {self.chunk_bytes} bytes; expected 64 to {max_payload}"
            )
        if not 0 <= self.shard < self.shards <= MAX_SHARDS:
            raise ConfigError(
                f"[pbox] shard {self.shard} of {self.shards}; a job has 1 to {MAX_SHARDS} shards, "
                "counted from 0"
            )


@dataclass(frozen=True)
class Need:
    """What something takes of the server: bytes of memory, memory mappings (the kernel allows a
    process some 65,000), and entries of tables of our own."""

    nbytes: int = 0
    mappings: int = 0
    tables: int = 0
    keys: int = 0
    chunks: int = 0

    def __add__(self, other: Need) -> Need:
        return Need(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Need)))

    def __sub__(self, other: Need) -> Need:
        return Need(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Need)))


class Quota:
    """Who has taken how much. A job gets at most half of the memory and the mappings that other
    jobs have left, so that however many there are, something is left for one more. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[int, Need] = {}
        self._memory = available_memory()
        own = len(OWN_MAPPINGS.read_text().splitlines())
        self._mappings = int(MAX_MAPPINGS.read_text()) - own

    def take(self, job: int, need: Need, what: str) -> None:
        """Give `job` (its number) what it needs for `what`.

        Raises:
            ConfigError: it is more than the job may have.
        """
        with self._lock:
            taken = self._taken.get(job, Need()) + need
            for name, most in (("tables", MAX_TABLES), ("keys", MAX_KEYS), ("chunks", MAX_CHUNKS)):
                if getattr(taken, name) > most:
                    raise ConfigError(
                        f"[pbox] with {what} this job has {getattr(taken, name)} {name}; at most "
                        f"{most} are taken: give an operation the same name each time"
                    )
            others = [some for number, some in self._taken.items() if number != job]
            memory = self._memory - sum(some.nbytes for some in others)
            mappings = self._mappings - sum(some.mappings for some in others)
            available = available_memory()
            if 2 * taken.nbytes > memory or 2 * need.nbytes > available:
                raise ConfigError(
                    f"[pbox] {what} needs {need.nbytes >> 20} MiB on the server, in all "
                    f"{taken.nbytes >> 20} MiB for this job; the server has "
                    f"{min(memory, available) >> 20} MiB left and keeps half of it; use fewer "
                    "workers, a smaller model or a larger host"
                )
            if 2 * taken.mappings > mappings:
                raise ConfigError(
                    f"[pbox] with {what} this job has {taken.mappings} memory mappings on the "
                    f"server, which has {mappings} left and keeps half of them; give an operation "
                    "the same name each time, or raise vm.max_map_count"
                )
            self._taken[job] = taken

    def give(self, job: int, need: Need) -> None:
        """`job` has given back what it took."""
        with self._lock:
            self._taken[job] = self._taken[job] - need

    def end(self, job: int) -> None:
        """A job is over and has given back everything."""
        with self._lock:
            self._taken.pop(job, None)


def check_table(spec: TableSpec) -> None:
    """Raise ConfigError when a table is out of all proportion."""
    long = next((n for n in (spec.name, *(k.name for k in spec.keys)) if len(n) > MAX_NAME), None)
    if long is not None:
        raise ConfigError(f"[pbox] a name of {len(long)} characters; at most {MAX_NAME} are taken")
    if spec.groups > MAX_GROUPS:
        raise ConfigError(
            f"[pbox] {spec.name!r} has {spec.groups} parameter groups; "
            f"at most {MAX_GROUPS} are taken"
        )


def description_need(spec: TableSpec) -> Need:
    """What it takes to know a table, from its first announcement on."""
    keys = len(spec.keys)
    chunks = sum(-(-_bytes(key) // spec.chunk_bytes) for key in spec.keys)
    nbytes = DESCRIBED_KEY * keys + DESCRIBED_CHUNK * chunks
    return Need(nbytes, tables=1, keys=keys, chunks=chunks)


def memory_need(spec: TableSpec, workers: int, local: bool, shards: int = 1) -> Need:
    """What the native core allocates for a table (see `Table` in native/table.h). Of several
    shards the fullest has an even share and less than a chunk (see placement.py)."""
    narrow = any(key.dtype.is_floating and key.dtype.itemsize == 2 for key in spec.keys)
    arenas = workers if spec.in_place(local) else 0
    weights = 2 if spec.shared else 0
    answers = 2 if not arenas and (narrow or not spec.server) else 0
    state = spec.states if spec.server else 0
    held = workers - 1 if spec.deterministic and not arenas else 0
    master = spec.server and (narrow or not spec.shared)
    sums = not arenas and (narrow or spec.server)
    as_wide_as_keys, wide = arenas + weights + answers + held, state + master + sums
    copies = as_wide_as_keys + wide * (2 if narrow else 1)
    nbytes = sum(map(_bytes, spec.keys))
    if shards > 1:
        nbytes = min(nbytes, nbytes // shards + spec.chunk_bytes)
    return Need(nbytes * copies, as_wide_as_keys + wide)


def lane_need(ring_bytes: int) -> Need:
    """What one shm lane takes; `ring_bytes`: of one direction."""
    return Need(2 * ring_bytes + PAGE_BYTES, RING_MAPPINGS)


def available_memory() -> int:
    """Bytes that can be had without swapping."""
    found = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
    return int(found["MemAvailable"].split()[0]) << 10


def _bytes(key: Key) -> int:
    """`key.nbytes`, without the bounds of NumPy's integers."""
    return math.prod(key.shape) * key.dtype.itemsize
