"""Jobs of the ZMQ baseline for tests: real servers and sockets, ranks as threads."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from phub_collective import backends
from phub_collective.backends.base import Context, Exchange, ExchangeSpec
from phub_collective.backends.zmq_ps.backend import ZmqBackend
from phub_collective.backends.zmq_ps.server import Server, ServerOptions

SOON = 30.0  # seconds, for what must happen
TOKEN = "a secret of the job"


def connected(context: Context, hosts: bool = False) -> ZmqBackend:
    """This rank's backend; `hosts`: as if each rank were on a host of its own."""
    if hosts:
        context = dataclasses.replace(context, local_rank=0, local_size=1)
    backend = backends.create("zmq_ps", context)
    assert isinstance(backend, ZmqBackend)
    return backend


@contextlib.contextmanager
def running(workers: int, used: bool = True, **options: Any) -> Iterator[Server]:
    """A server in this process, on a thread; it must end with its job, if it is `used`."""
    server = Server(ServerOptions(workers, TOKEN, **options))
    thread = threading.Thread(target=server.run, name="zmq server", daemon=True)
    thread.start()
    try:
        yield server
        if used:
            thread.join(SOON)
            assert not thread.is_alive(), "the server did not end with its job"
    finally:
        server.stop()
        thread.join(SOON)
        server.close()


def view(exchange: Exchange, key: int, spec: ExchangeSpec) -> np.ndarray:
    """A key's place in the arena, which is also that of its result."""
    begin, entry = exchange.offsets[key], spec.keys[key]
    flat = exchange.arena[begin : begin + entry.nbytes].view(entry.dtype.stored)
    return flat.reshape(entry.shape)
