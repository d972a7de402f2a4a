"""`phub probe`: measures the links between the hosts of a job and groups the hosts by them."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from phub_collective.errors import ConfigError
from phub_collective.launch.inner import run_as_job
from phub_collective.probing.measure import SECONDS, measure
from phub_collective.probing.report import lines_of
from phub_collective.rendezvous.identity import identify
from phub_collective.session import Session


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `phub probe`."""
    parser.add_argument(
        "-np", type=int, default=2, metavar="N",
        help="outside of a job: start so many ranks here, each taken for a host (2)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S",
        help="of sending, for each direction of a pair (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--alone", action="store_true",
        help="one pair at a time: what a pair gets when no other uses the links between racks",
    )  # fmt: skip
    parser.add_argument(
        "--per-rank", action="store_true", help="take every rank of the job for a host"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")


def main(args: argparse.Namespace) -> int:
    """In a job: take part and let rank 0 print. Outside of one: start a job that does so.

    Raises:
        ConfigError: a flag is wrong.
        PeerLost, PeerTimeout: another rank died or was silent.
    """
    if args.np < 1 or not args.seconds > 0:
        raise ConfigError(
            f"[probe] -np {args.np} --seconds {args.seconds:g}: expected at least 1 rank, and "
            "more than 0 seconds"
        )
    if identify(os.environ).launcher == "single":
        return run_as_job(_words(args), args.np)
    with Session.open() as session:
        matrix = measure(session.context, args.seconds, args.alone, args.per_rank)
        if session.rank == 0:
            print("\n".join(lines_of(matrix)))
            if args.json:
                args.json.write_text(json.dumps(matrix.to_json()), encoding="utf-8")
    return 0


def _words(args: argparse.Namespace) -> list[str]:
    """The command for the ranks of the job that we start."""
    words = ["probe", "--per-rank", "--seconds", str(args.seconds)]
    words += ["--alone"] if args.alone else []
    return words + (["--json", str(args.json)] if args.json else [])
