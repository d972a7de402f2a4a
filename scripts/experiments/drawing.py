"""How plots look: readable in black and white, a system with the same marks everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

SIZE = (7.0, 4.0)  # inches
SHADES = {
    "pbox": "0.15",
    "pshard": "0.3",
    "ring": "0.45",
    "halving_doubling": "0.65",
    "gloo": "0.85",
}
HATCHES = {"pbox": "", "pshard": "\\\\", "ring": "//", "halving_doubling": "..", "gloo": "xx"}
MARKS = {"pbox": "o", "pshard": "D", "ring": "s", "halving_doubling": "^", "gloo": "x"}
DASHES = {
    "pbox": "-",
    "pshard": (0, (8, 2)),
    "ring": "--",
    "halving_doubling": "-.",
    "gloo": ":",
}
NAMES = {
    "pbox": "PBox",
    "pshard": "PShard",
    "ring": "ring",
    "halving_doubling": "halving-doubling",
    "gloo": "Gloo",
}


def new_figure() -> Figure:
    return Figure(figsize=SIZE, layout="constrained")


def one_axes(figure: Figure, x: str, y: str) -> Axes:
    """The figure's only axes, with its labels and a quiet grid."""
    axes = figure.subplots()
    labelled(axes, x, y)
    return axes


def labelled(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)


def bars(
    axes: Axes,
    groups: Sequence[Any],
    systems: Sequence[str],
    value: Callable[[Any, str], float | None],
) -> None:
    """Groups of bars, one for each system that has a value there."""
    width = 0.8 / max(1, len(systems))
    for index, system in enumerate(systems):
        found = [(place, value(group, system)) for place, group in enumerate(groups)]
        shown = [(place, height) for place, height in found if height is not None]
        axes.bar(
            [place - 0.4 + (index + 0.5) * width for place, _ in shown],
            [height for _, height in shown],
            width,
            label=NAMES.get(system, system),
            color=SHADES.get(system, str(0.2 + 0.6 * index / len(systems))),
            hatch=HATCHES.get(system, ""),
            edgecolor="black",
            linewidth=0.6,
        )
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
    if len(systems) > 1:
        axes.legend(fontsize="small")


def curve(axes: Axes, system: str, points: Sequence[tuple[float, float]], label: str = "") -> None:
    """A line through points, marked as its system is everywhere."""
    axes.plot(
        [x for x, _ in points],
        [y for _, y in points],
        color="black",
        linestyle=DASHES.get(system, "-"),
        marker=MARKS.get(system, "."),
        markerfacecolor=SHADES.get(system, "white"),
        label=label or NAMES.get(system, system),
    )


def published(axes: Axes, points: Sequence[tuple[float, float]], label: str) -> None:
    """What the paper has, thin and grey."""
    axes.plot([x for x, _ in points], [y for _, y in points], color="0.6", linewidth=1, label=label)
