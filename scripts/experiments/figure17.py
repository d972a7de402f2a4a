"""Figure 17: how much of what the machine's loop-back can move an exchange moves."""

from __future__ import annotations

from lab.topology import Shape
from matplotlib.figure import Figure

from experiments import drawing, published
from experiments.base import Experiment, Findings, Rows, Scale, Table, grid
from experiments.cells import SYSTEMS, Cell, exchange

MODEL = "VGG11"
WORKERS = (1, 2, 4, 8)
ITERATIONS = 4
LIMIT = "limit"


class Figure17(Experiment):
    name = "figure17"
    title = "Bytes through one host's loopback, against the loopback's own limit"
    kind = "cpu-bound"
    in_paper = (
        "cache lines over PCIe with 1 to 16 workers, VGG, read off: a loop-back microbenchmark "
        "and training with aggregation and optimisation, which reaches 0.97 of it"
    )
    differs = (
        "Their limit was the PBox's PCIe; ours is the kernel's TCP loopback on this machine, at "
        "full speed. Workers and PBox share the two processors that also sum, so they compete with "
        "their own traffic, where the paper's machines did not. The limit: as many pairs of "
        "processes send each other blocks both ways and do nothing with them."
    )

    def cells(self, scale: Scale) -> list[Cell]:
        if scale is Scale.QUICK:
            return [self._limit(1)]
        cells = []
        for workers in WORKERS:
            shape = Shape(workers, pbox_links=0)
            cells.append(self._limit(workers))
            cells += [
                exchange(system, MODEL, shape, here=True, iterations=ITERATIONS)
                for system in SYSTEMS
                if workers > 1 or system == "pbox"
            ]
        return cells

    @staticmethod
    def _limit(workers: int) -> Cell:
        labels = {"system": LIMIT, "workers": workers}
        shape = Shape(workers, pbox_links=0)
        return Cell("loopback", shape, here=True, labels=labels, seconds=10.0 + workers)

    @staticmethod
    def _speed(rows: Rows, system: str, workers: int) -> float | None:
        """GB/s that all workers send and receive."""
        row = rows.one(system=system, workers=workers)
        if row is None:
            return None
        if system == LIMIT:
            return float(row["bytes_per_s"]) / 1e9
        if system == "pbox":
            moved = 2.0 * row["bytes"]
        else:
            moved = 4.0 * row["bytes"] * (workers - 1) / workers
        return float(workers * moved / row["median_s"] / 1e9)

    def findings(self, rows: Rows) -> Findings:
        found = Findings()
        systems, workers = rows.values("system"), rows.values("workers")

        def speed(system: str, count: int) -> float | None:
            return self._speed(rows, system, count)

        found.tables.append(
            Table("GB/s, sent and received, by workers", grid("system", systems, workers, speed))
        )
        most = max(workers)
        limit, pbox = speed(LIMIT, most), speed("pbox", most)
        if limit and pbox:
            found.claim(
                f"With {most} workers the PBox moves {pbox / limit:.2f} of what the bare loopback "
                f"moves (paper: {published.FIGURE_17_SHARE}, with processors of its own).",
                pbox / limit >= published.FIGURE_17_SHARE,
            )
        return found

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = drawing.one_axes(figure, "workers", "GB/s sent and received")
        for system in rows.values("system"):
            counts = [row["workers"] for row in rows.where(system=system)]
            points = [(count, self._speed(rows, system, count) or 0.0) for count in counts]
            drawing.curve(axes, system, points)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
