"""Figure 16, exchanges by size of a chunk, and the sweep of lanes."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any

from lab.topology import Shape
from matplotlib.figure import Figure

from experiments import drawing, published
from experiments.base import Experiment, Findings, Rows, Scale, Table, number
from experiments.cells import COLLECTIVES, FIFTY_SIX, MANY_LINKS, TEN, Cell, exchange, rack
from experiments.figure15 import exchanges
from phub_collective.sizes import size_text

MODEL = "ResNet18"
WORKERS = 8
BURST = 3  # exchanges in a row at full speed, where one alone is short
ITERATIONS = 5
WHERE = {"lab": "links of 56 Gbit/s", "host": "one host's loopback, full speed"}


class _Sweep(Experiment):
    """One setting of a PBox, on shaped links and at full speed, with the collectives beside it."""

    kind = "link-bound on shaped links, cpu-bound at full speed on one host"
    setting: str  # the label that varies
    values: Mapping[str, tuple[int, ...]]  # by place

    def cells(self, scale: Scale) -> list[Cell]:
        if scale is Scale.QUICK:
            return self.quick()
        shape = rack(WORKERS, MANY_LINKS, FIFTY_SIX)
        cells = []
        for place, values in self.values.items():
            cells += [self._cell(place, value, shape) for value in values]
            cells += [self._collective(place, system) for system in COLLECTIVES]
        return cells

    def quick(self) -> list[Cell]:
        return []

    @abc.abstractmethod
    def _cell(self, place: str, value: int, shape: Shape) -> Cell:
        """The PBox with a value of the setting."""

    def _collective(self, place: str, system: str) -> Cell:
        shape = rack(WORKERS, MANY_LINKS, FIFTY_SIX)
        return exchange(system, MODEL, shape, labels={"place": place}, **_run(place))

    def findings(self, rows: Rows) -> Findings:
        found = Findings()
        for place in rows.values("place"):
            here = rows.where(place=place)
            lines = [[self.setting, "exchanges/s", *self._columns()]]
            for row in here.where(system="pbox"):
                value = row[self.setting]
                lines.append([self._text(value), number(exchanges(row), 4), *self._papers(value)])
            for system in COLLECTIVES:
                row = here.one(system=system)
                if row:
                    speed = number(exchanges(row), 4)
                    lines.append([f"({system})", speed, *("-" for _ in self._columns())])
            found.tables.append(Table(f"On {WHERE[place]}, {WORKERS} workers", lines))
        self._judge(found, rows)
        return found

    def _text(self, value: int) -> str:
        return str(value)

    def _columns(self) -> list[str]:
        return []

    def _papers(self, value: int) -> list[str]:
        return []

    @abc.abstractmethod
    def _judge(self, found: Findings, rows: Rows) -> None:
        """Add the claims."""

    def draw(self, rows: Rows, figure: Figure) -> None:
        places = rows.values("place")
        panels = figure.subplots(1, len(places), squeeze=False)[0]
        for axes, place in zip(panels, places, strict=True):
            drawing.labelled(axes, self.setting.replace("_", " "), "exchanges per second")
            points = [
                (row[self.setting], exchanges(row) or 0.0)
                for row in rows.where(place=place, system="pbox")
            ]
            drawing.curve(axes, "pbox", points)
            for system in COLLECTIVES:
                row = rows.one(place=place, system=system)
                if row and len(points) > 1:
                    level = exchanges(row) or 0.0
                    ends = [(points[0][0], level), (points[-1][0], level)]
                    drawing.curve(axes, system, ends)
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.set_title(WHERE[place], fontsize="small")
            axes.legend(fontsize="x-small")


def _run(place: str) -> dict[str, Any]:
    if place == "lab":
        return {}
    return {"here": True, "burst": BURST, "iterations": ITERATIONS}


def best(rows: Rows, place: str, setting: str) -> tuple[int, float] | None:
    """(value, exchanges per second) of the fastest PBox."""
    found = [
        (exchanges(row) or 0.0, row[setting]) for row in rows.where(place=place, system="pbox")
    ]
    return (max(found)[1], max(found)[0]) if len(found) > 1 else None


class Figure16(_Sweep):
    name = "figure16"
    title = "Exchanges of ResNet 18 per second by bytes of a chunk"
    in_paper = "exchanges per second with 10 queue pairs, read off (error about 8)"
    differs = (
        "Shaped links hide what small chunks cost the processors, as long as these keep up: so the "
        "sweep is repeated at full speed over one host's loopback, where nothing but the "
        "processors is the limit. Both are TCP, not InfiniBand. Collectives send no chunks: their "
        "rows are levels to compare with."
    )
    setting = "chunk_bytes"
    values = {place: tuple(published.FIGURE_16) for place in WHERE}

    def quick(self) -> list[Cell]:
        return [self._cell("lab", 2 << 20, rack(2, 2, TEN, 2e9))]

    def _cell(self, place: str, value: int, shape: Shape) -> Cell:
        labels = {"place": place, "chunk_bytes": value}
        return exchange("pbox", MODEL, shape, chunk_bytes=value, labels=labels, **_run(place))

    def _text(self, value: int) -> str:
        return size_text(value)

    def _columns(self) -> list[str]:
        return ["exchanges/s (paper)"]

    def _papers(self, value: int) -> list[str]:
        return [str(published.FIGURE_16[value])]

    def _judge(self, found: Findings, rows: Rows) -> None:
        for place in rows.values("place"):
            fastest = best(rows, place, self.setting)
            usual = exchanges(rows.one(place=place, system="pbox", chunk_bytes=32 << 10))
            if fastest and usual:
                found.claim(
                    f"{WHERE[place]}: the best chunk has {size_text(fastest[0])} (the paper's 32 "
                    f"KiB); 32 KiB reach {usual / fastest[1]:.3f} of it.",
                    usual / fastest[1] > 0.95,
                )


class Lanes(_Sweep):
    name = "lanes"
    title = "Exchanges of ResNet 18 per second by lanes of a worker"
    in_paper = "one queue pair for each of ten interfaces, the least possible, is best [summary]"
    differs = (
        "A lane here is a TCP connection from a worker to a core of the PBox, at least one for "
        "each of its links. Fewer are measured at full speed over one host's loopback. "
        "Collectives have one lane for each neighbour: their rows are levels to compare with."
    )
    setting = "lanes"
    values = {"lab": (10, 20, 40), "host": (1, 2, 4, 8, 16)}

    def _cell(self, place: str, value: int, shape: Shape) -> Cell:
        labels = {"place": place, "lanes": value}
        return exchange("pbox", MODEL, shape, cores=value, labels=labels, **_run(place))

    def _judge(self, found: Findings, rows: Rows) -> None:
        for place in rows.values("place"):
            fastest = best(rows, place, self.setting)
            if fastest is None:
                continue
            least = min(self.values[place])
            usual = exchanges(rows.one(place=place, system="pbox", lanes=least)) or 0.0
            found.claim(
                f"{WHERE[place]}: fastest with {fastest[0]} lanes; the least possible, {least}, "
                f"reaches {usual / fastest[1]:.3f} of it.",
                usual / fastest[1] > 0.95,
            )
