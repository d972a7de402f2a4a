"""What the mesh's Python side keeps of names and works."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ranks import run_threads

from phub_collective import backends
from phub_collective.backends import mesh
from phub_collective.backends.base import Backend, Buffer, Context, Kind, Operation
from phub_collective.errors import ConfigError

MANY = 1000


def on_ring(body: Callable[[Backend], None]) -> Callable[[Context], None]:
    def run(context: Context) -> None:
        backend = backends.create("ring", context)
        body(backend)
        backend.close()

    return run


def allreduce(name: str) -> Operation:
    return Operation(Kind.ALLREDUCE, name, Buffer.of(np.ones(1, np.float32)))


def test_works_in_flight_are_not_all_asked_at_every_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[mesh.MeshWork] = []
    done = mesh.MeshWork.done

    def count(work: mesh.MeshWork) -> bool:
        asked.append(work)
        return done(work)

    monkeypatch.setattr(mesh.MeshWork, "done", count)

    def body(backend: Backend) -> None:
        rendezvous = backend.context.rendezvous
        if backend.context.rank == 0:
            works = [backend.submit(allreduce(f"w{index}")) for index in range(MANY)]
            rendezvous.barrier("submitted")
        else:
            rendezvous.barrier("submitted")  # until then all of rank 0's are in flight
            works = [backend.submit(allreduce(f"w{index}")) for index in range(MANY)]
        for work in works:
            work.wait(30.0)

    run_threads(2, on_ring(body))
    assert len(asked) < 2 * 2 * MANY  # of two ranks


def test_one_name_too_many_is_refused_where_it_is_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh, "MAX_NAMES", 2)

    def body(backend: Backend) -> None:
        for name in ("a", "b", "a"):
            backend.submit(allreduce(name)).wait(30.0)
        with pytest.raises(ConfigError, match=r"'c' after 2 other names.*same name each time"):
            backend.submit(allreduce("c"))
        backend.submit(allreduce("b")).wait(30.0)

    run_threads(2, on_ring(body))
