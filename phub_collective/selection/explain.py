"""`phub explain`: the decision table and why, printed by rank 0 of a job."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path

from phub_collective.config import Config
from phub_collective.errors import ConfigError
from phub_collective.launch.inner import run_as_job
from phub_collective.probing.matrix import Matrix
from phub_collective.rendezvous.identity import identify
from phub_collective.selection.costmodel import Curve
from phub_collective.selection.explain_links import lines_of
from phub_collective.selection.probe import SIZES
from phub_collective.selection.selector import Selector
from phub_collective.session import Session
from phub_collective.sizes import size_text, time_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `phub explain`."""
    parser.add_argument(
        "-np", type=int, default=2, metavar="N", help="ranks, unless it runs inside a job (2)"
    )
    parser.add_argument("--backend", metavar="TEXT", help="in place of PHUB_BACKEND")
    parser.add_argument("--lane", choices=["auto", "shm", "tcp"], help="in place of PHUB_LANE")
    parser.add_argument("--fresh", action="store_true", help="measure, whatever is cached")
    parser.add_argument(
        "--links", type=Path, metavar="FILE", help="of phub probe --json: explain these links, too"
    )
    parser.add_argument(
        "--uplink", type=float, metavar="GBIT",
        help="with --links: Gbit/s of a group of hosts to the others, in place of what was seen",
    )  # fmt: skip
    parser.add_argument(
        "--pbox-link", type=float, metavar="GBIT",
        help="with --links: Gbit/s of a group's PBox (default: as of a worker's host)",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """In a job: take part and let rank 0 print. Outside of one: start a job that does so.

    Raises:
        ConfigError: a flag, the file of --links or PHUB_BACKEND is wrong.
    """
    if args.np < 1:
        raise ConfigError(f"[explain] -np {args.np}: expected at least 1 rank")
    place = identify(os.environ)
    # Before anything else, so that a wrong file is told at once; other hosts need not have it.
    matrix = Matrix.load(args.links) if args.links and place.rank == 0 else None
    if args.np > 1 and place.launcher == "single":
        return run_as_job(_words(args), args.np)
    config = Config.from_environment(backend=args.backend, lane=args.lane)
    with Session.open(config) as session:
        session.selector.prepare(session.backend, args.fresh)
        if session.rank == 0:
            print("\n".join(report(session.selector, session.size, session.local_size, config)))
            if matrix is not None:
                names = session.selector.rules.candidates
                print("\n".join(lines_of(matrix, names, args.uplink, args.pbox_link)))
    return 0


def _words(args: argparse.Namespace) -> list[str]:
    """The command for the ranks of the job that we start."""
    words = ["explain", *(["--fresh"] if args.fresh else [])]
    for flag in ("backend", "lane", "links", "uplink", "pbox_link"):
        value = getattr(args, flag)
        words += [] if value is None else [f"--{flag.replace('_', '-')}", str(value)]
    return words


def report(selector: Selector, size: int, local_size: int, config: Config) -> Iterator[str]:
    """The lines to print."""
    table, rules = selector.table, selector.rules
    yield f"# {size} ranks, {local_size} on this host, lane {config.lane}"
    yield f"# PHUB_BACKEND={rules.text}"
    yield from _rules(selector)
    if not rules.uses_auto:
        return
    yield f"# predictions: {table.source}"
    if table.curves:
        yield ""
        yield from _parameters(table.curves)
        yield ""
        yield from _times(selector)
    yield ""
    for name, reason in table.reasons.items():
        yield f"not a candidate: {name}: {reason}"


def _rules(selector: Selector) -> Iterator[str]:
    """Which backend from which size on."""
    firsts = {0, *(first for first, _ in selector.table.rows)}
    for rule in selector.rules.rules:
        firsts |= {rule.begin, 0 if rule.end is None else rule.end}
    rows: list[tuple[int, str]] = []
    for first in sorted(firsts):
        if not rows or rows[-1][1] != selector.choose(first):
            rows.append((first, selector.choose(first)))
    ends = [*(first for first, _ in rows[1:]), None]
    yield f"{'from':>12} {'to below':>12}  backend"
    for (first, name), end in zip(rows, ends, strict=True):
        yield f"{size_text(first):>12} {size_text(end) if end else 'any':>12}  {name}"


def _parameters(curves: Mapping[str, Curve]) -> Iterator[str]:
    yield f"{'fitted to the probe':<20} {'latency/round':>14} {'bandwidth':>12}  measured"
    for name, curve in curves.items():
        bandwidth = curve.parameters.bandwidth
        flow = "-" if bandwidth == inf else f"{bandwidth / 1e9:.2f} GB/s"
        points = ", ".join(f"{size_text(n)} {time_text(s)}" for n, s in curve.points)
        yield f"{name:<20} {time_text(curve.parameters.latency):>14} {flow:>12}  {points}"


def _times(selector: Selector) -> Iterator[str]:
    """Predicted time of each candidate, at the probed sizes and between and above them."""
    curves = selector.table.curves
    yield f"{'predicted':>12}" + "".join(f"{name:>18}" for name in curves) + "  chosen"
    for nbytes in sorted({*SIZES, 25 << 20, 100 << 20}):
        times = "".join(f"{time_text(curve.seconds(nbytes)):>18}" for curve in curves.values())
        yield f"{size_text(nbytes):>12}{times}  {selector.choose(nbytes)}"
