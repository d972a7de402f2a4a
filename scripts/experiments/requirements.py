"""How far an exchange is from what its links allow: the requirements on the exchange path."""

from __future__ import annotations

from functools import partial

from matplotlib.figure import Figure

from experiments import drawing
from experiments.base import Experiment, Findings, Rows, Scale, Table, grid
from experiments.cells import FIFTY_SIX, MANY_LINKS, SLOW_LINK, WITH_PSHARD, Cell, exchange, rack

WORKERS = 8
ITERATIONS = 5
MODELS = ("ResNet18", "AlexNet")
LIMITS = {"pbox": 1.03, "pshard": 1.04, "ring": 1.02, "halving_doubling": 1.04}  # times the floor
OVER_GLOO = 1.68  # PBox, at least
OVER_PSHARD = 0.97  # PBox, of what PShard's links move more, at least


def ratio(rows: Rows, model: str, system: str) -> float | None:
    """Time over floor."""
    row = rows.one(model=model, system=system)
    return None if row is None else float(row["times_floor"])


class Floors(Experiment):
    name = "floors"
    title = "How far from the links' floor, 8 workers, no compute, 56 Gbit/s"
    kind = "link-bound"
    in_paper = "nothing: these are this project's own requirements"
    differs = "the floor: the bytes of the busiest link, at 1448/1514 of its rate"

    def cells(self, scale: Scale) -> list[Cell]:
        if scale is Scale.QUICK:
            return []
        return [
            exchange(
                system,
                model,
                rack(WORKERS, MANY_LINKS, FIFTY_SIX, SLOW_LINK),
                iterations=ITERATIONS,
            )
            for model in MODELS
            for system in WITH_PSHARD
        ]

    def findings(self, rows: Rows) -> Findings:
        found = Findings()
        models, systems = rows.values("model"), rows.values("system")
        found.tables.append(
            Table("Time over floor", grid("network", models, systems, partial(ratio, rows), 4))
        )
        for model in models:
            for system, limit in LIMITS.items():
                reached = ratio(rows, model, system)
                if reached is not None:
                    found.claim(
                        f"{model}, {system}: {reached:.4f} x floor (at most {limit}).",
                        reached <= limit,
                        bar=True,
                    )
            pbox, pshard, gloo = (
                rows.one(model=model, system=one) for one in ("pbox", "pshard", "gloo")
            )
            if pbox and pshard:
                over, links = pshard["median_s"] / pbox["median_s"], 2 * (WORKERS - 1) / WORKERS
                found.claim(
                    f"{model}: PBox {over:.3f} times as fast as PShard, whose links move {links} "
                    f"times as much (at least {OVER_PSHARD} of that).",
                    over >= OVER_PSHARD * links,
                    bar=True,
                )
            if pbox and gloo:
                over = gloo["median_s"] / pbox["median_s"]
                found.claim(
                    f"{model}: PBox {over:.3f} times as fast as stock Gloo (at least {OVER_GLOO}).",
                    over >= OVER_GLOO,
                    bar=True,
                )
        return found

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = drawing.one_axes(figure, "", "time over floor")
        drawing.bars(axes, rows.values("model"), rows.values("system"), partial(ratio, rows))
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_ylim(bottom=0.9)
