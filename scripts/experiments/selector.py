"""Does the selector choose well: with a PBox of many links, with one of one link, with none?"""

from __future__ import annotations

from functools import partial

from matplotlib.figure import Figure

from experiments import drawing
from experiments.base import Experiment, Findings, Row, Rows, Scale, Table, grid
from experiments.cells import MANY_LINKS, WITH_PSHARD, Cell, exchange, rack

MODEL = "ResNet18"
WORKERS = 8
PLACES = {"ten links": MANY_LINKS, "one link": 1, "no PBox": 0}
WITHIN = 1.10  # times the best, at most


def milliseconds(rows: Rows, place: str, system: str) -> float | None:
    """Of an exchange."""
    row = rows.one(place=place, system=system)
    return None if row is None else float(row["median_s"] * 1e3)


class Selector(Experiment):
    name = "selector"
    title = "What `auto` chooses for ResNet 18, 8 workers, 10 Gbit/s"
    kind = "link-bound"
    in_paper = "nothing: a requirement of this project's own"
    differs = (
        "`auto` measures its candidates when the job starts, in the lab as it is. Without a PBox "
        "of its own address, rank 0 may start one on its host, which then has rank 0's link."
    )

    def cells(self, scale: Scale) -> list[Cell]:
        if scale is Scale.QUICK:
            return [exchange("auto", MODEL, rack(2, 0, 10e9, 2e9), labels={"place": "no PBox"})]
        cells = []
        for place, links in PLACES.items():
            shape = rack(WORKERS, links)
            for system in ("auto", *WITH_PSHARD):
                if system != "pbox" or links:
                    cells.append(exchange(system, MODEL, shape, labels={"place": place}))
        return cells

    def findings(self, rows: Rows) -> Findings:
        found = Findings()
        places = rows.values("place")
        lines = grid("lab", places, ["auto", *WITH_PSHARD], partial(milliseconds, rows), 4)
        lines[0].append("chosen")
        for line, place in zip(lines[1:], places, strict=True):
            chosen = rows.one(place=place, system="auto")
            line.append(chosen["backend"] if chosen else "-")
        found.tables.append(Table("ms of an exchange", lines))
        for place in places:
            self._judge(found, rows, place)
        return found

    @staticmethod
    def _judge(found: Findings, rows: Rows, place: str) -> None:
        auto = rows.one(place=place, system="auto")
        others = [row for row in rows.where(place=place) if row["system"] != "auto"]
        if auto is None or not others:
            return
        best = min(others, key=lambda row: float(row["median_s"]))
        ratio = _of(others, auto["backend"], auto) / best["median_s"]
        found.claim(
            f"With {place} `auto` chooses {auto['backend']}, {ratio:.3f} times the best "
            f"({best['system']}; at most {WITHIN}).",
            ratio <= WITHIN,
            bar=True,
        )
        if place != "ten links":
            found.claim(
                f"With {place} the choice is no central server: {auto['backend']}.",
                auto["backend"] != "pbox",
                bar=True,
            )

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = drawing.one_axes(figure, "", "ms of an exchange")
        systems = ["auto", *WITH_PSHARD]
        drawing.bars(axes, rows.values("place"), systems, partial(milliseconds, rows))


def _of(rows: list[Row], backend: str, auto: Row) -> float:
    """Seconds of the chosen backend where it was measured by itself, else of `auto`."""
    return float(next((row for row in rows if row["system"] == backend), auto)["median_s"])
