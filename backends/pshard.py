"""PShard: the PBox server sharded over the workers' hosts (the paper's configuration CS).

All of it is backends/pbox, where a PBox is the case of one shard; only who starts the servers, and
where, is different (see backends/pbox/deploy.py)."""

from __future__ import annotations

from phub_collective.backends.base import Backend, Context
from phub_collective.backends.native import unavailable_reason

RUNS_OPTIMIZER = True


def is_available() -> str | None:
    """None, or why there is no PShard here."""
    return unavailable_reason()


def create(context: Context) -> Backend:
    """Start this host's shard where that is this rank's part, and connect to all. Collective."""
    from phub_collective.backends.pbox import deploy

    return deploy.connect(context, "pshard", deploy.a_shard_on_every_host)
