"""Measures cells in the rack lab, one after the other, and refuses what it cannot believe."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from lab import check, network, start
from lab.topology import Host, Network, network_of
from lab.worker import BACKWARD

from experiments import floors
from experiments.base import Row
from experiments.cells import LAB, Cell
from experiments.store import Store

RESERVE = 1 << 30  # bytes of memory that stay free
MISSED = 1.03  # of its floor: from when on the processors may have been the limit
PATIENCE_S, PATIENCE = 120.0, 10  # a cell may take so long, and so many times its estimate
READY_S, READY = 10.0, 2.0  # jobs that begin together do so after this and so many times estimated


class CellError(Exception):
    """A cell failed, or its numbers are wrong; the message says which and how."""


class Runner:
    """Measures cells into a store. `say` shows progress; `reuse`: what is known of the same
    code is not measured again; nothing is measured twice in any case."""

    def __init__(self, store: Store, say: Callable[[str], None], reuse: bool) -> None:
        self._store, self._say = store, say
        self._known = store.known() if reuse else {}  # rows by the key of their cell

    def rows(self, experiment: str, cells: Sequence[Cell]) -> list[Row]:
        """The rows of all cells, in their order; each is stored as soon as it is measured.

        Raises:
            CellError, LabError
        """
        require_memory(cells)
        rows: list[Row] = []
        for _, group in itertools.groupby(cells, lambda cell: cell.shape):
            with contextlib.ExitStack() as stack:
                made: tuple[str, Network] | None = None
                for cell in group:
                    row = self._known.get(cell.key)
                    if row is None:
                        if made is None:
                            made = self._enter(stack, cell)
                        row = self._known[cell.key] = self._measure(*made, cell)
                    rows.append({**row, **cell.labels})
                    self._store.keep(experiment, rows)
        return rows

    def _enter(self, stack: contextlib.ExitStack, cell: Cell) -> tuple[str, Network]:
        """The lab of a cell, its links measured."""
        made, shape = network_of(cell.shape), cell.shape
        lab = stack.enter_context(network.temporary(made))
        if not cell.here:
            measured = len(check.links(lab, made))
            self._say(
                f"lab of {shape.workers} workers, PBox links: {shape.pbox_links}, "
                f"{shape.link / 1e9:g} Gbit/s at dilation {shape.dilation:g}: {measured} links "
                f"carry what they should within {check.TOLERANCE:.0%}"
            )
        return lab, made

    def _measure(self, lab: str, made: Network, cell: Cell) -> Row:
        begin = time.monotonic()
        with contextlib.ExitStack() as stack:
            server = None
            if not cell.here:
                server = stack.enter_context(start.pbox(lab, made, cell.cores))
            told = start.variables(cell.shape, server) | dict(cell.told)
            before = check.sample(lab, made)
            outputs = self._outputs(lab, made, cell, told)
            used = check.use(made, before, check.sample(lab, made))
        row = finish(cell, outputs, used)
        took = time.monotonic() - begin
        self._say(f"{cell.title}: {summary(row)} [{took:.0f} s, {cell.seconds:.0f} expected]")
        return {**row, **self._store.stamp}

    def _outputs(
        self, lab: str, made: Network, cell: Cell, told: dict[str, str]
    ) -> list[dict[str, Any]]:
        """What rank 0 of each job wrote."""
        workers = made.workers
        each = len(workers) // cell.jobs
        flags = list(cell.flags)
        if cell.jobs > 1:
            flags += ["--at", str(time.monotonic() + READY_S + READY * cell.ready)]
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, f"{job}.json") for job in range(cell.jobs)]
            processes = []
            for job, file in enumerate(files):
                script = [sys.executable, str(LAB / f"{cell.program}.py")]
                words = [*script, *flags, "--json", str(file)]
                share = workers[job * each : (job + 1) * each]
                processes.append(self._start(lab, made, cell, words, told, share))
            self._wait(cell, processes)
            return [json.loads(file.read_text()) for file in files]

    @staticmethod
    def _start(
        lab: str,
        made: Network,
        cell: Cell,
        words: list[str],
        told: dict[str, str],
        share: list[Host],
    ) -> subprocess.Popen[bytes]:
        if cell.here:
            return start.phubrun_here(lab, made, len(share), words, told)
        return start.phubrun(lab, made, words, told, share)

    @staticmethod
    def _wait(cell: Cell, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        limit = PATIENCE_S + PATIENCE * cell.seconds
        deadline = time.monotonic() + limit
        for process in processes:
            try:
                code = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise CellError(f"{cell.title}: not over after {limit:.0f} s") from None
            if code != 0:
                raise CellError(f"{cell.title}: exit code {code}; see its output")


def require_memory(cells: Sequence[Cell]) -> None:
    """Raise CellError for a cell that does not fit into this machine's free memory."""
    free = psutil.virtual_memory().available - RESERVE
    for cell in cells:
        if cell.memory > free:
            need = f"needs about {cell.memory / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            raise CellError(f"{cell.title}: {need}; end other programs, or leave it out")


def finish(cell: Cell, outputs: Sequence[dict[str, Any]], used: check.Use) -> Row:
    """The row of a cell, from what its jobs wrote.

    Raises:
        CellError: an element was wrong, or links moved less than they must have.
    """
    row = dict(outputs[0])
    shape = cell.shape
    row |= {"key": cell.key, "links": shape.pbox_links, "link_gbps": shape.link / 1e9}
    row |= {"dilation": shape.dilation, "here": cell.here}
    row |= {"pbox_bytes": used.pbox_bytes}
    if any(output.get("wrong") for output in outputs):
        raise CellError(f"{cell.title}: wrong = {[one['wrong'] for one in outputs]}")
    if cell.program != "worker":
        return row
    if cell.jobs > 1:
        row["job_seconds"] = [one["seconds"] for one in outputs]
        row["seconds"] = [max(turn) for turn in zip(*row["job_seconds"], strict=True)]
        row["pressure"] = [
            max(turn) for turn in zip(*(o["pressure"] for o in outputs), strict=True)
        ]
    row["median_s"] = statistics.median(row["seconds"])
    if not cell.here:
        _against_links(cell, row, outputs)
    return row


def _against_links(cell: Cell, row: Row, outputs: Sequence[dict[str, Any]]) -> None:
    """Add the floor, and who was the limit; check that links moved what they must."""
    system, nbytes = row["backend"], row["bytes"]
    workers = cell.shape.workers // cell.jobs
    least = floors.least_moved(system, nbytes, workers)
    moved = min(min(one["least_received"], one["least_sent"]) for one in outputs)
    if moved < least:
        raise CellError(
            f"{cell.title}: a worker's link moved {moved} bytes in an exchange, which takes at "
            f"least {least}: something went another way"
        )
    flags = dict(zip(cell.flags[::2], cell.flags[1::2], strict=True))
    batch_s = float(flags.get("--batch", 0))
    exchange_s = floors.exchange(system, nbytes, cell.shape, cell.jobs)
    late = flags.get("--form") == "last"
    row["batch_s"] = batch_s
    row["exchange_floor_s"] = exchange_s
    row["floor_s"] = floors.step(exchange_s, batch_s, 0.0 if late else BACKWARD)
    row["times_floor"] = row["median_s"] / row["floor_s"]
    pressed = statistics.median(row["pressure"]) > check.PRESSED
    row["cpu_bound"] = pressed and row["times_floor"] > MISSED


def summary(row: Row) -> str:
    """A few words on a row for the progress lines."""
    if "median_s" not in row:
        return "done"
    text = f"{row['median_s'] * 1e3:.1f} ms"
    if "times_floor" in row:
        text += f", {row['times_floor']:.3f} x floor"
    return text + (", cpu-bound" if row.get("cpu_bound") else "")
