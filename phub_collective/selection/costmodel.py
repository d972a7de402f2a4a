"""How long an allreduce takes on each backend, predicted. Pure arithmetic.

    seconds = latency x rounds + moved / bandwidth

`Form` says how many rounds a backend needs and how many bytes pass its tightest place, for S bytes
on N ranks. Latency and bandwidth are fitted to a short probe (`fit`). Summing has no term of its
own: for a given N what is summed grows with what is moved, so a probe cannot tell them apart and
its cost is inside the fitted bandwidth.

Between probed sizes a `Curve` interpolates the measured times instead, linearly in the logarithms
of size and time, which also follows what no line does (caches, a library's change of protocol).
Outside of them, and for sizes that would take too long to probe, the form applies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp, inf, log

from phub_collective.backends import schedule

Point = tuple[int, float]  # bytes, seconds

WORTHWHILE = 1.1  # times faster another backend must be, for the choice to change with the size


@dataclass(frozen=True)
class Form:
    """What one allreduce costs in the units of the model.

    Attributes:
        rounds: messages that wait for each other.
        moved: bytes through the tightest place (a worker's link, or the server's), one way.
    """

    rounds: float
    moved: float


@dataclass(frozen=True)
class Parameters:
    """What a probe found.

    Attributes:
        latency: seconds per round.
        bandwidth: bytes per second through the tightest place, summing included.
    """

    latency: float
    bandwidth: float

    def seconds(self, form: Form) -> float:
        return self.latency * form.rounds + form.moved / self.bandwidth


def pbox(nbytes: int, size: int) -> Form:
    """Push and pull; the server takes in N times S and gives out as much at the same time."""
    return Form(2, size * nbytes)


def pshard(nbytes: int, size: int) -> Form:
    """Push and pull; each host sends to the others' shards what is theirs, and its shard answers
    them: (N-1)/N times S each, out, and as much in."""
    return Form(2, 2 * (size - 1) / size * nbytes)


def ring(nbytes: int, size: int) -> Form:
    return Form(2 * (size - 1), 2 * (size - 1) / size * nbytes)


def halving_doubling(nbytes: int, size: int) -> Form:
    rounds, share = _costliest_rank(size)
    return Form(rounds, share * nbytes)


@cache
def _costliest_rank(size: int) -> tuple[int, float]:
    """Steps, and bytes sent per byte reduced, of the worst rank: with binary blocks they differ."""
    count = 1 << size.bit_length()  # elements: every piece of every block is whole
    plans = [schedule.halving_doubling(rank, size, count) for rank in range(size)]
    sent = [sum(end - begin for _, (begin, end), *_ in plan) for plan in plans]
    return max(map(len, plans)), max(sent) / count


# Gloo runs a ring; MPI libraries, as a rule, some kind of halving and doubling.
FORMS: dict[str, Callable[[int, int], Form]] = {
    "pbox": pbox,
    "pshard": pshard,
    "ring": ring,
    "halving_doubling": halving_doubling,
    "mpi": halving_doubling,
    "gloo": ring,
}


def form_of(backend: str, nbytes: int, size: int) -> Form:
    """The form of a backend; one that is not known here counts as a ring."""
    return FORMS.get(backend, ring)(nbytes, size)


def fit(backend: str, size: int, points: Sequence[Point]) -> Parameters:
    """Latency and bandwidth by least squares of the relative error, neither negative."""
    a = b = c = p = q = 0.0  # the normal equations: (a b; b c) (latency; 1/bandwidth) = (p; q)
    for nbytes, seconds in points:
        form = form_of(backend, nbytes, size)
        x, y = form.rounds / seconds, form.moved / seconds
        a, b, c, p, q = a + x * x, b + x * y, c + y * y, p + x, q + y
    determinant = a * c - b * b
    latency, per_byte = 0.0, 0.0
    if determinant > 1e-9 * a * c:
        latency, per_byte = (p * c - q * b) / determinant, (q * a - p * b) / determinant
    if latency <= 0.0:
        latency, per_byte = 0.0, q / c if c else 0.0
    elif per_byte <= 0.0:
        latency, per_byte = p / a, 0.0
    return Parameters(latency, 1 / per_byte if per_byte else inf)


@dataclass(frozen=True)
class Curve:
    """Predicted time of one backend over all sizes, on `size` ranks.

    Attributes:
        points: what was measured, by rising number of bytes; seconds of the slowest rank.
        parameters: the fit to them.
    """

    backend: str
    size: int
    points: tuple[Point, ...]
    parameters: Parameters

    @staticmethod
    def through(backend: str, size: int, points: Sequence[Point]) -> Curve:
        """The curve of at least one measured point, each of at least 1 byte."""
        ordered = tuple(sorted(points))
        return Curve(backend, size, ordered, fit(backend, size, ordered))

    def seconds(self, nbytes: int) -> float:
        """Predicted seconds of an allreduce of `nbytes`."""
        above = bisect_right(self.points, (nbytes, inf))
        if above == 0:
            return self.points[0][1]  # the probe's smallest size is all latency
        if above == len(self.points):
            return self._beyond(nbytes)
        (left, before), (right, after) = self.points[above - 1 : above + 1]
        share = (log(nbytes) - log(left)) / (log(right) - log(left))
        return exp((1 - share) * log(before) + share * log(after))

    def _beyond(self, nbytes: int) -> float:
        """Above the largest probed size: as the form grows from there."""
        largest, seconds = self.points[-1]
        at_largest = self.parameters.seconds(form_of(self.backend, largest, self.size))
        at_nbytes = self.parameters.seconds(form_of(self.backend, nbytes, self.size))
        return seconds * at_nbytes / at_largest if at_largest else seconds


def cheapest(curves: Mapping[str, Curve], nbytes: int) -> str:
    """The backend with the lowest predicted time; ties go to the first."""
    return min(curves, key=lambda name: curves[name].seconds(nbytes))


def decisions(curves: Mapping[str, Curve], sizes: Sequence[int]) -> list[tuple[int, str]]:
    """The choice by size as (first size, backend) rows, looked for at the rising `sizes`. A row
    goes on while its backend is within WORTHWHILE of the cheapest: less than that is noise, and
    every further backend in use costs memory and connections."""
    rows: list[tuple[int, str]] = []
    for nbytes in sizes:
        best = cheapest(curves, nbytes)
        if not rows:
            rows.append((nbytes, best))
        current = curves[rows[-1][1]].seconds(nbytes)
        if current > WORTHWHILE * curves[best].seconds(nbytes):
            rows.append((nbytes, best))
    return rows
