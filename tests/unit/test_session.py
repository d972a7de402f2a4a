"""A session: one rank's backends, and which of them gets an operation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeModule, install, some_bytes
from ranks import run_threads

from phub_collective.backends.base import (
    Buffer,
    Context,
    DType,
    ExchangeSpec,
    Key,
    Kind,
    Operation,
)
from phub_collective.backends.compression import Compression
from phub_collective.config import Config
from phub_collective.errors import (
    BackendUnavailable,
    ConfigError,
    MismatchError,
    PeerTimeout,
    PhubError,
)
from phub_collective.rendezvous import LocalRendezvous
from phub_collective.session import Session


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, FakeModule]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = {
        "pbox": FakeModule("pbox", 10e-3, 1e15),
        "ring": FakeModule("ring", 1e-3, 1e9),
        "gloo": FakeModule("gloo", 50e-3, 1e9),
    }
    install(monkeypatch, *made.values())
    return made


def operation(name: str, nbytes: int) -> Operation:
    return Operation(Kind.ALLREDUCE, name, Buffer.of(some_bytes(nbytes)))


def test_operations_go_to_the_backend_for_their_size() -> None:
    def body(context: Context) -> None:
        with Session(context) as session:
            session.submit(operation("small", 100)).wait()
            session.submit(operation("large", 70_000)).wait()
            session.submit(Operation(Kind.BARRIER, "barrier")).wait()
            made: Any = {name: session.backend(name) for name in ("ring", "pbox")}
            assert made["ring"].submitted == ["small", "barrier"]
            assert made["pbox"].submitted == ["large"]

    run_threads(2, body, backend="ring:<64KiB,pbox")


def test_a_name_stays_with_its_first_backend() -> None:
    def body(context: Context) -> None:
        with Session(context) as session:
            for nbytes in (100, 70_000):
                session.submit(operation("changing", nbytes)).wait()
            ring: Any = session.backend("ring")
            assert ring.submitted == ["changing", "changing"]

    run_threads(2, body, backend="ring:<64KiB,pbox")


def test_sizes_for_different_backends_are_an_error_on_all_ranks() -> None:
    """They would wait in two backends, each for the other."""

    def body(context: Context) -> str:
        with Session(context) as session:
            work = session.submit(operation("x", 100 if context.rank == 0 else 70_000))
            with pytest.raises(MismatchError) as caught:
                work.wait()
            assert work.done()
            return str(caught.value)

    expected = "'x' has 100 bytes on rank 0 (for ring), 70000 on rank 1 (for pbox)"
    assert all(expected in text for text in run_threads(3, body, backend="ring:<64KiB,pbox"))


def test_candidates_that_are_not_chosen_are_closed(modules: dict[str, FakeModule]) -> None:
    def body(context: Context) -> None:
        with Session(context) as session:
            session.prepare()
            context.rendezvous.all_gather("prepared", b"")
            assert session.choose(0).name == "ring"
            assert session.choose(1 << 30).name == "pbox"
            assert all(backend.closed for backend in modules["gloo"].made)
            assert not any(backend.closed for backend in modules["ring"].made)
            context.rendezvous.all_gather("looked", b"")

    run_threads(2, body)
    assert len(modules["gloo"].made) == 2
    assert all(backend.closed for module in modules.values() for backend in module.made)


def test_the_servers_optimizer_needs_a_backend_that_has_one() -> None:
    def body(context: Context) -> str:
        with Session(context) as session:
            return session.choose(100, server_optimizer=True).name

    assert run_threads(2, body) == ["pbox", "pbox"]
    with pytest.raises(ConfigError, match=r"PHUB_BACKEND='ring' runs the optimizer.*allow pbox"):
        run_threads(2, body, backend="ring")


def test_why_the_server_cannot_be_reached_is_told(modules: dict[str, FakeModule]) -> None:
    """And no other backend is connected in its place."""
    modules["pbox"].broken_on = 1

    def body(context: Context) -> str:
        with Session(context) as session:
            try:
                return session.choose(100, server_optimizer=True).name
            except BackendUnavailable as error:
                return str(error)

    assert run_threads(2, body) == ["pbox", "[pbox] broken on rank 1"]
    assert not modules["ring"].made
    assert not modules["gloo"].made


def test_nobody_waits_without_limit_for_a_thread_that_connects(
    modules: dict[str, FakeModule],
) -> None:
    ring = modules["ring"]
    ring.gate.clear()
    (rendezvous,) = LocalRendezvous.group(1)
    config = Config(backend="ring", stall_timeout=0.1)
    session = Session(Context(0, 1, 0, 1, rendezvous, config))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(session.submit, operation("first", 4))
        assert ring.entered.wait(60)
        with pytest.raises(PeerTimeout, match="for another thread that connects backends"):
            session.submit(operation("second", 4))
        session.close()  # does not wait for it either
        ring.gate.set()
        with pytest.raises(PhubError, match="after close"):
            first.result(60)
    assert [backend.closed for backend in ring.made] == [True]


def test_an_exchange_goes_to_the_backend_for_the_model() -> None:
    def body(context: Context) -> list[str]:
        keys = [Key("w", (30_000,), DType.FLOAT32)]
        with Session(context) as session:
            chosen = session.open_exchange(ExchangeSpec("chosen", keys))
            named = session.open_exchange(ExchangeSpec("named", keys), "gloo")
            return [exchange._backend.name for exchange in (chosen, named)]  # type: ignore[attr-defined]

    assert run_threads(2, body, backend="ring:<64KiB,pbox") == [["pbox", "gloo"]] * 2


def test_packed_gradients_go_to_the_backend_that_adds_them_up() -> None:
    keys = [Key("w", (10,), DType.FLOAT32)]
    spec = ExchangeSpec("packed", keys, compression=Compression.of("one_bit"))

    def body(context: Context) -> str:
        with Session(context) as session, pytest.raises(ConfigError) as caught:
            session.open_exchange(spec)
        return str(caught.value)

    # The fake one is found, and cannot do it.
    assert all("[pbox] compression one_bit" in text for text in run_threads(2, body))
    for text in run_threads(2, body, backend="ring"):
        assert "PHUB_BACKEND='ring' adds up gradients packed as one_bit; allow pbox" in text


def test_a_closed_session_says_so() -> None:
    def body(context: Context) -> None:
        session = Session(context)
        session.close()
        session.close()
        with pytest.raises(PhubError, match="after close"):
            session.submit(operation("late", 4))

    run_threads(2, body)


def test_open_alone() -> None:
    with Session.open(backend="ring") as session:
        assert (session.rank, session.size) == (0, 1)
        assert (session.local_rank, session.local_size) == (0, 1)
        assert session.choose(5).name == "ring"
