"""What is measured in one go: a command on the workers of a lab, and what it must move."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.topology import Shape

from experiments import floors
from phub_collective.models import model_keys

LAB = Path(__file__).resolve().parents[1] / "lab"
TEN, FIFTY_SIX = 10e9, 56e9  # the links of the paper, bits per second
LINK = 500e6  # how links are shaped for eight workers: two processors can fill them
# Where the distance from a link's floor counts: until eight workers have begun to send on two
# processors, about 12 ms pass whatever the rate, which are less of a longer exchange.
SLOW_LINK = 280e6
MANY_LINKS = 10  # of a PBox, as the paper's has
COLLECTIVES = ("ring", "halving_doubling", "gloo")
SYSTEMS = ("pbox", *COLLECTIVES)
WITH_PSHARD = ("pbox", "pshard", *COLLECTIVES)  # where the paper has it, too
START_S = {"gloo": 2.2, "pshard": 0.8}  # for each worker to start: it imports torch, or has a shard
OWN_BYTES = {"gloo": 320 << 20, "pshard": 130 << 20}  # of each worker, beside its model
TOUCH = 1.5e9  # bytes per second at which one machine fills and checks arrays
ITERATIONS = 2


@dataclass(frozen=True)
class Cell:
    """A program of scripts/lab on each worker, in a lab of its own shape.

    Attributes:
        flags: of the program, but --json.
        told: environment.
        cores: of the PBox; 0: one per link.
        here: all workers on one host, over its loopback at full speed.
        jobs: that run at once, each on its share of the workers.
        labels: what the row shall say of itself.
        seconds, ready, memory: estimates: of this machine's time, of the part of it until all have
            warmed up, and of bytes.
    """

    program: str
    shape: Shape
    flags: tuple[str, ...] = ()
    told: tuple[tuple[str, str], ...] = ()
    cores: int = 0
    here: bool = False
    jobs: int = 1
    labels: Mapping[str, Any] = field(default_factory=dict, compare=False)
    seconds: float = field(default=0.0, compare=False)
    ready: float = field(default=0.0, compare=False)
    memory: int = field(default=0, compare=False)

    @property
    def key(self) -> str:
        """The same text for the same measurement."""
        shape = dataclasses.asdict(self.shape)
        shape["pairs"] = sorted(self.shape.pairs.items())
        parts = {"shape": shape, "told": dict(self.told), "flags": self.flags}
        rest = {"cores": self.cores, "here": self.here, "jobs": self.jobs}
        return json.dumps({"program": self.program, **parts, **rest}, sort_keys=True)

    @property
    def title(self) -> str:
        values = self.labels.values()
        return " ".join(f"{one:.3g}" if isinstance(one, float) else str(one) for one in values)


def rack(workers: int, links: int, rate: float = TEN, shaped: float = LINK) -> Shape:
    """One rack whose links of `rate` are shaped to `shaped` bits per second."""
    return Shape(workers, 1, rate, links, 0.0, rate / shaped)


def exchange(
    system: str,
    model: str,
    shape: Shape,
    *,
    batch_s: float = 0.0,
    form: str = "overlapped",
    chunk_bytes: int = 0,
    cores: int = 0,
    jobs: int = 1,
    burst: int = 1,
    iterations: int = ITERATIONS,
    here: bool = False,
    labels: Mapping[str, Any] | None = None,
) -> Cell:
    """The exchange of a model by emulated workers; the lab has no PBox where none is needed, or
    where the workers' own hosts run it (`here`, and PShard)."""
    served = system in ("pbox", "auto")
    if here:
        shape = Shape(shape.workers, pbox_links=0)
    elif not served:
        shape = dataclasses.replace(shape, pbox_links=0)
    told = {"PHUB_BACKEND": system}
    if chunk_bytes:
        told["PHUB_CHUNK_BYTES"] = str(chunk_bytes)
    if here:
        told["PHUB_LANE"] = "tcp"
        if cores:
            told["PHUB_PBOX_CORES"] = str(cores)
    flags = ["--model", model, "--iterations", str(iterations)]
    for name, value, usual in (("batch", batch_s, 0), ("burst", burst, 1)):
        flags += [f"--{name}", f"{value:g}"] if value != usual else []
    flags += ["--form", form] if form != "overlapped" else []
    said = {"system": system, "model": model, "workers": shape.workers, **(labels or {})}
    nbytes = sum(key.nbytes for key in model_keys(model))
    touching = 2 * nbytes * shape.workers / TOUCH
    floor = touching if here else floors.exchange(system, nbytes, shape, jobs) * shape.dilation
    busy = max(floor, batch_s * shape.dilation)
    starting = 4 + START_S.get(system, 0.4) * shape.workers
    ready = starting + floor + touching
    own = OWN_BYTES.get(system, 70 << 20)
    return Cell(
        "worker",
        shape,
        tuple(flags),
        tuple(sorted(told.items())),
        0 if here else cores,
        here,
        jobs,
        said,
        ready + iterations * (burst * busy + touching),
        ready,
        shape.workers * (nbytes + own) + (3 * nbytes * jobs if served or system == "pshard" else 0),
    )
