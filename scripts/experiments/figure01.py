"""Figure 1: how fast GPUs have become."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments import drawing, published
from experiments.base import Experiment, Findings, Rows, Scale, Table, number
from experiments.cells import Cell


class Figure1(Experiment):
    name = "figure1"
    title = "ResNet 269 on one GPU: why the network became the bottleneck"
    kind = "arithmetic"
    in_paper = "samples per second, all printed"
    differs = "nothing is measured: the paper's values, for reference"

    def cells(self, scale: Scale) -> list[Cell]:
        return []

    def findings(self, rows: Rows) -> Findings:
        found = Findings()
        lines = [[gpu, number(speed, 5)] for gpu, speed in published.FIGURE_1.items()]
        found.tables.append(Table("Samples per second [printed]", [["GPU", "samples/s"], *lines]))
        speeds = list(published.FIGURE_1.values())
        found.claim(
            f"From the first to the last: {speeds[-1] / speeds[0]:.1f} times as fast.", None
        )
        return found

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = drawing.one_axes(figure, "", "samples/s, as printed")
        gpus = list(published.FIGURE_1)
        drawing.bars(axes, gpus, ["paper"], lambda gpu, _: published.FIGURE_1[gpu])
        axes.tick_params(axis="x", labelrotation=20)
