#!/usr/bin/env python3
"""One machine plays a rack: workers and PBoxes in network namespaces, with shaped links.

    sudo scripts/rack.py run --workers 8 --link 10gbit --pbox-links 10 --dilation 20 -- COMMAND

starts COMMAND on every worker through phubrun, with a PBox on its own host, and prints what the
links and the processors did. Rates are those of the rack that is played; links run `dilation` times
slower, and so must everything else for which COMMAND is told PHUB_LAB_DILATION.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import setup_first

setup_first.require("phub_collective", "numpy")

from lab import check, network, start, topology

UNITS = {"": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
CPU_BOUND = 3  # exit code


def rate(text: str) -> float:
    """ "10gbit" as bits per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit|)", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a rate such as 10gbit or 500mbit")
    return float(match[1]) * UNITS[match[2]]


def pair(text: str) -> tuple[tuple[int, int], float]:
    """ "0-3=4.7gbit": the rate from rank 0 to rank 3."""
    match = re.fullmatch(r"(\d+)-(\d+)=(\S+)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected FROM-TO=RATE, such as 0-3=4.7gbit")
    return (int(match[1]), int(match[2])), rate(match[3])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    commands = made.add_subparsers(dest="command", required=True)
    shape = argparse.ArgumentParser(add_help=False)
    shape.add_argument("--workers", type=int, default=8, metavar="N", help="default: %(default)s")
    shape.add_argument("--racks", type=int, default=1, metavar="R", help="default: %(default)s")
    shape.add_argument("--link", type=rate, default=10e9, metavar="RATE", help="default: 10gbit")
    shape.add_argument("--pbox-links", type=int, default=1, metavar="I",
                       help="of each rack's PBox; 0: no PBox (default: %(default)s)")  # fmt: skip
    shape.add_argument("--core", type=rate, default=0.0, metavar="RATE",
                       help="between racks (default: as --link)")  # fmt: skip
    shape.add_argument("--pair", type=pair, action="append", default=[], metavar="A-B=RATE",
                       help="a rate from rank A to rank B of its own; again for more")  # fmt: skip
    shape.add_argument("--dilation", type=float, default=1.0, metavar="D", help="default: 1")
    up = commands.add_parser("up", parents=[shape], help="make a lab and leave it")
    up.add_argument("--name", default="rack", help="default: %(default)s")
    down = commands.add_parser("down", help="remove a lab, its processes, and abandoned labs")
    down.add_argument("--name", default="rack", help="default: %(default)s")
    commands.add_parser("status", help="what labs there are")
    run = commands.add_parser("run", parents=[shape], help="make a lab, run a command, remove it")
    run.add_argument("--pbox-cores", type=int, default=0, metavar="K", help="default: by links")
    run.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    return made


def shape_of(args: argparse.Namespace) -> topology.Shape:
    return topology.Shape(
        args.workers,
        args.racks,
        args.link,
        args.pbox_links,
        args.core,
        args.dilation,
        dict(args.pair),
    )


def up(args: argparse.Namespace) -> int:
    made = topology.network_of(shape_of(args))
    network.build(args.name, made)
    for host in made.hosts:
        print(f"{network.namespace(args.name, host.name)}  {' '.join(host.addresses)}")
    return 0


def down(args: argparse.Namespace) -> int:
    abandoned = network.remove_abandoned()
    network.remove(args.name)
    print(f"# removed: {', '.join([args.name, *abandoned])}")
    return 0


def status(_: argparse.Namespace) -> int:
    for lab in network.labs():
        hosts = len(network.namespaces(lab))
        print(f"{lab}: {hosts} namespaces, {len(network.processes(lab))} processes")
    return 0


def run(args: argparse.Namespace) -> int:
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise ValueError("expected a command: rack.py run ... -- python train.py")
    shape = shape_of(args)
    made = topology.network_of(shape)
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(network.temporary(made))
        print(f"# {args.workers} workers in {args.racks} racks, PBox links: {args.pbox_links}")
        print(f"# link {shape.link / 1e9:g} Gbit/s, dilation {shape.dilation:g}")
        print(f"# congestion control: {network.CONGESTION}, for all")
        print(*(f"# {line}" for line in check.links(lab, made)), sep="\n", flush=True)
        pbox = stack.enter_context(start.pbox(lab, made, args.pbox_cores))
        before = check.sample(lab, made)
        code = start.phubrun(lab, made, words, start.variables(shape, pbox)).wait()
        used = check.use(made, before, check.sample(lab, made))
    print(f"# {used}")
    return code or (CPU_BOUND if used.cpu_bound else 0)


def main() -> int:
    """Run the command line; 1 for an error that has a message, 3 for a run that was cpu-bound."""
    args = parser().parse_args()
    try:
        network.require_kernel()
        return {"up": up, "down": down, "status": status, "run": run}[args.command](args)
    except (network.LabError, ValueError) as error:
        print(f"rack: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
