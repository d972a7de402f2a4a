"""Table 2: the bandwidth that a parameter server needs so that workers never wait for it."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments import drawing, published
from experiments.base import Experiment, Findings, Rows, Scale, Table
from experiments.cells import MANY_LINKS, WITH_PSHARD, Cell, exchange, rack
from phub_collective.models import model_keys
from phub_collective.planning import bandwidth

WORKERS = 8
MEASURED = (  # system, which deployment it is, and whose links are counted
    ("pbox", "NCC", "a PBox's links"),
    ("pshard", "CS", "the links of a worker and its shard"),
)
WITHIN = 0.02  # of the paper's value


class Table2(Experiment):
    name = "table2"
    title = "Bandwidth a parameter server needs, 8 workers"
    kind = "link-bound"
    in_paper = "Gb/s for four deployments of a server, printed; batch times derived from them"
    differs = (
        "The four deployments' columns are the paper's formulas on our byte counts. 'measured' is "
        "real: all bytes that the links of a PBox (NCC) moved in an exchange, as the kernel "
        "counted them, over the batch's time; for PShard (CS) and for collectives, those of one "
        "worker's link."
    )

    def cells(self, scale: Scale) -> list[Cell]:
        if scale is Scale.QUICK:
            return [exchange("pbox", "GoogleNet299", rack(2, 2), iterations=1)]
        systems = WITH_PSHARD if scale is Scale.FULL else ("pbox", "pshard", "ring")
        return [
            exchange(system, model, rack(WORKERS, MANY_LINKS))
            for model in published.TABLE_2
            for system in systems
        ]

    def findings(self, rows: Rows) -> Findings:
        found = Findings()
        models = [model for model in published.TABLE_2 if rows.where(model=model)]
        titles = ["network", *(f"{name}: formula (paper)" for name in bandwidth.DEPLOYMENTS)]
        systems = rows.values("system")
        lines = [[*titles, *(f"{system}, measured" for system in systems)]]
        for model in models:
            cells = [
                f"{formula(model, name):.0f} ({published.TABLE_2[model][name]})"
                for name in bandwidth.DEPLOYMENTS
            ]
            needs = [self._need(rows, model, system) for system in systems]
            lines.append(
                [model, *cells, *("-" if need is None else f"{need:.0f}" for need in needs)]
            )
        found.tables.append(Table("Gb/s (2^30 bits); in brackets [printed]", lines))
        for model in models:
            for system, deployment, whose in MEASURED:
                need = self._need(rows, model, system)
                if need is None or rows.where(model=model).values("workers") != [WORKERS]:
                    continue
                paper = published.TABLE_2[model][deployment]
                ratio = need / paper
                found.claim(
                    f"{model}: {whose} move {need:.0f} Gb/s, {ratio:.3f} of the printed {paper} "
                    "(frames add headers; the kernel counts one for each of its large segments).",
                    1 - WITHIN <= ratio <= 1.06,
                )
        return found

    @staticmethod
    def _need(rows: Rows, model: str, system: str) -> float | None:
        row = rows.one(model=model, system=system)
        if row is None:
            return None
        both = row["least_received"] + row["least_sent"]
        moved = row["pbox_bytes"] / row["exchanges"] if system == "pbox" else both
        return bandwidth.gbit(moved / published.TABLE_2_BATCH_S[model])

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = drawing.one_axes(figure, "", "Gb/s at the busiest server or worker")
        models = [model for model in published.TABLE_2 if rows.where(model=model)]
        drawing.bars(
            axes,
            models,
            rows.values("system"),
            lambda model, system: self._need(rows, model, system),
        )
        axes.set_yscale("log")


def formula(model: str, deployment: str) -> float:
    nbytes = sum(key.nbytes for key in model_keys(model))
    batch_s = published.TABLE_2_BATCH_S[model]
    return bandwidth.gbit(bandwidth.need(deployment, nbytes, WORKERS, batch_s))
