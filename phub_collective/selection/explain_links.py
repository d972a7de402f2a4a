"""What `phub explain` says of measured links: who is held up by which, and whether reducing in two
levels would pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from phub_collective.probing.matrix import Matrix
from phub_collective.probing.report import GBIT, ranks_text
from phub_collective.selection.costmodel import form_of
from phub_collective.selection.hierarchy import Estimate, Racks, estimate
from phub_collective.selection.links import bottleneck, parameters, racks_of
from phub_collective.sizes import size_text, time_text

SIZES = (1 << 20, 25 << 20, 100 << 20, 500 << 20)  # bytes


def lines_of(
    matrix: Matrix,
    names: Sequence[str],
    uplink: float | None = None,
    pbox_link: float | None = None,
) -> Iterator[str]:
    """The lines to print.

    Args:
        names: the backends to say something about.
        uplink, pbox_link: Gbit/s, in place of what `racks_of` assumes.

    Raises:
        ConfigError: a rate is not positive.
    """
    rates = (None if rate is None else rate / GBIT for rate in (uplink, pbox_link))
    racks = racks_of(matrix, *rates)
    yield ""
    yield f"# links: {len(matrix.hosts)} hosts, {matrix.size} ranks; a PBox on the first host"
    if not matrix.alone:
        yield "# pairs were measured at the same time: a rate may be a share (phub probe --alone)"
    yield from _bottlenecks(matrix, names)
    yield ""
    if len(racks.workers) == 1:
        yield "# all hosts are one group: there are no two levels to reduce in"
        return
    yield from _levels(racks, "at least " if uplink is None else "")


def _bottlenecks(matrix: Matrix, names: Sequence[str]) -> Iterator[str]:
    """The slowest link of each backend, and what it alone predicts."""
    titles = "".join(f"{size_text(nbytes):>10}" for nbytes in SIZES)
    yield f"{'held up by':<20} {'ranks':<16} {'each flow gets':>14}{titles}"
    for name in names:
        found, fitted = bottleneck(name, matrix), parameters(name, matrix)
        if found is None or fitted is None:
            yield f"{name:<20} no link: all ranks are on one host"
            continue
        ends = (ranks_text(matrix.hosts[host].ranks) for host in (found.sender, found.receiver))
        times = "".join(
            f"{time_text(fitted.seconds(form_of(name, nbytes, matrix.size))):>10}"
            for nbytes in SIZES
        )
        yield f"{name:<20} {' -> '.join(ends):<16} {_rate(found.bandwidth):>14}{times}"


def _levels(racks: Racks, least: str) -> Iterator[str]:
    """The estimate, by size; `least` stands before the rate between racks."""
    workers = ", ".join(map(str, racks.workers))
    racks_text = f"{len(racks.workers)} racks of {workers} workers"
    yield f"# two levels: {racks_text} (our own formula: the paper's is not known)"
    links = f"worker {_rate(racks.worker_link)}, PBox {_rate(racks.pbox_link)}"
    across = f"rack to the others {least}{_rate(racks.uplink)}, {time_text(racks.latency)}"
    yield f"# {links}, {across}"
    titles = ("flat across", "in rack", "ring across", "in turn", "pipelined")
    yield f"{'bytes':>12}" + "".join(f"{title:>13}" for title in titles) + "  pays"
    for nbytes in SIZES:
        found = estimate(nbytes, racks)
        times = (found.flat, found.inside, found.ring, found.in_turn, found.pipelined)
        cells = "".join(f"{time_text(seconds):>13}" for seconds in times)
        yield f"{size_text(nbytes):>12}{cells}  {_verdict(found)}"


def _verdict(found: Estimate) -> str:
    if found.pays:
        return "yes"
    return "if pipelined" if found.pays_pipelined else "no"


def _rate(bandwidth: float) -> str:
    return "-" if bandwidth == inf else f"{bandwidth * GBIT:.3g} Gbit/s"
