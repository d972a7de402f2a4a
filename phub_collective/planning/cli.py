"""`phub plan bandwidth`, `phub plan cost`, `phub plan scale`: the arithmetic of this package, shown
as `phub bench` shows measurements."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phub_collective.bench import report
from phub_collective.errors import ConfigError
from phub_collective.models import model_keys, model_names
from phub_collective.planning import bandwidth, cost, scale
from phub_collective.planning.prices import Prices, example_text
from phub_collective.sizes import parse_size

SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}

BANDWIDTH_NOTES = (
    "need: of a machine with a server, so that workers never wait for it, if computing hides all "
    "communication and serving costs nothing",
    "Gb/s: of 2^30 bits, as in the paper's Table 2; GB/s: of 10^9 bytes; both directions together",
    "each way: Gbit/s of 10^9 bits in one direction, as links are sold",
)
COST_NOTES = (
    "$: one worker with its share of the network, and of its PBox; capital cost only",
    "samples/s: of one worker, with a PBox less its overhead",
    "per $1000: samples/s for 1000 dollars",
    "gain: in throughput for a dollar, over the baseline: sharded servers, full bisection",
)
SCALE_NOTES = ("workers: at which the limit is reached, when needs grow with the workers",)


def add_bandwidth_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `phub plan bandwidth`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="NAME", help=f"one of {', '.join(model_names())}")
    what.add_argument("--bytes", metavar="SIZE", help="of a model of yours: 4096, 97.5MiB, ...")
    parser.add_argument("--workers", type=int, required=True, metavar="N",
                        help="that train the model together")  # fmt: skip
    parser.add_argument("--batch-time", required=True, metavar="TIME",
                        help="that a worker computes for a batch: 0.0172, 17.2ms, ...")  # fmt: skip
    _add_json(parser)


def bandwidth_main(args: argparse.Namespace) -> int:
    """Print what each deployment of servers needs.

    Raises:
        ConfigError: a flag is wrong.
    """
    nbytes, batch_s = _model_bytes(args), _seconds(args.batch_time)
    rows: list[dict[str, Any]] = []
    for name, deployment in bandwidth.DEPLOYMENTS.items():
        need = bandwidth.need(name, nbytes, args.workers, batch_s)
        rows.append(
            {
                "deployment": name,
                "servers": deployment.servers,
                "formula": deployment.formula,
                "paper_Gbps": bandwidth.gbit(need),
                "GBps": need / 1e9,
                "each_way_Gbps": need * 8 / 2 / 1e9,
            }
        )
    header = {
        "model": args.model or "-",
        "bytes": nbytes,
        "workers": args.workers,
        "batch_s": batch_s,
    }
    titles = ("deployment", "servers", "need", "Gb/s", "GB/s", "each way")
    cells = [
        (row["deployment"], row["servers"], row["formula"], f"{row['paper_Gbps']:.0f}",
         report.number(row["GBps"]), report.number(row["each_way_Gbps"]))
        for row in rows
    ]  # fmt: skip
    _show(args.json, header, BANDWIDTH_NOTES, [titles, *cells], 3, rows)
    return 0


def add_cost_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `phub plan cost`."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, metavar="FILE", help="prices and rates, in TOML")
    what.add_argument("--example", action="store_true",
                      help="print such a file to start from; its values are ours")  # fmt: skip
    _add_json(parser)


def cost_main(args: argparse.Namespace) -> int:
    """Print what 1000 dollars buy with each kind of worker, or the example.

    Raises:
        ConfigError: the file is wrong; the message names the key.
    """
    if args.example:
        if args.json:
            raise ConfigError("[plan] --json: expected with --config, which computes something")
        print(example_text(), end="")
        return 0
    prices = Prices.load(args.config)
    rows = [row for worker in prices.workers for row in _cost_rows(prices, worker)]
    titles = ("workers", "network", "workers/PBox", "$", "samples/s", "per $1000", "gain")
    cells = [
        (row["workers"], f"{row['network']}, {row['oversubscription']}:1",
         report.number(row["workers_per_pbox"]), f"{row['dollars']:.0f}",
         report.number(row["samples_per_s"]), f"{row['per_1000_dollars']:.1f}",
         "-" if row["gain"] is None else f"{row['gain']:+.1%}")
        for row in rows
    ]  # fmt: skip
    _show(args.json, {"prices": str(args.config)}, COST_NOTES, [titles, *cells], 2, rows)
    return 0


def _cost_rows(prices: Prices, worker: str) -> list[dict[str, Any]]:
    """The baseline, and a PBox at each oversubscription, for one kind of worker."""

    def row(network: str, over: int, shared_by: int | None, what: cost.Cost) -> dict[str, Any]:
        return {
            "workers": worker,
            "network": network,
            "oversubscription": over,
            "workers_per_pbox": shared_by,
            "dollars": what.dollars,
            "samples_per_s": what.samples_per_s,
            "per_1000_dollars": what.per_1000_dollars,
            "gain": None if shared_by is None else cost.gain(prices, worker, over),
        }

    return [
        row("baseline", 1, None, cost.baseline(prices, worker)),
        *(
            row(
                "pbox",
                over,
                cost.workers_per_pbox(prices, over),
                cost.with_pbox(prices, worker, over),
            )
            for over in cost.OVERSUBSCRIPTION
        ),
    ]


def add_scale_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `phub plan scale`; their defaults are the paper's (section 4.7)."""
    parser.description = (
        f"{parser.description} The defaults are the paper's: ResNet 50 on its PBox, where 90 GB/s "
        "can pass between interfaces and memory."
    )
    for flag, default, meaning in (
        ("--memory", 6.0, "of memory bandwidth that the measured workers needed"),
        ("--network", 4.0, "of the PBox's interfaces that they needed, counted as its limit is"),
        ("--memory-limit", 90.0, "of memory bandwidth that there are"),
        ("--network-limit", 140.0, "of all interfaces together, both directions"),
    ):
        parser.add_argument(flag, type=float, default=default, metavar="GB/s",
                            help=f"{meaning} (default: %(default)g)")  # fmt: skip
    parser.add_argument("--workers", type=int, default=8, metavar="N",
                        help="how many workers were measured (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--memory-factor", type=float, default=1.0, metavar="X",
        help="a platform with X times the memory limit (the paper expects 1.4 of Epyc)",
    )  # fmt: skip
    _add_json(parser)


def scale_main(args: argparse.Namespace) -> int:
    """Print how many workers each limit allows, and which limit binds.

    Raises:
        ConfigError: a number is not above 0.
    """
    resources = (
        scale.Resource("memory", args.memory, args.memory_limit * args.memory_factor),
        scale.Resource("network", args.network, args.network_limit),
    )
    first = scale.binding(resources, args.workers)
    rows: list[dict[str, Any]] = [
        {
            "resource": resource.name,
            "need_GBps": resource.need,
            "limit_GBps": resource.limit,
            "workers": resource.most_workers(args.workers),
            "binds": resource is first,
        }
        for resource in resources
    ]
    titles = ("limit", "need GB/s", "limit GB/s", "workers", "binds")
    cells = [
        (row["resource"], f"{row['need_GBps']:g}", f"{row['limit_GBps']:g}", str(row["workers"]),
         "yes" if row["binds"] else "no")
        for row in rows
    ]  # fmt: skip
    header = {"measured_workers": args.workers}
    _show(args.json, header, SCALE_NOTES, [titles, *cells], 1, rows)
    print(f"# up to {first.most_workers(args.workers)} workers; {first.name} is the limit")
    return 0


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write header and rows there")


def _show(
    path: Path | None,
    header: Mapping[str, Any],
    notes: Sequence[str],
    table: Sequence[Sequence[str]],
    text_columns: int,
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Print `#` lines and the aligned table; write the same to a file where one is asked for."""
    facts = (f"{value:g}" if isinstance(value, float) else str(value) for value in header.values())
    print(*(f"# {name}: {fact}" for name, fact in zip(header, facts, strict=True)), sep="\n")
    print(*(f"# {note}" for note in notes), *report.table(table, text_columns), sep="\n")
    if path:
        report.write_json(path, {"header": header, "rows": rows})


def _model_bytes(args: argparse.Namespace) -> int:
    """Bytes of the model that the flags name, in float32."""
    if args.model:
        return sum(key.nbytes for key in model_keys(args.model))
    try:
        return parse_size(args.bytes)
    except ValueError as error:
        raise ConfigError(f"[plan] --bytes: {error}; expected 4096, 97.5MiB, ...") from None


def _seconds(text: str) -> float:
    """Seconds of "17.2ms", "0.0172s" or "0.0172"."""
    unit = next((unit for unit in SECONDS if text.endswith(unit)), "")
    try:
        return float(text.removesuffix(unit)) * SECONDS.get(unit, 1.0)
    except ValueError:
        raise ConfigError(
            f"[plan] --batch-time {text!r}: expected seconds, or a time such as 17.2ms"
        ) from None
