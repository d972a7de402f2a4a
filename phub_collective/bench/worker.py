"""One worker of the exchange benchmark: `python -m phub_collective.bench.worker FOLDER`.

FOLDER holds plan.json. Rank 0 keeps progress.txt and leaves results.json; a rank that fails
leaves error-PID.json, so that the driver can tell the first error from those that follow it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phub_collective.backends import names, runs_optimizer
from phub_collective.backends.base import Backend
from phub_collective.backends.buckets import CASTS
from phub_collective.backends.compression import Compression
from phub_collective.bench.bandwidth import bandwidth, floor_seconds, walk_seconds
from phub_collective.bench.gate import Gate
from phub_collective.bench.header import lane_of, worker_facts
from phub_collective.bench.measure import measure, naming
from phub_collective.bench.packed import PackedAllreduce
from phub_collective.bench.pattern import Pattern
from phub_collective.bench.plan import Plan, Workload
from phub_collective.bench.subjects import (
    ArenaAllreduce,
    FlatAllreduce,
    ServerOptimizer,
    SharedModel,
    Subject,
    WorkerOptimizer,
    WorkerSgd,
)
from phub_collective.selection.rules import AUTO
from phub_collective.session import Session
from phub_collective.sizes import size_text


class Runner:
    """Runs a plan on one rank. All ranks make the same calls in the same order."""

    def __init__(self, plan: Plan, session: Session, folder: Path) -> None:
        self._plan, self._session, self._folder = plan, session, folder
        self._compression = Compression.of(plan.compression)
        self._rank, self._rendezvous = session.rank, session.context.rendezvous
        self._gate = Gate(folder, self._rendezvous, plan.timeout)
        self._backends: list[Backend] = []

    def run(self) -> dict[str, Any]:
        """Connect everything and measure all workloads; header facts and rows."""
        plan = self._plan
        for name in plan.backends:
            self._progress(f"connecting {name}")
            with naming(f"backend {name!r}", "connecting", self._rank):
                self._backends.append(self._session.backend(name))
        self._name_shared_files()
        memory = self._memory_bandwidths()
        workloads = [Workload.of(plan, name) for name in plan.workloads]
        header = worker_facts(plan, self._session.config) | {
            f"{walk}_GBps": rate / 1e9 for walk, rate in memory.items()
        }
        if plan.choose:
            header["choices"] = self._choices(workloads)
        rows = [
            {**row, **self._judge(row, max(memory.values()))}
            for workload in workloads
            for row in self._rows(workload)
        ]
        self._gate.close()
        return {"header": header, "rows": rows}

    def _name_shared_files(self) -> None:
        """Tell the driver what shall be gone at the end, however the end comes."""
        if self._rank == 0:
            maps = Path("/proc/self/maps").read_text()
            names = sorted(set(re.findall(r"/dev/shm/\S+$", maps, re.MULTILINE)))
            (self._folder / "shared-files.json").write_text(json.dumps(names))

    def _choices(self, workloads: Sequence[Workload]) -> dict[int, str]:
        """What the selector, measuring anew, would use for each size in bytes."""
        self._progress("selector")
        self._session.prepare(fresh=True)
        return {w.nbytes: self._session.choose(w.nbytes).name for w in workloads}

    def _memory_bandwidths(self) -> dict[str, float]:
        mine = walk_seconds(self._gate, self._rank)
        gathered = self._rendezvous.all_gather("bench/memory", json.dumps(mine).encode())
        ranks = [json.loads(one) for one in gathered]
        return {walk: bandwidth([rank[walk] for rank in ranks]) for walk in mine}

    def _judge(self, row: dict[str, Any], memory: float) -> dict[str, Any]:
        """The lane that carried a row, and its floor."""
        lane = lane_of(row["backend"], self._plan.lane)
        floor = floor_seconds(row["mode"], lane, row["workers"], row["bytes"], memory)
        times = None if floor is None else row["median_s"] / floor
        return {"lane": lane, "floor_s": floor, "times_floor": times}

    def _rows(self, workload: Workload) -> list[dict[str, Any]]:
        plan, rows = self._plan, []
        # What is cast must be exact in the type it is cast to.
        reduced = CASTS.get(self._compression.packing, workload.dtype)
        numbers = Pattern(self._session.size, reduced, workload.count)
        for mode, subjects in self._groups(workload, numbers):
            what = workload.model or size_text(workload.nbytes)
            self._progress(f"{mode} {what}: {', '.join(s.backend.name for s in subjects)}")
            iterations = workload.iterations(plan.iterations)
            rows += measure(subjects, self._gate, self._rendezvous, plan.warmup, iterations)
        return rows

    def _groups(self, workload: Workload, numbers: Pattern) -> Iterator[tuple[str, list[Subject]]]:
        """The subjects that are measured side by side. One group holds its memory at a time, and
        a worker's private tensors are the same ones for every backend."""
        plan, config = self._plan, self._session.config
        bucket = config.bucket_bytes if plan.overlap else 2 * workload.nbytes + (1 << 20)
        if plan.mode != "allreduce":
            sgd = WorkerSgd(workload)
            yield (
                plan.mode,
                [
                    served(backend.name, plan)(backend, workload, numbers, bucket)
                    if runs_optimizer(backend.name)
                    else WorkerOptimizer(backend, workload, numbers, bucket, sgd)
                    for backend in self._backends
                ],
            )
            return
        if self._compression.packs:
            yield (
                PackedAllreduce.mode,
                [
                    PackedAllreduce(backend, workload, numbers, bucket, self._compression)
                    for backend in self._backends
                ],
            )
            return
        tensor = np.zeros(workload.nbytes, np.uint8)
        tensor.fill(0)  # touches it: its memory is not the exchange's
        yield (
            "allreduce",
            [
                FlatAllreduce(backend, workload, numbers, tensor, plan.per_key)
                for backend in self._backends
            ],
        )
        del tensor
        if not plan.registered:
            return
        yield (
            "allreduce-arena",
            [ArenaAllreduce(backend, workload, numbers, bucket) for backend in self._backends],
        )

    def _progress(self, text: str) -> None:
        if self._rank == 0:
            temporary = self._folder / "progress.new"
            temporary.write_text(text)
            temporary.rename(self._folder / "progress.txt")


def served(backend: str, plan: Plan) -> type[ServerOptimizer]:
    """How a backend with an optimizer is timed; only in shared memory can it share a model."""
    shares = plan.mode == "shared-model" and lane_of(backend, plan.lane) == "shm"
    return SharedModel if shares else ServerOptimizer


def work(folder: Path) -> None:
    plan = Plan.load(folder / "plan.json")
    others = [name for name in names() if name not in plan.backends]
    rules = f"^{','.join(others)}" if others else AUTO
    # On a crowded machine a slow peer is not a lost one.
    session = Session.open(lane=plan.lane, backend=rules, timeout=plan.timeout)
    results = Runner(plan, session, folder).run()
    if session.rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    session.close()


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        work(folder)
    except Exception as error:
        traceback.print_exc()
        # Before anything is closed, which the other ranks would report as their error.
        record = {"at": time.monotonic(), "message": str(error)}
        (folder / f"error-{os.getpid()}.json").write_text(json.dumps(record))
        sys.stderr.flush()
        # Not an orderly exit: finalising MPI would wait for ranks that wait for this one.
        os._exit(1)


if __name__ == "__main__":
    main()
