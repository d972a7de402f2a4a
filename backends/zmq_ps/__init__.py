"""MXNet's parameter server over ZMQ, as the paper compared with it: a baseline.

Stock ps-lite moves whole keys of up to 4 MiB over TCP by ZMQ, through one queue and one dispatcher
in each server, whose threads all add to one array at a time ("wide" aggregation). The server here
does the same, in Python around the kernels that the PBox uses too.
"""

from __future__ import annotations

import importlib.util

from phub_collective.backends.base import Backend, Context
from phub_collective.backends.native import unavailable_reason

RUNS_OPTIMIZER = True


def is_available() -> str | None:
    """None, or why not."""
    if importlib.util.find_spec("zmq") is None:
        return "pyzmq is not installed: pip install 'phub-collective[zmq]'"
    return unavailable_reason()  # the arithmetic is that of the native kernels


def create(context: Context) -> Backend:
    """Start or find the servers, and connect to all of them (see backend.create). Collective."""
    from phub_collective.backends.zmq_ps import backend

    return backend.create(context)
