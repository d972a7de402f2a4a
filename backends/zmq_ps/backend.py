"""The backend: servers found or started, operations on channels, exchanges of models.

Settings say where the servers run, which makes the paper's four deployments (section e):

    PHUB_ZMQ_SERVERS=sharded     one on every worker's host, started by its first rank (CS)
    PHUB_ZMQ_SERVERS=central     one on the host of rank 0, started by it (CC)
    PHUB_ZMQ_SERVERS=A:P,B:P     running ones, `phub serve-zmq` on hosts of their own (NCC, NCS)
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import zmq

from phub_collective.backends.agreement import Uses
from phub_collective.backends.base import Backend, Context, Exchange, ExchangeSpec
from phub_collective.backends.channels import BLAME_S, Channel, ChannelBackend
from phub_collective.backends.compression import NO_COMPRESSION
from phub_collective.backends.pbox.launch import LocalServer
from phub_collective.backends.pbox.protocol import error_message, new_token, raise_error
from phub_collective.backends.zmq_ps import sockets
from phub_collective.backends.zmq_ps.channel import ZmqChannel
from phub_collective.backends.zmq_ps.client import Client
from phub_collective.backends.zmq_ps.exchange import ZmqExchange
from phub_collective.backends.zmq_ps.launch import start_server
from phub_collective.backends.zmq_ps.limits import Limits
from phub_collective.backends.zmq_ps.link import Link, connect
from phub_collective.config import ZMQ_PLACES
from phub_collective.errors import (
    ConfigError,
    InternalError,
    MismatchError,
    PeerLost,
    PhubError,
)

MAX_CHANNELS = 1 << 16  # each is a number here, and two buffers on the servers


class ZmqBackend(ChannelBackend):
    """See `ChannelBackend`; a channel is a table on the servers.

    Attributes:
        server_pid: process of the server that this rank has started; None: of none.
    """

    name = "zmq_ps"
    max_channels = MAX_CHANNELS

    def __init__(
        self,
        context: Context,
        zmq_context: sockets.Context,
        links: Sequence[Link],
        server: LocalServer | None,
    ) -> None:
        """`links`: to all servers, in one order on all ranks; `server`: the one that is ours."""
        limits = Limits.of(context.size)
        self._piece_bytes, self._server = limits.piece, server
        self._tables = itertools.count()
        self.server_pid = None if server is None else server.process.pid
        self.client = Client(zmq_context, links, context.rank, limits.window, self._blame_for)
        try:
            super().__init__(context)
        except BaseException:
            self.disconnect(orderly=False)
            raise
        self.client.start()

    def open_channel(self, number: int) -> Channel:
        return ZmqChannel(self.client, self.context.rank, number, self._piece_bytes)

    def open_exchange(self, spec: ExchangeSpec) -> Exchange:
        if spec.place == "worker" and spec.compression != NO_COMPRESSION:
            return super().open_exchange(spec)  # a cast is an operation of 16 bits, by buckets
        table = next(self._tables)
        return ZmqExchange(self.context, self.client, self.waiter, spec, table, self._piece_bytes)

    def ended(self, error: PhubError, left: Sequence[Uses]) -> None:
        super().ended(error, left)
        if not left:  # a rank was lost
            self.client.fail(error)

    def blame(self, name: str, failure: Exception) -> PhubError:
        return failure if isinstance(failure, PhubError) else super().blame(name, failure)

    def _blame_for(self, lost: PeerLost) -> PhubError:
        """The error for a lost server: if it went with its rank, the job knows that soon."""
        with self.lock:
            self.lock.wait_for(lambda: self._ended is not None, BLAME_S)
            return self._ended or lost

    def disconnect(self, orderly: bool) -> None:
        self.client.close(ConfigError("[zmq_ps] this rank has left the job"))
        if self._server is not None:
            self._server.stop()


def create(context: Context) -> Backend:
    """Start the servers that this rank is to start, and connect to all. Collective.

    Raises:
        ConfigError: PHUB_ZMQ_SERVERS names servers and PHUB_TOKEN is empty.
        MismatchError: ranks have different PHUB_ZMQ_SERVERS.
        PeerLost, AuthError: a server cannot be reached, or is another job's.
    """
    server: LocalServer | None = None
    mine: dict[str, Any] = {"where": context.config.zmq_servers}
    try:
        server, mine["servers"] = _invite(context)
    except Exception as error:  # whatever it is, the others wait to be told
        mine = error_message(_typed(error, context.rank))
    try:
        servers = _agree(context, mine)
        zmq_context: sockets.Context = zmq.Context()
        links = _connect(zmq_context, servers, context)
    except BaseException:
        if server is not None:
            server.stop()
        raise
    return ZmqBackend(context, zmq_context, links, server)


def _typed(error: Exception, rank: int) -> PhubError:
    if isinstance(error, PhubError):
        return error
    return InternalError(f"[zmq_ps] rank {rank} could not start a server: {error!r}")


def _invite(context: Context) -> tuple[LocalServer | None, list[dict[str, Any]]]:
    """The server that this rank starts, and those that it tells the others of."""
    config = context.config
    if config.zmq_servers in ZMQ_PLACES:
        central = config.zmq_servers == "central"
        if (context.rank if central else context.local_rank) != 0:
            return None, []
        token = new_token()
        server = start_server(config, context.size, token, context.local_size == context.size)
        # Loopback is another host for others, where something else may listen.
        beyond = [one for one in server.addresses if not one.startswith("127.")]
        return server, [{"addresses": beyond or server.addresses, "token": token}]
    if context.rank != 0:
        return None, []
    if not config.token:
        raise ConfigError(
            f"[zmq_ps] PHUB_ZMQ_SERVERS={config.zmq_servers!r} needs the PHUB_TOKEN that these "
            "servers were started with"
        )
    named = config.zmq_servers.split(",")
    return None, [{"addresses": [one.strip()], "token": config.token} for one in named]


def _agree(context: Context, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """The servers of the job, in one order on all ranks."""
    timeout = context.config.start_timeout
    gathered = context.rendezvous.all_gather("zmq_ps.servers", json.dumps(mine).encode(), timeout)
    ranks = [json.loads(one) for one in gathered]
    for rank, said in enumerate(ranks):
        raise_error(said)
        if said["where"] != ranks[0]["where"]:
            raise MismatchError(
                f"[zmq_ps] PHUB_ZMQ_SERVERS differs: rank 0 has {ranks[0]['where']!r}, rank {rank} "
                f"has {said['where']!r}; set it alike on all ranks"
            )
    return [one for said in ranks for one in said["servers"]]


def _connect(
    zmq_context: sockets.Context, servers: Sequence[dict[str, Any]], context: Context
) -> list[Link]:
    links: list[Link] = []
    try:
        for one in servers:
            where, token, timeout = one["addresses"], one["token"], context.config.timeout
            links.append(connect(zmq_context, where, token, context.rank, timeout))
    except BaseException:
        for link in links:
            link.close(at_once=True)
        zmq_context.term()
        raise
    return links
