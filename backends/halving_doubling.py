"""Allreduce by recursive halving and doubling: as few bytes as a ring, 2 lg n steps."""

from __future__ import annotations

from phub_collective.backends import native, schedule
from phub_collective.backends.base import Backend, Context
from phub_collective.backends.mesh import MeshBackend


def is_available() -> str | None:
    """None, or the reason why not."""
    return native.unavailable_reason()


def create(context: Context) -> Backend:
    """Connect to the other ranks. Collective."""
    return MeshBackend(context, "halving_doubling", schedule.halving_doubling)
