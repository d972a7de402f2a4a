"""What one run of the exchange benchmark shall do; written by the driver, read by the workers."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from phub_collective.backends.base import DType, Key
from phub_collective.backends.compression import Compression
from phub_collective.errors import ConfigError
from phub_collective.models import model_keys
from phub_collective.sizes import parse_size

MODES = ("allreduce", "server-optimizer", "shared-model")


@dataclass(frozen=True)
class Plan:
    """See `phub bench exchange --help` for what is not explained here.

    Attributes:
        workloads: model names (`models` true) or sizes in bytes as text.
        iterations: timed iterations of each row; 0: by size, see `Workload.iterations`.
        per_key: one operation per key of a model, not one for the whole model.
        overlap: buckets of PHUB_BUCKET_BYTES in flight together, not the whole model at once.
        registered: (mode allreduce) measure the registered exchange, too.
        compression: as `Compression.of` takes it; other than none: (mode allreduce) only the
            registered exchange is measured, with it.
        choose: let the selector measure, and note which backend it chooses for each workload.
    """

    backends: list[str]
    mode: str
    lane: str
    workers: int
    models: bool
    workloads: list[str]
    dtype: str = "float32"
    iterations: int = 0
    warmup: int = 3
    per_key: bool = False
    overlap: bool = True
    registered: bool = True
    choose: bool = False
    compression: str = "none"
    timeout: float = 120.0

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @staticmethod
    def load(path: Path) -> Plan:
        return Plan(**json.loads(path.read_text()))

    def check(self) -> None:
        """Raise ConfigError for what no run could do."""
        if self.workers < 1 or self.warmup < 1 or self.iterations < 0:
            raise ConfigError(
                f"[bench] workers={self.workers} warmup={self.warmup} iterations={self.iterations}:"
                " expected at least 1 worker and 1 warm-up, and 0 (by size) or more iterations"
            )
        if self.mode != "allreduce" and self.dtype != "float32":
            raise ConfigError(f"[bench] mode {self.mode} is measured in float32, not {self.dtype}")
        if self.mode == "shared-model" and self.lane == "tcp":
            raise ConfigError("[bench] mode shared-model needs --lane shm (one host)")
        packs = Compression.of(self.compression).packs
        if packs and (self.mode, self.dtype) != ("allreduce", "float32"):
            raise ConfigError(
                f"[bench] --compression is measured in mode allreduce of float32, not {self.mode} "
                f"of {self.dtype}"
            )
        for workload in self.workloads:
            Workload.of(self, workload)


@dataclass(frozen=True)
class Workload:
    """What is exchanged: the keys of a model, or one key of so many bytes."""

    model: str
    keys: list[Key]
    dtype: DType

    @property
    def nbytes(self) -> int:
        return sum(key.nbytes for key in self.keys)

    @property
    def count(self) -> int:
        return sum(key.count for key in self.keys)

    @staticmethod
    def of(plan: Plan, name: str) -> Workload:
        dtype = DType[plan.dtype.upper()]
        if plan.models:
            return Workload(name, model_keys(name, dtype), dtype)
        count = int(name) // dtype.itemsize
        if count < 1:
            raise ConfigError(f"[bench] {name} bytes hold no element of {plan.dtype}")
        return Workload("", [Key("flat", (count,), dtype)], dtype)

    def iterations(self, asked: int) -> int:
        """Timed iterations: as asked, else more for small workloads, whose times scatter more."""
        return asked or max(10, min(200, (1 << 30) // max(1, self.nbytes)))


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "32KiB", "1MiB" or "4096"."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(
            f"[bench] {error}; expected a size such as 32KiB, 1MiB, 25MiB or 4096"
        ) from None
