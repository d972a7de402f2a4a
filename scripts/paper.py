#!/usr/bin/env python3
"""The paper's tables and figures, repeated in the rack lab, and the report on them.

    scripts/paper.py list
    sudo scripts/paper.py figure15
    sudo scripts/paper.py all
    scripts/paper.py report

Rows and plots go to results/ (--results DIR: elsewhere). What was measured before of the same code
is measured again, unless --resume is given.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import setup_first

setup_first.require("phub_collective", "matplotlib", "psutil", "torch")

from experiments import report
from experiments.base import Claim, Rows, Scale
from experiments.catalogue import EXPERIMENTS, WAITING
from experiments.runner import CellError, Runner
from experiments.store import Store
from lab import network

RESULTS = setup_first.ROOT / "results"
FAILED, CPU_BOUND = 1, 3  # exit codes
LAB_S = 8.0  # to make a lab and measure its links


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("what", nargs="+", help="list, report, all, or names of experiments")
    scale = made.add_mutually_exclusive_group()
    scale.add_argument("--quick", action="store_true", help="a part of each, with a few workers")
    scale.add_argument("--full", action="store_true", help="everything, however long it takes")
    made.add_argument("--resume", action="store_true", help="keep rows of the same code")
    made.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    return made


def estimate(names: Sequence[str], scale: Scale) -> float:
    """Seconds that experiments take; a cell that two of them share is measured once."""
    cells = {cell.key: cell for name in names for cell in EXPERIMENTS[name].cells(scale)}
    labs = {str(cell.shape) for cell in cells.values()}
    return sum(cell.seconds for cell in cells.values()) + LAB_S * len(labs)


def show_list(scale: Scale) -> int:
    print(f"{'name':<10} {'minutes':>7}  what it shows ({scale.value})")
    for name, experiment in EXPERIMENTS.items():
        minutes = estimate([name], scale) / 60 if experiment.cells(scale) else 0.0
        print(f"{name:<10} {minutes:>7.1f}  {experiment.title} [{experiment.kind}]")
    print(f"{'all':<10} {estimate(list(EXPERIMENTS), scale) / 60:>7.1f}  in one go")
    for one in WAITING:
        print(f"{one.name:<10} {'-':>7}  {one.title}: waits for {one.needs}")
    return 0


def measure(names: Sequence[str], scale: Scale, store: Store, resume: bool) -> int:
    """Measure experiments; FAILED if one failed, CPU_BOUND if the machine was a limit."""
    network.require_kernel()
    begin, failed, bound = time.monotonic(), [], 0

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begin:6.0f} s] {text}", flush=True)

    say(f"about {estimate(names, scale) / 60:.0f} minutes; congestion control {network.CONGESTION}")
    runner = Runner(store, say, resume)
    for name in names:
        cells = EXPERIMENTS[name].cells(scale)
        say(f"== {name}: {EXPERIMENTS[name].title} ({len(cells)} runs)")
        try:
            rows = runner.rows(name, cells)
        except (CellError, network.LabError) as error:
            say(f"{name} FAILED: {error}")
            failed.append(name)
            continue
        bound += sum(bool(row.get("cpu_bound")) for row in rows)
        for claim in EXPERIMENTS[name].findings(Rows(rows)).claims:
            say(line_of(claim))
    if bound:
        say(f"# cpu-bound: {bound} runs missed their floor while processors were short")
    if failed:
        say(f"failed: {', '.join(failed)}")
    return FAILED if failed else CPU_BOUND if bound else 0


def line_of(claim: Claim) -> str:
    return f"{ {True: 'yes ', False: 'NO  ', None: 'note'}[claim.holds] } {claim.text}"


def main() -> int:
    """1: something failed, or a name is wrong; 3: everything ran, some of it cpu-bound."""
    args = parser().parse_args()
    scale = Scale.QUICK if args.quick else Scale.FULL if args.full else Scale.USUAL
    if args.what == ["list"]:
        return show_list(scale)
    store = Store(args.results)
    names = list(EXPERIMENTS) if args.what == ["all"] else args.what
    try:
        if args.what != ["report"]:
            check_names(names)
            code = measure(names, scale, store, args.resume)
        else:
            code = 0
        report.write(store, args.results)
        print(f"report: {args.results / 'REPORT.md'}")
        return code
    except (ValueError, network.LabError) as error:
        print(f"paper: {error}", file=sys.stderr)
        return FAILED


def check_names(names: Sequence[str]) -> None:
    """Raise ValueError for what is no experiment that can be run."""
    waiting = {one.name: one.needs for one in WAITING}
    for name in names:
        if name in waiting:
            raise ValueError(f"{name} cannot be run yet: it waits for {waiting[name]}")
        if name not in EXPERIMENTS:
            known = ", ".join(EXPERIMENTS)
            raise ValueError(f"there is no experiment {name!r}; expected all, or some of {known}")


if __name__ == "__main__":
    sys.exit(main())
