"""The PBox parameter server: placement, server, the worker's end, and where servers run."""

from __future__ import annotations

from phub_collective.backends.base import Backend, Context
from phub_collective.backends.native import unavailable_reason

RUNS_OPTIMIZER = True
FOLDS_PACKED = True


def is_available() -> str | None:
    """None, or why there is no PBox here."""
    return unavailable_reason()


def create(context: Context) -> Backend:
    """Connect to the job's PBox (see deploy.py). Collective."""
    from phub_collective.backends.pbox import deploy

    return deploy.connect(context, "pbox", deploy.central)
