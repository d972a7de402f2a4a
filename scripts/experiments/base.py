"""What an experiment is: what it measures, what it claims of it, and how it is drawn."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from matplotlib.figure import Figure

from experiments.cells import Cell

Row = dict[str, Any]


class Scale(enum.Enum):
    """How much of an experiment is run."""

    QUICK = "quick"  # a part of it with a few workers: does it work?
    USUAL = "usual"  # what the budget of `all` allows
    FULL = "full"  # everything


class Rows:
    """The rows of an experiment, found by what they say."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = list(rows)

    def __iter__(self) -> Any:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, **wanted: Any) -> Rows:
        """Those that have all these values."""
        return Rows(
            row for row in self._rows if all(row.get(name) == wanted[name] for name in wanted)
        )

    def one(self, **wanted: Any) -> Row | None:
        """The only one that has these values; None where it was not measured."""
        found = self.where(**wanted)
        if len(found) > 1:
            raise LookupError(f"{len(found)} rows have {wanted}")
        return next(iter(found), None)

    def values(self, name: str) -> list[Any]:
        """What there is of a value, in the order of the rows."""
        return list(dict.fromkeys(row[name] for row in self._rows if name in row))


@dataclass(frozen=True)
class Claim:
    """A sentence that the numbers bear out, or do not.

    Attributes:
        text: with the numbers measured.
        holds: None: it is neither, but worth knowing.
        bar: it is one of the project's own requirements; else a claim of the paper.
    """

    text: str
    holds: bool | None
    bar: bool = False


@dataclass(frozen=True)
class Table:
    """Cells are texts; the first line holds the titles."""

    caption: str
    lines: Sequence[Sequence[str]]


@dataclass
class Findings:
    """What the report says of an experiment."""

    tables: list[Table] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def claim(self, text: str, holds: bool | None, bar: bool = False) -> None:
        self.claims.append(Claim(text, holds, bar))


class Experiment(abc.ABC):
    """One table or figure of the paper, or one requirement on the exchange path.

    Attributes:
        name: what the command line calls it.
        title: what it shows.
        kind: "link-bound" (shaped links, dilated: only ratios and what links allow is kept),
            "cpu-bound" (one host, full speed) or "arithmetic".
        in_paper: what the paper has, with the mark of its source.
        differs: what differs from the paper's set-up, and why.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    kind: ClassVar[str]
    in_paper: ClassVar[str]
    differs: ClassVar[str]

    @abc.abstractmethod
    def cells(self, scale: Scale) -> list[Cell]:
        """What is to be measured."""

    @abc.abstractmethod
    def findings(self, rows: Rows) -> Findings:
        """What the rows, which may be a part of them, say."""

    @abc.abstractmethod
    def draw(self, rows: Rows, figure: Figure) -> None:
        """The plot."""


@dataclass(frozen=True)
class Waiting:
    """An experiment that cannot be run yet."""

    name: str
    title: str
    needs: str


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits; "-" for None."""
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if abs(value) < 10**digits else f"{value:.0f}"


def grid(
    title: str,
    lines: Sequence[Any],
    columns: Sequence[Any],
    value: Callable[[Any, Any], float | None],
    digits: int = 3,
) -> list[list[str]]:
    """The lines of a table of numbers, one line for each of `lines`."""
    made = [[title, *map(str, columns)]]
    for line in lines:
        made.append([str(line), *(number(value(line, column), digits) for column in columns)])
    return made
