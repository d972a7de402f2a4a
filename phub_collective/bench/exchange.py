"""`phub bench exchange`: backends exchange a model or plain sizes, with no computation between.

All backends run in the same worker processes, their iterations take turns, and every number of
every result is checked.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from phub_collective import backends
from phub_collective.backends.base import DType
from phub_collective.bench import driver, hugepages, report
from phub_collective.bench.plan import MODES, Plan, parse_bytes
from phub_collective.errors import ConfigError
from phub_collective.machine import find_mpirun
from phub_collective.models import model_names

DTYPES = [dtype.name.lower() for dtype in DType if dtype is not DType.BOOL]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `phub bench exchange`."""
    parser.add_argument("--workers", type=int, default=4, help="worker processes (default: 4)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="NAMES", help=f"among {', '.join(model_names())}")
    what.add_argument("--bytes", metavar="SIZES", help="plain sizes: 32KiB,1MiB,25MiB,...")
    parser.add_argument(
        "--backends", default="pbox,ring,halving_doubling,gloo,mpi", metavar="NAMES",
        help="backends to compare, or all (default: %(default)s); with mpi the workers start by "
        "mpirun",
    )  # fmt: skip
    parser.add_argument("--mode", choices=MODES, default="allreduce", help="default: allreduce")
    parser.add_argument("--lane", choices=("shm", "tcp"), default="shm", help="default: shm")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", metavar="TYPE",
                        help=f"element type: {', '.join(DTYPES)}")  # fmt: skip
    parser.add_argument("--iterations", type=int, default=0, help="timed ones; default: by size")
    parser.add_argument("--warmup", type=int, default=3, help="untimed ones (default: 3)")
    parser.add_argument("--per-key", action="store_true",
                        help="allreduce a model key by key, not as one tensor")  # fmt: skip
    parser.add_argument(
        "--overlap", choices=("yes", "no"), default="yes",
        help="registered exchanges: buckets in flight together, or the whole model at once",
    )  # fmt: skip
    parser.add_argument(
        "--compression", default="none", metavar="HOW",
        help="registered exchanges with fp16, bf16, two_bit[:THRESHOLD], one_bit or topk[:RATIO] "
        "(the last two are checked slowly); default: none",
    )  # fmt: skip
    add_environment_arguments(parser)


def add_environment_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every benchmark of exchanges has."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write header and rows there")
    parser.add_argument("--allow-hugepages", action="store_true",
                        help="as root: huge pages for shared memory during the run")  # fmt: skip
    parser.add_argument(
        "--reno-namespace", action="store_true",
        help="as root: run in a network namespace whose default congestion control is reno",
    )  # fmt: skip


def split(names: str) -> list[str]:
    """A comma-separated list."""
    return [name for name in names.split(",") if name]


def usable() -> list[str]:
    """All backends that can be measured here: mpi where mpirun can start the workers."""
    found = backends.available()
    if "mpi" in found and find_mpirun() and importlib.util.find_spec("mpi4py"):
        found["mpi"] = None
    return [name for name, reason in found.items() if reason is None]


def check_backends(names: list[str]) -> None:
    """Raise ConfigError for an unknown or a repeated name, or an empty list."""
    unknown = [name for name in names if name not in backends.names()]
    if unknown or not names or len(set(names)) < len(names):
        raise ConfigError(
            f"[bench] --backends {','.join(names)!r}: expected different names among "
            f"{', '.join(backends.names())}"
        )


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan that the flags ask for.

    Raises:
        ConfigError: unknown backends, or sizes that do not parse.
    """
    names = usable() if args.backends == "all" else split(args.backends)
    check_backends(names)
    sizes = split(args.model) if args.model else [str(parse_bytes(s)) for s in split(args.bytes)]
    return Plan(
        backends=names,
        mode=args.mode,
        lane=args.lane,
        workers=args.workers,
        models=bool(args.model),
        workloads=sizes,
        dtype=args.dtype,
        iterations=args.iterations,
        warmup=args.warmup,
        per_key=args.per_key,
        overlap=args.overlap == "yes",
        compression=args.compression,
    )


def progress(text: str) -> None:
    """Say on stderr what is measured now, so that stdout holds the table only."""
    print(f"... {text}", file=sys.stderr, flush=True)


def run(plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """Run a plan in the environment that the flags ask for; errors as in `driver.run`."""
    with hugepages.allowed() if args.allow_hugepages else nullcontext():
        return driver.run(plan, args.reno_namespace, progress)


def main(args: argparse.Namespace) -> int:
    """1 when a number was wrong, else 0.

    Raises:
        ConfigError: a flag is wrong.
        PhubError: a backend failed; the message names it, the rank and what it did.
    """
    results = run(plan_of(args), args)
    rows = results["rows"]
    print(*report.header_lines(results["header"], {row["mode"] for row in rows}), sep="\n")
    print(*report.row_lines(rows), sep="\n", flush=True)
    if args.json:
        report.write_json(args.json, results)
    wrong = sum(row["wrong"] for row in rows)
    print(f"# {'all elements right' if wrong == 0 else f'{wrong} elements WRONG'}")
    return 0 if wrong == 0 else 1
