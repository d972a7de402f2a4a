"""`phub serve-zmq`: run one server of the zmq_ps baseline for one job."""

from __future__ import annotations

import argparse
import logging
import sys

from phub_collective.backends import unavailable_reason
from phub_collective.backends.pbox.serve import default_cores
from phub_collective.config import Config
from phub_collective.errors import BackendUnavailable, ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `phub serve-zmq`."""
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: loopback)"
    )
    parser.add_argument("--port", type=int, default=0, help="TCP port; 0: any free one, printed")
    parser.add_argument("--workers", type=int, required=True, help="workers of the job")
    parser.add_argument(
        "--threads", type=int, default=0, help="of the aggregation; 0: PHUB_PBOX_CORES"
    )
    parser.add_argument(
        "--lifeline",
        action="store_true",
        help="stop when standard input closes (its starter is gone)",
    )


def main(args: argparse.Namespace) -> int:
    """Serve one job, whose workers know PHUB_TOKEN, until they have left or, with --lifeline,
    standard input ends.

    Raises:
        BackendUnavailable: pyzmq or the native core is missing.
        ConfigError: a flag is wrong, PHUB_TOKEN is empty, or the address cannot be listened on.
    """
    config = Config.from_environment()
    logging.basicConfig(
        level=config.log_level.upper(), format="phub serve-zmq: %(message)s", stream=sys.stderr
    )
    reason = unavailable_reason("zmq_ps")
    if reason is not None:
        raise BackendUnavailable(f"[zmq_ps] {reason}")
    if args.workers < 1 or args.threads < 0:
        raise ConfigError(
            f"[zmq_ps] --workers {args.workers} --threads {args.threads}: expected at least 1 and 0"
        )
    if not config.token:
        raise ConfigError("[zmq_ps] set PHUB_TOKEN, here and for the workers, to the same secret")
    from phub_collective.backends.zmq_ps.server import Server, ServerOptions

    threads = args.threads or default_cores(config)
    options = ServerOptions(
        args.workers, config.token, args.host, args.port, threads, config.timeout
    )
    server = Server(options)
    print(f"phub: serving on {server.address} with {threads} threads", flush=True)
    server.run(sys.stdin.fileno() if args.lifeline else None)
    server.close()
    return 0
