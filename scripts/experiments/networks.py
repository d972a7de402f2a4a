"""Figures 12 and 13: training of the paper's networks, at 10 and at 56 Gbit/s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from matplotlib.figure import Figure

from experiments import drawing, published
from experiments.base import Experiment, Findings, Rows, Scale, Table
from experiments.cells import FIFTY_SIX, MANY_LINKS, TEN, WITH_PSHARD, Cell, exchange, rack

WORKERS = 8
FORMED = ("AlexNet", "ResNet50", "GoogleNet299")  # in every form of the collectives
FORMS = ("overlapped", "first", "last")


class _Networks(Experiment):
    kind = "link-bound"
    rate: ClassVar[float]
    ratios: ClassVar[Mapping[str, float]]
    over_pshard: ClassVar[Mapping[str, float]]
    usual: ClassVar[tuple[str, ...]]
    differs = (
        "The paper's baseline, MXNet's sharded server on InfiniBand, is not measured here yet: a "
        "PBox is compared with PShard and with collectives on the same links. Batch times are "
        "emulated layer by layer; those of VGG, ResNet 18 and 50 and ResNext 269 are [assumed]. "
        "A step ends when the exchange has ended (a blocking step), for all systems alike."
    )

    def cells(self, scale: Scale) -> list[Cell]:
        if scale is Scale.QUICK:
            return []
        models = self.usual if scale is Scale.USUAL else tuple(published.NETWORKS)
        cells = []
        for model in models:
            for system in WITH_PSHARD:
                cells.append(self._cell(system, model, WORKERS, "overlapped"))
                if model in FORMED and system in ("ring", "halving_doubling"):
                    cells += [self._cell(system, model, WORKERS, form) for form in FORMS[1:]]
            if self.rate == TEN:
                cells.append(self._cell("pbox", model, WORKERS - 1, "overlapped"))
        return sorted(cells, key=lambda cell: (cell.shape.workers, cell.shape.pbox_links))

    def _cell(self, system: str, model: str, workers: int, form: str) -> Cell:
        return exchange(
            system,
            model,
            rack(workers, MANY_LINKS, self.rate),
            batch_s=published.BATCH_S[model][0],
            form=form,
            labels={"form": form},
        )

    def findings(self, rows: Rows) -> Findings:
        found = Findings()
        models = [model for model in published.NETWORKS if rows.where(model=model)]
        plain = rows.where(form="overlapped", workers=WORKERS)
        systems = plain.values("system")
        lines = [
            [
                "network",
                "batch",
                *(f"{system} images/s" for system in systems),
                *(f"{system} x floor" for system in systems),
                "PBox over Gloo",
                "PBox over MXNet IB (paper)",
                "PBox over PShard (paper)",
            ]
        ]
        for model in models:
            here = [plain.one(model=model, system=system) for system in systems]
            ratio = over(plain, model, "pbox", "gloo")
            shards = over(plain, model, "pbox", "pshard")
            seconds, mark = published.BATCH_S[model]
            lines.append(
                [
                    model,
                    f"{published.BATCH_SIZE[model]} in {seconds * 1e3:.0f} ms {mark}",
                    *(f"{images(row):.0f}" if row else "-" for row in here),
                    *(f"{row['times_floor']:.3f}" if row else "-" for row in here),
                    f"{ratio:.2f}" if ratio else "-",
                    str(self.ratios.get(model, "1.0 to 1.06")),
                    f"{f'{shards:.2f}' if shards else '-'} ({self.over_pshard[model]})",
                ]
            )
        found.tables.append(
            Table("All workers together; MXNet is not among the systems here", lines)
        )
        self._forms(found, rows)
        self._seven(found, rows)
        ratios = [ratio for model in models if (ratio := over(plain, model, "pbox", "gloo"))]
        if ratios:
            found.claim(
                f"PBox is {min(ratios):.2f} to {max(ratios):.2f} times as fast as stock Gloo "
                "(ring) on the same links: never slower, and up to the 1.75 by which a ring of "
                "eight moves more bytes.",
                min(ratios) > 0.98,
            )
        ratios = [ratio for model in models if (ratio := over(plain, model, "pbox", "pshard"))]
        if ratios:
            found.claim(
                f"PBox is {min(ratios):.2f} to {max(ratios):.2f} times as fast as PShard, the same "
                "server on the workers' machines: never slower, and up to the 1.75 by which each "
                "of eight hosts moves more bytes.",
                min(ratios) > 0.98,
            )
        return found

    def _forms(self, found: Findings, rows: Rows) -> None:
        formed = [model for model in FORMED if rows.where(model=model, form="last")]
        if not formed:
            return
        names = [(s, f) for s in ("ring", "halving_doubling") for f in FORMS]
        lines = [["network", *(f"{system}, {form}" for system, form in names)]]
        for model in formed:
            cells = [rows.one(model=model, system=s, form=f, workers=WORKERS) for s, f in names]
            lines.append(
                [model, *(f"{row['median_s'] * 1e3:.1f}" if row else "-" for row in cells)]
            )
        caption = (
            "ms of a step: overlapped buckets, or the whole model at the first or last gradient"
        )
        found.tables.append(Table(caption, lines))

    def _seven(self, found: Findings, rows: Rows) -> None:
        """A PBox is a machine too: seven workers and a PBox against eight workers."""
        lines = [
            ["network", "7 workers and a PBox, images/s", "8 workers, Gloo, images/s", "ratio"]
        ]
        for model in rows.values("model"):
            seven = rows.one(model=model, workers=WORKERS - 1)
            eight = rows.one(model=model, system="gloo", workers=WORKERS)
            if seven and eight:
                ratio = images(seven) / images(eight)
                lines.append(
                    [model, f"{images(seven):.0f}", f"{images(eight):.0f}", f"{ratio:.2f}"]
                )
        if len(lines) > 1:
            found.tables.append(Table("The same number of machines", lines))

    def draw(self, rows: Rows, figure: Figure) -> None:
        axes = drawing.one_axes(figure, "", "throughput over stock Gloo's")
        plain = rows.where(form="overlapped", workers=WORKERS)
        models = [model for model in published.NETWORKS if plain.where(model=model)]
        drawing.bars(
            axes,
            [published.NETWORKS[model] for model in models],
            plain.values("system"),
            lambda short, system: over(plain, _model(short), system, "gloo"),
        )


def _model(short: str) -> str:
    return next(model for model, name in published.NETWORKS.items() if name == short)


def images(row: dict[str, float]) -> float:
    """Samples per second of all workers together."""
    return row["workers"] * published.BATCH_SIZE[str(row["model"])] / row["median_s"]


def over(rows: Rows, model: str, system: str, reference: str) -> float | None:
    """How many times as fast a system is as another."""
    one, other = (rows.one(model=model, system=name) for name in (system, reference))
    return None if one is None or other is None else float(other["median_s"] / one["median_s"])


class Figure12(_Networks):
    name = "figure12"
    title = "Nine networks, 8 workers, 10 Gbit/s"
    in_paper = "PBox over MXNet's sharded server on InfiniBand, printed"
    rate, ratios, usual = TEN, published.FIGURE_12, tuple(published.NETWORKS)
    over_pshard = published.OVER_PSHARD_10


class Figure13(_Networks):
    name = "figure13"
    title = "Networks, 8 workers, 56 Gbit/s"
    in_paper = "PBox over MXNet's sharded server on InfiniBand, derived from printed speed-ups"
    rate, ratios, usual = FIFTY_SIX, published.FIGURE_13, ("AlexNet", "VGG19", "ResNet50")
    over_pshard = published.OVER_PSHARD_56
