"""Where the PBoxes of a job run, and how its ranks find them.

The paper's four deployments are one server in different places:

    NCC  one PBox on a machine of its own           pbox, PHUB_PBOX=HOST:PORT
    NCS  shards on machines of their own            pbox, PHUB_PBOX=HOST:PORT,HOST:PORT,...
    CC   one PBox on a worker's machine             pbox; rank 0 starts it
    CS   a shard on every worker's machine, PShard  pshard; the first rank of each host starts one
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field

from phub_collective.backends.base import Context
from phub_collective.backends.pbox.backend import PboxBackend
from phub_collective.backends.pbox.connection import Connection
from phub_collective.backends.pbox.handshake import Invitation, create_job, invitations
from phub_collective.backends.pbox.launch import LocalServer, start_server
from phub_collective.backends.pbox.protocol import error_message, new_token, raise_error
from phub_collective.backends.pbox.quota import JobSpec
from phub_collective.backends.pbox.service import create_service
from phub_collective.config import Config
from phub_collective.errors import ConfigError, InternalError, PhubError


@dataclass
class Share:
    """What one rank brings to the job: the next shards of it, and the server it has started."""

    invitations: list[Invitation] = field(default_factory=list)
    server: LocalServer | None = None

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()


Deployment = Callable[[Context], Share]


def connect(context: Context, name: str, deployment: Deployment) -> PboxBackend:
    """Bring this rank's share, learn of all others', and connect to all shards. Collective.

    Args:
        name: of the backend.

    Raises:
        PhubError: what kept a rank from bringing its share, on all ranks; or see `Connection`.
    """
    share = Share()
    message: dict[str, object]
    try:
        share = deployment(context)
        message = {"shards": [dataclasses.asdict(one) for one in share.invitations]}
    except Exception as error:  # whatever it is, the others wait to be told
        message = error_message(_typed(error, context.rank))
    try:
        told = context.rendezvous.all_gather(name, json.dumps(message).encode())
        shards: list[Invitation] = []
        for one in map(json.loads, told):
            raise_error(one)
            shards += [Invitation(**fields) for fields in one["shards"]]
        connection = Connection(shards, context.rank, context.config)
    except BaseException:
        share.stop()
        raise
    return PboxBackend(name, context, connection, share.server)


def _typed(error: Exception, rank: int) -> PhubError:
    if isinstance(error, PhubError):
        return error
    return InternalError(f"[pbox] rank {rank} could not bring the others to a PBox: {error!r}")


def central(context: Context) -> Share:
    """Rank 0 brings all: what PHUB_PBOX names, or one PBox that it starts."""
    config = context.config
    if context.rank != 0:
        return Share()
    if config.token:
        if not (config.pbox and config.job):
            raise ConfigError("[pbox] PHUB_TOKEN needs PHUB_PBOX and PHUB_JOB too")
        return Share(invitations(config.pbox, config.job, config.token))
    if not config.pbox:
        return _start(context, config)
    job = _job(config)
    size, admin_token = context.size, config.admin_token
    tokens = create_service(config.pbox, job, size, config.chunk_bytes, admin_token)
    return Share(invitations(config.pbox, job, tokens))


def a_shard_on_every_host(context: Context) -> Share:
    """The first rank of each host (PHUB_SHARDS=rank: every rank) brings a shard that it starts. By
    default it has one core, since it shares the host with workers."""
    config = context.config
    starts = config.shards == "rank" or context.local_rank == 0
    ranks = context.rendezvous.all_gather("pshard.shards", b"1" if starts else b"")
    if not starts:
        return Share()
    config = dataclasses.replace(config, pbox_cores=config.pbox_cores or 1)
    return _start(context, config, sum(map(bool, ranks[: context.rank])), sum(map(bool, ranks)))


def _start(context: Context, config: Config, shard: int = 0, shards: int = 1) -> Share:
    server = start_server(config, all_local=context.local_size == context.size)
    try:
        spec = JobSpec(_job(config), context.size, config.chunk_bytes, shard, shards)
        token = create_job(server.address, spec, server.admin_token)
    except BaseException:
        server.stop()
        raise
    # Loopback is another host for others, where something else may listen.
    beyond = [address for address in server.addresses if not address.startswith("127.")]
    return Share([Invitation(beyond or server.addresses, spec.name, token)], server)


def _job(config: Config) -> str:
    return config.job or f"job-{new_token()[:12]}"
