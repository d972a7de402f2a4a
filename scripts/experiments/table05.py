"""Table 5: what a rack costs, and what a dollar buys: arithmetic on prices of ours, the example of
`phub plan cost`."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments import drawing, published
from experiments.base import Experiment, Findings, Rows, Scale, Table
from experiments.cells import Cell
from phub_collective.planning import cost
from phub_collective.planning.prices import Prices

RACKS = {f"{over}:1": over for over in cost.OVERSUBSCRIPTION}
WITHIN = 0.015  # of the paper's gain


class Table5(Experiment):
    name = "table5"
    title = "Throughput for a dollar: a PBox and 25 Gbit/s against shards and 100 Gbit/s"
    kind = "arithmetic"
    in_paper = (
        "gains of 25, 6 and 36 percent for three kinds of workers at 2:1; no prices are known"
    )
    differs = (
        "The formula is the paper's [summary], the prices are ours [assumed], chosen so that the "
        "three printed gains come out: this shows how the model works, and is no measurement."
    )

    def cells(self, scale: Scale) -> list[Cell]:
        return []

    def findings(self, rows: Rows) -> Findings:
        found, prices = Findings(), Prices.example()
        lines = [["workers", *RACKS, "2:1 in the paper [summary]"]]
        for scenario in prices.workers:
            gains = [f"{cost.gain(prices, scenario, over):+.1%}" for over in RACKS.values()]
            lines.append([scenario, *gains, f"{published.TABLE_5[scenario]:+.0%}"])
        found.tables.append(Table("Gain in throughput for a dollar, by oversubscription", lines))
        for scenario, paper in published.TABLE_5.items():
            ours = cost.gain(prices, scenario, 2)
            found.claim(
                f"{scenario}: {ours:+.1%}, the paper's {paper:+.0%}.", abs(ours - paper) < WITHIN
            )
        return found

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes, prices = drawing.one_axes(figure, "", "gain, percent"), Prices.example()
        drawing.bars(
            axes,
            list(prices.workers),
            list(RACKS),
            lambda scenario, rack: 100 * cost.gain(prices, scenario, RACKS[rack]),
        )
