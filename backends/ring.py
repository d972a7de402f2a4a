"""Allreduce around a ring of workers: the fewest bytes, 2(n - 1) steps."""

from __future__ import annotations

from phub_collective.backends import native, schedule
from phub_collective.backends.base import Backend, Context
from phub_collective.backends.mesh import MeshBackend


def is_available() -> str | None:
    """None, or the reason why not."""
    return native.unavailable_reason()


def create(context: Context) -> Backend:
    """Connect to the other ranks. Collective."""
    return MeshBackend(context, "ring", schedule.ring)
