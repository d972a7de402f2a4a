"""Figure 18: one PBox for several jobs at once."""

from __future__ import annotations

from matplotlib.figure import Figure

from experiments import drawing, published
from experiments.base import Experiment, Findings, Row, Rows, Scale, Table, grid
from experiments.cells import SYSTEMS, TEN, Cell, exchange, rack

JOBS = (1, 2, 4, 8)
EACH = 2  # workers of a job
LINKS = 16  # of the PBox: as many as workers, so that its processors are what jobs share
SHAPED = 250e6  # bits per second: sixteen workers move as much as eight at 500
BURST = 3
MODELS = ("AlexNet", "ResNet50")


class Figure18(Experiment):
    name = "figure18"
    title = "Throughput of a job beside others on one PBox, two workers each, 10 Gbit/s"
    kind = "link-bound"
    in_paper = "eight jobs cost AlexNet about 5 percent [summary]"
    differs = (
        "Each worker has a link of its own, and the PBox as many as there are workers, so what the "
        "jobs share is the PBox itself (its cores, and this machine's processors). No compute. "
        "Collectives share nothing but the switch, and this machine."
    )

    def cells(self, scale: Scale) -> list[Cell]:
        if scale is Scale.QUICK:
            shape = rack(4, 2, TEN, 1e9)
            return [exchange("pbox", "GoogleNet299", shape, jobs=2, burst=2, iterations=1,
                             labels={"jobs": 2})]  # fmt: skip
        models = MODELS if scale is Scale.FULL else MODELS[:1]
        return [
            exchange(
                system,
                model,
                rack(EACH * jobs, LINKS, TEN, SHAPED),
                jobs=jobs,
                burst=BURST,
                iterations=1,
                labels={"jobs": jobs},
            )
            for model in models
            for jobs in JOBS
            for system in SYSTEMS
        ]

    def findings(self, rows: Rows) -> Findings:
        found = Findings()
        jobs, systems = rows.values("jobs"), rows.values("system")
        for model in rows.values("model"):

            def share(system: str, count: int, model: str = model) -> float | None:
                return self._share(rows, model, system, count)

            caption = f"{model}: throughput of the slowest job over that of one alone, by jobs"
            found.tables.append(Table(caption, grid("system", systems, jobs, share)))
            most = max(jobs)
            kept = share("pbox", most)
            if kept is not None and most > 2:
                found.claim(
                    f"{model}: with {most} jobs on one PBox each keeps {kept:.3f} of its "
                    f"throughput (paper, AlexNet: about {1 - published.FIGURE_18_COST}).",
                    kept >= 1 - published.FIGURE_18_COST,
                )
        return found

    @staticmethod
    def _share(rows: Rows, model: str, system: str, count: int) -> float | None:
        alone = rows.one(model=model, system=system, jobs=1)
        row = rows.one(model=model, system=system, jobs=count)
        return None if alone is None or row is None else slowest(alone) / slowest(row)

    def draw(self, rows: Rows, figure: Figure) -> None:
        models = rows.values("model")
        panels = figure.subplots(1, len(models), squeeze=False)[0]
        for axes, model in zip(panels, models, strict=True):
            drawing.labelled(axes, "jobs", "throughput of a job, of one alone")
            for system in rows.values("system"):
                counts = [row["jobs"] for row in rows.where(model=model, system=system)]
                points = [(c, self._share(rows, model, system, c) or 0.0) for c in counts]
                drawing.curve(axes, system, points)
            axes.set_ylim(0, 1.1)
            axes.set_title(model, fontsize="small")
            axes.legend(fontsize="small")


def slowest(row: Row) -> float:
    """Seconds of an exchange in the slowest of the jobs."""
    return float(max(row["seconds"]))
