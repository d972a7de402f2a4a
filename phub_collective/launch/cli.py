"""The command `phubrun`: flags as horovodrun has them, where they have a meaning here."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence

import phub_collective
from phub_collective.config import Config
from phub_collective.errors import ConfigError, PhubError
from phub_collective.launch import check_build, delegate, local, supervisor
from phub_collective.rendezvous.identity import LAUNCH_VARIABLES

# Flags that set a variable for the workers.
SETTINGS = {
    "backend": "PHUB_BACKEND",
    "pbox": "PHUB_PBOX",
    "pbox_cores": "PHUB_PBOX_CORES",
    "lane": "PHUB_LANE",
    "timeout": "PHUB_TIMEOUT",
    "start_timeout": "PHUB_START_TIMEOUT",
    "log_level": "PHUB_LOG_LEVEL",
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="phubrun",
        description="Start N processes of one training job here, or by mpirun on several hosts.",
        allow_abbrev=False,
    )
    made.add_argument("-v", "--version", action="version", version=phub_collective.__version__)
    made.add_argument("-np", "-n", "--num-proc", type=int, metavar="N", help="number of processes")
    made.add_argument(
        "-cb", "--check-build", action="store_true", help="print what is available here and exit"
    )
    made.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="default: this host")
    made.add_argument(
        "--agent",
        metavar="'WORDS'",
        help="with -H: start each rank from here by WORDS HOST COMMAND, in place of mpirun: "
        "'ip netns exec', say. It must hand on the environment",
    )
    made.add_argument("--backend", metavar="B", help="auto, NAME, ^NAME,... or rules by size")
    pbox = made.add_mutually_exclusive_group()
    pbox.add_argument(
        "--pbox", metavar="HOST:PORT,...", help="use this running PBox, or these shards of one"
    )
    pbox.add_argument("--pbox-cores", type=int, metavar="K", help="start PBoxes with K cores")
    made.add_argument("--lane", choices=["auto", "shm", "tcp"], help="transport of the data")
    made.add_argument(
        "--timeout", type=float, metavar="S", help="seconds of silence until a peer counts as lost"
    )
    made.add_argument(
        "--start-timeout", type=float, metavar="S", help="seconds until all ranks must be up"
    )
    made.add_argument(
        "--grace",
        type=float,
        default=supervisor.GRACE_S,
        metavar="S",
        help="seconds for ranks to end after a failure, and again until they are killed",
    )
    made.add_argument(
        "--output-filename", metavar="DIR", help="copy output to DIR/rank.N/stdout and stderr"
    )
    made.add_argument(
        "-prefix-timestamp",
        "--prefix-output-with-timestamp",
        action="store_true",
        help="put the time in front of each line of output",
    )
    made.add_argument("--log-level", choices=["debug", "info", "warning", "error"])
    made.add_argument("--verbose", action="store_true", help="say what is started and what ends")
    made.add_argument("command", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run `phubrun`; its exit code is that of `local.run`, 1 for an error that has a message."""
    args = parser().parse_args(argv)
    if args.check_build:
        print(check_build.report())
        return 0
    try:
        return _launch(args)
    except PhubError as error:
        print(f"phubrun: {error}", file=sys.stderr)
        return 1


def _launch(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("[launch] expected a command: phubrun -np N python train.py")
    where = delegate.parse_hosts(args.hosts) if args.hosts else None
    size = args.num_proc if args.num_proc is not None else sum((where or {}).values())
    if size < 1:
        raise ConfigError("[launch] expected -np N with N >= 1, or -H HOST:SLOTS,...")
    if where is not None and size > sum(where.values()):
        raise ConfigError(f"[launch] -np {size} is more than the slots of -H {args.hosts}")
    settings = {
        variable: str(getattr(args, flag))
        for flag, variable in SETTINGS.items()
        if getattr(args, flag) is not None
    }
    if args.verbose and "PHUB_LOG_LEVEL" not in os.environ:
        settings.setdefault("PHUB_LOG_LEVEL", "info")
    config = Config.from_environment({**os.environ, **settings})  # a wrong one is told here, once
    check_backend(config.backend)
    if args.agent and where is None:
        raise ConfigError("[launch] --agent needs -H HOST:SLOTS,...: the hosts to start ranks on")
    if not args.agent and where is not None and not all(map(delegate.is_here, where)):
        return _delegate(args, where, size, settings, command)
    slots = [host for host, count in (where or {}).items() for _ in range(count)]
    return local.run(
        local.Job(
            command,
            size,
            settings,
            args.output_filename or "",
            args.prefix_output_with_timestamp,
            args.grace,
            args.verbose,
            tuple(slots[:size]) if args.agent else (),
            tuple(shlex.split(args.agent or "")),
        )
    )


def check_backend(text: str) -> None:
    """Raises ConfigError for what PHUB_BACKEND cannot mean: here once, not on every rank."""
    from phub_collective import backends  # needs NumPy, which phubrun --help does not
    from phub_collective.selection import rules

    rules.parse(text, backends.names())


def _delegate(
    args: argparse.Namespace,
    where: dict[str, int],
    size: int,
    settings: dict[str, str],
    command: list[str],
) -> int:
    """Become the mpirun that starts the job on several hosts."""
    if args.output_filename or args.prefix_output_with_timestamp:
        raise ConfigError(
            "[launch] --output-filename and --prefix-output-with-timestamp work on one host; on "
            "several, mpirun writes the output: give its own flags to it"
        )
    inherited = {k: v for k, v in os.environ.items() if k not in LAUNCH_VARIABLES}
    environment = {**inherited, **settings}
    words = delegate.mpirun_command(delegate.require_mpirun(), where, size, environment, command)
    if args.verbose:
        print(f"phubrun: {' '.join(words)}", file=sys.stderr, flush=True)
    os.execvpe(words[0], words, environment)


if __name__ == "__main__":
    sys.exit(main())
