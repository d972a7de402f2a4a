"""One worker of the exchange benchmark: `python -m phub_collective.bench.worker FOLDER`.

FOLDER holds plan.json. Rank 0 keeps progress.txt and leaves results.json; a rank that fails
leaves error-PID.json, so that the driver can tell the first error from those that follow it.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from phub_collective import backends
from phub_collective.backends.base import Backend, Context
from phub_collective.bench.bandwidth import bandwidth, copy_seconds, floor_seconds
from phub_collective.bench.gate import Gate
from phub_collective.bench.header import lane_of, worker_facts
from phub_collective.bench.measure import measure, naming
from phub_collective.bench.pattern import Pattern
from phub_collective.bench.plan import Plan, Workload, format_bytes
from phub_collective.bench.subjects import (
    ArenaAllreduce,
    FlatAllreduce,
    ServerOptimizer,
    SharedModel,
    Subject,
    WorkerOptimizer,
    WorkerSgd,
)
from phub_collective.config import Config
from phub_collective.topology import connect


class Runner:
    """Runs a plan on one rank. All ranks make the same calls in the same order."""

    def __init__(self, plan: Plan, context: Context, folder: Path) -> None:
        self._plan, self._context, self._folder = plan, context, folder
        self._gate = Gate(folder, context.rendezvous, plan.timeout)
        self._backends: list[Backend] = []

    def run(self) -> dict[str, Any]:
        """Connect everything, measure all workloads, disconnect; header facts and rows."""
        for name in self._plan.backends:
            self._progress(f"connecting {name}")
            with naming(f"backend {name!r}", "connecting", self._context.rank):
                self._backends.append(backends.create(name, self._context))
        copying = self._copy_bandwidth()
        rows = [
            {**row, **self._judge(row, copying)}
            for workload in self._plan.workloads
            for row in self._rows(Workload.of(self._plan, workload))
        ]
        for backend in self._backends:
            with naming(f"backend {backend.name!r}", "disconnecting", self._context.rank):
                backend.close()
        self._gate.close()
        facts = worker_facts(self._plan, self._context.config)
        return {"header": {**facts, "copy_GBps": copying / 1e9}, "rows": rows}

    def _copy_bandwidth(self) -> float:
        mine = copy_seconds(self._gate, self._context.rank)
        gathered = self._context.rendezvous.all_gather("bench/copy", json.dumps(mine).encode())
        return bandwidth([json.loads(one) for one in gathered])

    def _judge(self, row: dict[str, Any], copying: float) -> dict[str, Any]:
        """The lane that carried a row, and its floor."""
        lane = lane_of(row["backend"], self._plan.lane)
        floor = floor_seconds(row["mode"], lane, row["workers"], row["bytes"], copying)
        times = None if floor is None else row["median_s"] / floor
        return {"lane": lane, "floor_s": floor, "times_floor": times}

    def _rows(self, workload: Workload) -> list[dict[str, Any]]:
        plan, rows = self._plan, []
        numbers = Pattern(self._context.size, workload.dtype, workload.count)
        for mode, subjects in self._groups(workload, numbers):
            what = workload.model or format_bytes(workload.nbytes)
            self._progress(f"{mode} {what}: {', '.join(s.backend.name for s in subjects)}")
            iterations = workload.iterations(plan.iterations)
            rendezvous = self._context.rendezvous
            rows += measure(subjects, self._gate, rendezvous, plan.warmup, iterations)
        return rows

    def _groups(self, workload: Workload, numbers: Pattern) -> Iterator[tuple[str, list[Subject]]]:
        """The subjects that are measured side by side. One group holds its memory at a time, and
        a worker's private tensors are the same ones for every backend."""
        plan, config = self._plan, self._context.config
        bucket = config.bucket_bytes if plan.overlap else 2 * workload.nbytes + (1 << 20)
        if plan.mode != "allreduce":
            sgd = WorkerSgd(workload)
            served = SharedModel if plan.mode == "shared-model" else ServerOptimizer
            yield (
                plan.mode,
                [
                    served(backend, workload, numbers, bucket)
                    if backend.server_optimizer
                    else WorkerOptimizer(backend, workload, numbers, bucket, sgd)
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
        yield (
            "allreduce-arena",
            [ArenaAllreduce(backend, workload, numbers, bucket) for backend in self._backends],
        )

    def _progress(self, text: str) -> None:
        if self._context.rank == 0:
            temporary = self._folder / "progress.new"
            temporary.write_text(text)
            temporary.rename(self._folder / "progress.txt")


def work(folder: Path) -> None:
    plan = Plan.load(folder / "plan.json")
    config = Config.from_environment(lane=plan.lane)
    identity, rendezvous = connect(config)
    context = Context(
        identity.rank,
        identity.size,
        identity.local_rank,
        identity.local_size,
        rendezvous,
        config,
    )
    results = Runner(plan, context, folder).run()
    if context.rank == 0:
        results["header"]["launcher"] = identity.launcher
        (folder / "results.json").write_text(json.dumps(results))
    rendezvous.close()


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        work(folder)
    except Exception as error:
        traceback.print_exc()
        report = {"at": time.monotonic(), "message": str(error)}
        (folder / f"error-{os.getpid()}.json").write_text(json.dumps(report))
        sys.stderr.flush()
        # Not an orderly exit: finalising MPI would wait for ranks that wait for this one.
        os._exit(1)


if __name__ == "__main__":
    main()
