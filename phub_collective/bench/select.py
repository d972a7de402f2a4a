"""`phub bench select`: does `auto` choose well?

For every number of workers, lane and size, all backends are measured in turns, and the time of
the one that the selector chose is set against the best. The times of the others stand beside it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from phub_collective.bench import exchange, report
from phub_collective.bench.plan import Plan, parse_bytes
from phub_collective.errors import ConfigError
from phub_collective.sizes import size_text

WORKERS, LANES, SIZES = "2,4,8", "shm,tcp", "32KiB,1MiB,25MiB,100MiB"
QUICK_WORKERS, QUICK_SIZES, QUICK_ITERATIONS = "2,4", "32KiB,1MiB,25MiB", 15
# Small exchanges scatter more than any choice among good backends matters.
SMALL, SMALL_LIMIT, LARGE_LIMIT = 1 << 20, 2.0, 1.25
LEAST_SHARE = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `phub bench select`."""
    parser.add_argument("--workers", metavar="LIST", help=f"default: {WORKERS}")
    parser.add_argument("--bytes", metavar="SIZES", help=f"default: {SIZES}")
    parser.add_argument("--lanes", default=LANES, metavar="LIST", help="default: %(default)s")
    parser.add_argument(
        "--backends", default="pbox,ring,halving_doubling,mpi,gloo", metavar="NAMES",
        help="what is measured (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--iterations", type=int, default=0, help="timed ones; default: by size")
    parser.add_argument("--quick", action="store_true",
                        help="fewer workers, sizes and iterations")  # fmt: skip
    exchange.add_environment_arguments(parser)


def plans_of(args: argparse.Namespace) -> list[Plan]:
    """One run for each number of workers and lane.

    Raises:
        ConfigError: a list does not parse.
    """
    names = exchange.split(args.backends)
    exchange.check_backends(names)
    counts = args.workers or (QUICK_WORKERS if args.quick else WORKERS)
    sizes = args.bytes or (QUICK_SIZES if args.quick else SIZES)
    lanes = exchange.split(args.lanes)
    if not set(lanes) <= {"shm", "tcp"} or not counts.replace(",", "").isdecimal():
        raise ConfigError(
            f"[bench] --lanes {args.lanes!r} --workers {counts!r}: expected shm and tcp, and "
            "numbers of workers such as 2,4,8"
        )
    return [
        Plan(
            backends=names,
            mode="allreduce",
            lane=lane,
            workers=int(count),
            models=False,
            workloads=[str(parse_bytes(size)) for size in exchange.split(sizes)],
            iterations=args.iterations or (QUICK_ITERATIONS if args.quick else 0),
            registered=False,
            choose=True,
        )
        for count in exchange.split(counts)
        for lane in lanes
    ]


def cells(plan: Plan, results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The selector's choice and the best backend, for each size of one run."""
    found = []
    for size, chosen in results["header"]["choices"].items():
        nbytes = int(size)
        times = {
            row["backend"]: row["median_s"] for row in results["rows"] if row["bytes"] == nbytes
        }
        best = min(times, key=lambda name: times[name])
        limit = SMALL_LIMIT if nbytes <= SMALL else LARGE_LIMIT
        ratio = times[chosen] / times[best]
        found.append(
            {
                "workers": plan.workers,
                "lane": plan.lane,
                "bytes": nbytes,
                "chosen": chosen,
                "best": best,
                "ratio": ratio,
                "limit": limit,
                "within": ratio <= limit,
                "median_s": times,
            }
        )
    return found


def lines_of(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """A title and one aligned line per cell; times in milliseconds."""
    names = list(found[0]["median_s"])
    titles = ("lane", "chosen", "best", "workers", "size", "ratio", "limit", "within", *names)
    return report.table(
        [
            titles,
            *(
                (
                    cell["lane"],
                    cell["chosen"],
                    cell["best"],
                    str(cell["workers"]),
                    size_text(cell["bytes"]),
                    f"{cell['ratio']:.2f}",
                    f"{cell['limit']:.2f}",
                    "yes" if cell["within"] else "NO",
                    *(report.number(cell["median_s"][name], 1e3) for name in names),
                )
                for cell in found
            ),
        ],
        text_columns=3,
    )


def main(args: argparse.Namespace) -> int:
    """1 when too few choices were good or a number was wrong, else 0.

    Raises:
        ConfigError: a flag is wrong.
        PhubError: a backend failed.
    """
    found: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    header: dict[str, Any] = {}
    for plan in plans_of(args):
        exchange.progress(f"{plan.workers} workers, lane {plan.lane}")
        results = exchange.run(plan, args)
        found += cells(plan, results)
        exchange.progress("\n".join(["so far:", *lines_of(found)]))
        rows += results["rows"]
        header = {k: v for k, v in results["header"].items() if k not in ("lane", "choices")}
    share = sum(cell["within"] for cell in found) / len(found)
    chosen = sorted({cell["chosen"] for cell in found})
    wrong = sum(row["wrong"] for row in rows)
    header |= {"within": share, "chosen": chosen, "wrong": wrong}
    print(*(f"# {name}: {report.number(value)}" for name, value in header.items()), sep="\n")
    print(*lines_of(found), sep="\n")
    print(
        f"# {share:.0%} of {len(found)} choices within {SMALL_LIMIT:g}x (to "
        f"{size_text(SMALL)}) or {LARGE_LIMIT:g}x of the best, expected {LEAST_SHARE:.0%}; "
        f"{len(chosen)} of {len(exchange.split(args.backends))} backends chosen; {wrong} wrong"
    )
    if args.json:
        report.write_json(args.json, {"header": header, "rows": found, "measurements": rows})
    return 0 if share >= LEAST_SHARE and wrong == 0 else 1
