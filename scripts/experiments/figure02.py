"""Figure 2: an iteration on ever faster GPUs, with links of 10 Gbit/s."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments import drawing, published
from experiments.base import Experiment, Findings, Rows, Scale, Table, number
from experiments.cells import MANY_LINKS, SYSTEMS, Cell, exchange, rack

WORKERS = 8


class Figure2(Experiment):
    name = "figure2"
    title = "Seconds of an iteration by GPU, 8 workers, 10 Gbit/s"
    kind = "link-bound"
    in_paper = "GPU-active and whole seconds with MXNet's server on the workers' machines, read off"
    differs = (
        "Compute is the paper's GPU-active time, emulated layer by layer. The paper's system, "
        "MXNet's server on the workers' machines, is not measured here yet; what is measured are "
        "a PBox with ten links and the collectives. The plug and the machines are the lab's."
    )

    def cells(self, scale: Scale) -> list[Cell]:
        models, gpus = list(published.FIGURE_2), ["K520", "K80", "M60", "V100"]
        if scale is Scale.QUICK:
            return []
        if scale is Scale.USUAL:
            models, gpus = ["AlexNet", "ResNet269"], ["K80", "V100"]
        return [
            exchange(
                system,
                model,
                rack(WORKERS, MANY_LINKS),
                batch_s=published.FIGURE_2[model][gpu][0],
                labels={"gpu": gpu},
            )
            for model in models
            for gpu in gpus
            for system in SYSTEMS
        ]

    def findings(self, rows: Rows) -> Findings:
        found = Findings()
        systems = rows.values("system")
        for model in rows.values("model"):
            lines = [["GPU", "active (paper)", "all (paper)", *systems]]
            for gpu in rows.where(model=model).values("gpu"):
                active, whole = published.FIGURE_2[model][gpu]
                cells = [self._seconds(rows, model, gpu, system) for system in systems]
                lines.append([gpu, str(active), str(whole), *map(number, cells)])
            found.tables.append(Table(f"{model}: seconds of an iteration", lines))
        for model in rows.values("model"):
            pbox = self._seconds(rows, model, "V100", "pbox")
            active, whole = published.FIGURE_2[model]["V100"]
            if pbox is not None:
                found.claim(
                    f"{model} on a V100: the paper's system took {whole / active:.1f} times the "
                    f"GPU's own time, a PBox with ten links {pbox / active:.1f} times.",
                    pbox < whole,
                )
        return found

    @staticmethod
    def _seconds(rows: Rows, model: str, gpu: str, system: str) -> float | None:
        row = rows.one(model=model, gpu=gpu, system=system)
        return None if row is None else float(row["median_s"])

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = drawing.one_axes(figure, "", "seconds of an iteration")
        groups = [(row["model"], row["gpu"]) for row in rows.where(system="pbox")]
        drawing.bars(
            axes,
            groups,
            rows.values("system"),
            lambda group, system: self._seconds(rows, group[0], group[1], system),
        )
        axes.set_xticks(range(len(groups)), [f"{model}\n{gpu}" for model, gpu in groups])
        axes.tick_params(axis="x", labelsize=6)
