"""The real hook in the lab: does exchange hide behind real autograd?"""

from __future__ import annotations

import statistics

from lab.topology import Shape
from matplotlib.figure import Figure

from experiments import drawing, floors
from experiments.base import Experiment, Findings, Row, Rows, Scale, Table, number
from experiments.cells import SYSTEMS, Cell

MODEL_BYTES = 24 * (640 * 640 + 640) * 4  # of lab/hook.py
WORKERS = 2
LINK = 400e6  # bits per second, as they are: real compute cannot be dilated
LINKS = 2
STEPS = 8
LIMIT = 1.15


def bound(row: Row) -> float:
    """Seconds of a step that ends with the exchange, at least."""
    return float(row["forward_s"] + max(row["backward_s"], row["exchange_floor_s"]))


class Hook(Experiment):
    name = "hook"
    title = "A step with the real hook and real autograd, compute about equal to communication"
    kind = "link-bound"
    in_paper = "nothing: a requirement of this project's own"
    differs = (
        "Two workers, one for each processor of this machine, train a dense network of 39 MB in "
        "24 layers with torch; batch sizes are set so that compute takes about as long as the "
        "exchange's floor. "
        "A step ends with the exchange, so it takes at least forward + max(backward, exchange)."
    )

    def cells(self, scale: Scale) -> list[Cell]:
        if scale is Scale.QUICK:
            return []
        return [self._cell(system) for system in SYSTEMS]

    @staticmethod
    def _cell(system: str) -> Cell:
        shape = Shape(WORKERS, 1, LINK, LINKS if system == "pbox" else 0)
        floor = floors.exchange(system, MODEL_BYTES, shape)
        labels = {"system": system, "workers": WORKERS, "exchange_floor_s": floor}
        flags = ("--exchange", f"{floor:.4f}", "--steps", str(STEPS))
        told = (("PHUB_BACKEND", system),)
        return Cell("hook", shape, flags, told, labels=labels, seconds=70, memory=2 << 30)

    def findings(self, rows: Rows) -> Findings:
        found = Findings()
        lines = [["system", "forward", "backward", "exchange's floor", "bound", "step", "x bound"]]
        for row in rows:
            step, least = statistics.median(row["seconds"]), bound(row)
            times = [row["forward_s"], row["backward_s"], row["exchange_floor_s"], least, step]
            cells = [number(seconds * 1e3) for seconds in times]
            lines.append([row["system"], *cells, f"{step / least:.3f}"])
            found.claim(
                f"{row['system']}: a step takes {step / least:.3f} times forward + max(backward, "
                f"exchange) (at most {LIMIT}).",
                step / least <= LIMIT,
                bar=row["system"] == "pbox",
            )
        found.tables.append(Table("ms", lines))
        return found

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = drawing.one_axes(figure, "", "step over its bound")

        def ratio(system: str, _: str) -> float | None:
            row = rows.one(system=system)
            return None if row is None else statistics.median(row["seconds"]) / bound(row)

        drawing.bars(axes, rows.values("system"), ["step"], ratio)
        axes.axhline(1.0, color="black", linewidth=0.8)
