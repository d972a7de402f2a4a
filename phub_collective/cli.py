"""The command line `phub`: one table of subcommands, each imported only when it is called."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import phub_collective
from phub_collective.config import Config
from phub_collective.errors import PhubError
from phub_collective.rendezvous.identity import LAUNCH_VARIABLES


@dataclass(frozen=True)
class Command:
    """A subcommand: the module that has it, and the names of its two functions there,
    `add_arguments(parser)` and `main(args) -> exit code`."""

    summary: str
    module: str
    add_arguments: str = "add_arguments"
    main: str = "main"


COMMANDS = {
    "serve": Command("run a PBox until it is stopped", "phub_collective.backends.pbox.serve"),
    "serve-zmq": Command(
        "run a server of the zmq_ps baseline for one job",
        "phub_collective.backends.zmq_ps.serve",
    ),
    "bench exchange": Command(
        "time the exchange of a model over several backends", "phub_collective.bench.exchange"
    ),
    "bench kernels": Command(
        "time aggregation and optimizer beside memory bandwidth", "phub_collective.bench.kernels"
    ),
    "bench select": Command(
        "compare the selector's choices with measured times", "phub_collective.bench.select"
    ),
    "plan bandwidth": Command(
        "print the bandwidth that parameter servers need",
        "phub_collective.planning.cli",
        "add_bandwidth_arguments",
        "bandwidth_main",
    ),
    "plan cost": Command(
        "print the throughput that 1000 dollars buy",
        "phub_collective.planning.cli",
        "add_cost_arguments",
        "cost_main",
    ),
    "plan scale": Command(
        "print how many workers a PBox can serve",
        "phub_collective.planning.cli",
        "add_scale_arguments",
        "scale_main",
    ),
    "probe": Command(
        "measure the links between the hosts of a job, and group the hosts",
        "phub_collective.probing.command",
    ),
    "explain": Command(
        "print which backend would be selected, and why", "phub_collective.selection.explain"
    ),
    "config": Command(
        "print every setting", "phub_collective.cli", "add_config_arguments", "config_main"
    ),
    "doctor": Command("check this machine and installation", "phub_collective.doctor"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `phub`; the exit code: 0, 1 for an error that has a message, 2 for wrong usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = command_in(words)
    if name is None:
        return _no_command(words)
    command = COMMANDS[name]
    args = parser_of(name).parse_args(words[len(name.split()) :])
    try:
        return int(getattr(importlib.import_module(command.module), command.main)(args))
    except PhubError as error:
        print(f"phub {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def command_in(words: Sequence[str]) -> str | None:
    """The command that `words` begin with; None when there is none."""
    return next((n for n in COMMANDS if list(words[: len(n.split())]) == n.split()), None)


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of a command's arguments."""
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"phub {name}", description=f"{command.summary}.")
    getattr(importlib.import_module(command.module), command.add_arguments)(parser)
    return parser


def _no_command(words: list[str]) -> int:
    if words in (["--version"], ["-v"]):
        print(f"phub {phub_collective.__version__}")
        return 0
    lines = [f"  {name:<15} {command.summary}" for name, command in COMMANDS.items()]
    usage = "\n".join(["usage: phub COMMAND [ARGUMENTS] | --version | --help", "", *lines])
    if words in ([], ["--help"], ["-h"]):
        print(f"{usage}\n\nphub COMMAND --help tells a command's arguments.")
        return 0 if words else 2
    print(f"{usage}\n\nphub: unknown command {' '.join(words[:2])!r}", file=sys.stderr)
    return 2


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """`phub config` takes none."""


def config_main(args: argparse.Namespace) -> int:
    """Print variable, value and default, and meaning of every setting.

    Raises:
        ConfigError: a PHUB_* variable has a wrong value.
    """
    config = Config.from_environment()
    for field in dataclasses.fields(Config):
        value, variable = getattr(config, field.name), field.metadata["variable"]
        origin = "set" if os.environ.get(variable) else "default"
        shown = "(not shown)" if "token" in field.name and value else value
        print(f"{variable}={shown}  ({origin}; default {field.default!r})")
        print(f"    {field.metadata['meaning']}")
    print("\nSet by phubrun for each worker:")
    for variable, meaning in LAUNCH_VARIABLES.items():
        print(f"{variable:<16} {meaning}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
