"""`phub serve`: run a PBox until it is stopped."""

from __future__ import annotations

import argparse
import logging
import os
import selectors
import signal
import sys
import time

from phub_collective.backends.pbox.server import PBoxServer, ServerOptions
from phub_collective.config import Config
from phub_collective.machine import usable_cpus

LAST_WORDS_SECONDS = 2.0  # for errors of dying jobs to reach their workers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `phub serve`."""
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: loopback)"
    )
    parser.add_argument(
        "--interfaces", default="", help="several addresses A,B,... (instead of --host)"
    )
    parser.add_argument("--port", type=int, default=0, help="TCP port; 0: any free one, printed")
    parser.add_argument(
        "--cores", type=int, default=0, help="aggregator threads; 0: PHUB_PBOX_CORES"
    )
    parser.add_argument(
        "--lifeline",
        action="store_true",
        help="stop when standard input closes (its starter is gone)",
    )


def default_cores(config: Config) -> int:
    """PHUB_PBOX_CORES, or one core per usable CPU, at most 8."""
    return config.pbox_cores or min(8, usable_cpus())


def options_from(args: argparse.Namespace, config: Config) -> ServerOptions:
    """The options that flags and the settings make."""
    interfaces = [a.strip() for a in args.interfaces.split(",") if a.strip()] or [args.host]
    return ServerOptions(
        interfaces,
        args.port,
        args.cores or max(default_cores(config), len(interfaces)),
        config.admin_token,
        config.congestion,
        config.socket_buffer,
        max(1, int(config.timeout)),
        config.start_timeout,
        config.spin_us,
    )


def main(args: argparse.Namespace) -> int:
    """Serve until SIGTERM, SIGINT or, with --lifeline, the end of standard input."""
    config = Config.from_environment()
    logging.basicConfig(
        level=config.log_level.upper(), format="phub serve: %(message)s", stream=sys.stderr
    )
    options = options_from(args, config)
    server = PBoxServer(options)
    wake_read, wake_write = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(wake_write, b"x"))
    shown = ", ".join(f"{host}:{port}" for host, port in server.addresses)
    print(f"phub: serving on {shown} with {options.cores} cores", flush=True)
    told = _wait_for_the_end(wake_read, lifeline=args.lifeline)
    if not told:
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while server.jobs() and time.monotonic() < deadline:
            time.sleep(0.05)
    server.close()
    time.sleep(0.2 if server.jobs() else 0)  # the last error frames
    return 0


def _wait_for_the_end(wake: int, lifeline: bool) -> bool:
    """True when a signal told to end, False when who started this server is gone."""
    # Not select(): descriptors above 1023 are usual on a server.
    with selectors.DefaultSelector() as watched:
        watched.register(wake, selectors.EVENT_READ)
        if lifeline:
            watched.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while True:
            ready = [key.fd for key, _ in watched.select()]
            if wake in ready:
                return True
            if not os.read(sys.stdin.fileno(), 4096):
                return False
