"""Figure 15: how many exchanges of ResNet 18 a second, without compute, by workers."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments import drawing, published
from experiments.base import Experiment, Findings, Row, Rows, Scale, Table, grid
from experiments.cells import (
    FIFTY_SIX,
    MANY_LINKS,
    SLOW_LINK,
    TEN,
    WITH_PSHARD,
    Cell,
    exchange,
    rack,
)

MODEL = "ResNet18"
WORKERS = range(1, 9)
LINEAR = 0.97
ITERATIONS = 5
OTHERS = {  # what PBox is compared with, and what the paper's figure had
    "pshard": "its PShard",
    "ring": "Gloo's",
    "halving_doubling": "Gloo's",
}
PAPERS_PBOX = published.FIGURE_15["pbox"]


def exchanges(row: Row | None) -> float | None:
    """Per second, of all workers together."""
    return None if row is None else row["workers"] / row["median_s"]


class Figure15(Experiment):
    name = "figure15"
    title = "Exchanges of ResNet 18 per second without compute, 1 to 8 workers, 56 Gbit/s"
    kind = "link-bound"
    in_paper = "exchanges per second of all workers together, read off (error about 4)"
    differs = (
        "MXNet's servers are not measured here yet. The paper's Gloo ran as one blocking "
        "message on InfiniBand; ours are overlapped buckets, and stock Gloo's ring. The paper's "
        "PBox reached two thirds of its links' rate, where ours fills the (slow, shaped) links, so "
        "compare the shapes of the curves and the ratios, not the heights."
    )

    def cells(self, scale: Scale) -> list[Cell]:
        if scale is Scale.QUICK:
            shape = rack(2, 2, TEN, 2e9)
            return [exchange(system, MODEL, shape, iterations=1) for system in ("ring", "pshard")]
        return [
            exchange(
                system,
                MODEL,
                rack(workers, MANY_LINKS, FIFTY_SIX, SLOW_LINK),
                iterations=ITERATIONS,
            )
            for workers in WORKERS
            for system in WITH_PSHARD
            if workers > 1 or system == "pbox"
        ]

    def findings(self, rows: Rows) -> Findings:
        found = Findings()
        systems, workers = rows.values("system"), rows.values("workers")

        def speed(system: str, count: int) -> float | None:
            return exchanges(rows.one(system=system, workers=count))

        def papers(system: str, count: int) -> float | None:
            return published.FIGURE_15.get(system, {}).get(count)

        found.tables.append(
            Table("Exchanges per second", grid("system", systems, workers, speed, 4))
        )
        found.tables.append(
            Table("The paper's [read off]", grid("system", systems, workers, papers, 4))
        )
        most = max(workers)
        one, all_ = speed("pbox", 1), speed("pbox", most)
        if one and all_ and most > 2:
            share, paper = all_ / one / most, PAPERS_PBOX[8] / PAPERS_PBOX[1] / 8
            found.claim(
                f"PBox with {most} workers: {share:.3f} of {most} times one worker's exchanges "
                f"(at least {LINEAR}); the paper's: {paper:.3f}.",
                share >= LINEAR,
                bar=True,
            )
        for other, papers_name in OTHERS.items():
            theirs = speed(other, most)
            if all_ and theirs and most > 2:
                paper = PAPERS_PBOX[8] / published.FIGURE_15[other][8]
                found.claim(
                    f"PBox over {other} with {most} workers: {all_ / theirs:.2f}; the paper's "
                    f"PBox over {papers_name}: {paper:.1f}, of which links account for 1.75.",
                    all_ / theirs > 1.0,
                )
        return found

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = drawing.one_axes(figure, "workers", "exchanges per second, all workers")
        for system in rows.values("system"):
            points = [(row["workers"], exchanges(row)) for row in rows.where(system=system)]
            drawing.curve(axes, system, [(x, y) for x, y in points if y is not None])
        drawing.published(axes, list(PAPERS_PBOX.items()), "PBox in the paper")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize="small")
