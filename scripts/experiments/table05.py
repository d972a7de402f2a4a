"""Table 5: what a rack costs, and what a dollar buys: arithmetic on prices of ours."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure

from experiments import drawing, published
from experiments.base import Experiment, Findings, Rows, Scale, Table
from experiments.cells import Cell


@dataclass(frozen=True)
class Link:
    """Dollars for a machine's end of the network."""

    card: float
    port: float  # of a switch
    cable: float

    def network(self, core: float) -> float:
        """For each machine: its own end, and its share of what leads to the core, `core` being
        the share of full bisection (1: all of it)."""
        return self.card + self.port + self.cable + core * (4 * self.port + 2 * self.cable)


# All prices are [assumed]: list prices of that time as far as they are remembered.
SHARDED = Link(795.0, 21077 / 32, 94.0)  # 100 Gbit/s
HUB = Link(260.0, 21077 / 32 / 4, 31.25)  # 25 Gbit/s: a port of the same switch split in four
PBOX, PBOX_PORTS, PBOX_CARD = 8407.0, 20, 162.5  # a PBox; its ports, and a card for each
MACHINE, GPUS = 4117.0, 4
WORKERS = {  # dollars for processors, and for a GPU
    "future GPUs": (2 * 1745.0, 699.0),
    "V100": (2 * 1745.0, 8000.0),
    "cheap processors": (2 * 213.0, 699.0),
}
SWITCH_PORTS = 128  # of 25 Gbit/s
CORES = {"1:1": 1.0, "2:1": 1 / 2, "3:1": 1 / 3}  # how much of full bisection a rack pays for
SPEED = 0.975  # of a PBox's workers, over those of shards: the cost of more than one rack
WITHIN = 0.015  # of the paper's gain


def workers_of(core: float) -> int:
    """Workers that share a PBox: the ports of one switch, less its own and those to the core."""
    return int(SWITCH_PORTS / (1 + core)) - PBOX_PORTS


def gain(scenario: str, core: float) -> float:
    """Throughput for a dollar with a PBox for each rack, over shards on all workers, less 1."""
    processors, gpu = WORKERS[scenario]
    worker = MACHINE + processors + GPUS * gpu
    box = PBOX + PBOX_PORTS * (PBOX_CARD + HUB.port + HUB.cable)
    with_pbox = worker + HUB.network(core) + box / workers_of(core)
    return SPEED * (worker + SHARDED.network(1.0)) / with_pbox - 1


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
        found = Findings()
        lines = [["workers", *CORES, "2:1 in the paper [summary]"]]
        for scenario in WORKERS:
            gains = [f"{gain(scenario, core):+.1%}" for core in CORES.values()]
            lines.append([scenario, *gains, f"{published.TABLE_5[scenario]:+.0%}"])
        found.tables.append(Table("Gain in throughput for a dollar, by oversubscription", lines))
        for scenario, paper in published.TABLE_5.items():
            ours = gain(scenario, CORES["2:1"])
            found.claim(
                f"{scenario}: {ours:+.1%}, the paper's {paper:+.0%}.", abs(ours - paper) < WITHIN
            )
        return found

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = drawing.one_axes(figure, "", "gain, percent")
        drawing.bars(axes, list(WORKERS), list(CORES), lambda s, c: 100 * gain(s, CORES[c]))
