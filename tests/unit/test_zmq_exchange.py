"""The ZMQ baseline's exchanges: in every deployment, with the optimizer on either side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ranks import run_threads

from phub_collective import cli
from phub_collective.backends.base import (
    SGD,
    Context,
    DType,
    Exchange,
    ExchangeSpec,
    Key,
    ReduceOp,
)
from phub_collective.errors import AuthError, ConfigError, MismatchError, PeerTimeout

pytest.importorskip("zmq")

from zmq_jobs import SOON, TOKEN, connected, running, view  # noqa: E402

MIB = 1 << 20
KEYS = [
    Key("fc.weight", (1000, 270), DType.FLOAT32),  # above what one thread does alone
    Key("fc.bias", (7,), DType.FLOAT32, group=1),
    Key("nothing", (0,), DType.FLOAT32, group=1),
    Key("scalar", (), DType.FLOAT32),
]
SCHEDULE = [
    [
        SGD(lr=0.1 / (1 + step), momentum=0.9, weight_decay=1e-3, nesterov=step > 8),
        SGD(lr=0.05, momentum=0.0 if step < 5 else 0.5, dampening=0.1, maximize=step == 3),
    ]
    for step in range(12)
]
DEPLOYMENTS = [("central", False, 1), ("sharded", False, 1), ("sharded", True, 3)]  # servers


def randoms(seed: int, keys: list[Key]) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [np.asarray(random.standard_normal(key.shape), np.float32) for key in keys]


def gradient(step: int, rank: int, key: int) -> np.ndarray | None:
    """What a rank pushes; None: nothing (one rank, or in step 7 all of them)."""
    if key == 1 and (step == 7 or (step % 4 == 1 and rank == 0)):
        return None
    return randoms(1000 * step + rank, KEYS)[key]


def train(context: Context, hosts: bool) -> list[np.ndarray]:
    """The weights after SCHEDULE, by the server's optimizer."""
    backend = connected(context, hosts)
    spec = ExchangeSpec("model", KEYS, place="server")
    exchange = backend.open_exchange(spec)
    for key, values in enumerate(randoms(context.rank + 1, KEYS)):
        view(exchange, key, spec)[...] = values
    exchange.initialize(1)
    for step, groups in enumerate(SCHEDULE):
        exchange.set_hyper(groups)
        for key in reversed(range(len(KEYS))):
            pushed = gradient(step, context.rank, key)
            if pushed is not None:
                view(exchange, key, spec)[...] = pushed
            exchange.push(key, no_grad=pushed is None)
        exchange.wait(SOON)
    weights = [view(exchange, key, spec).copy() for key in range(len(KEYS))]
    exchange.close()
    backend.close()
    return weights


def trained_by_torch(size: int) -> list[np.ndarray]:
    torch = pytest.importorskip("torch")
    parameters = [torch.nn.Parameter(torch.from_numpy(w)) for w in randoms(2, KEYS)]
    groups = [
        {"params": [p for p, key in zip(parameters, KEYS, strict=True) if key.group == group]}
        for group in (0, 1)
    ]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    for step, hypers in enumerate(SCHEDULE):
        for group, hyper in zip(optimizer.param_groups, hypers, strict=True):
            group.update(vars(hyper))
        for key, parameter in enumerate(parameters):
            given = [gradient(step, rank, key) for rank in range(size)]
            some = [one for one in given if one is not None]
            mean = np.asarray(sum(some) / np.float32(size), np.float32)
            parameter.grad = torch.from_numpy(mean) if some else None
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters]


@pytest.mark.parametrize(("where", "hosts", "size"), [("central", False, 2), ("sharded", True, 3)])
def test_the_servers_optimizer_is_torchs(where: str, hosts: bool, size: int) -> None:
    expected = trained_by_torch(size)
    for weights in run_threads(size, train, hosts, zmq_servers=where):
        for got, wanted in zip(weights, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)


LARGE = [Key("large", (9 * MIB // 4 + 3,), DType.FLOAT32), Key("small", (5,), DType.FLOAT32)]


def sum_large(context: Context, hosts: bool, servers: int) -> int:
    """Three steps, and an operation of the same size; the server's process, if it is ours."""
    backend = connected(context, hosts)
    assert backend.client.servers == servers
    spec = ExchangeSpec("large", LARGE, ReduceOp.SUM, prescale=0.5, postscale=4.0)
    exchange = backend.open_exchange(spec)
    pattern = np.arange(LARGE[0].count, dtype=np.float32) % 1000
    for step in range(3):
        for key in (1, 0):
            view(exchange, key, spec)[...] = pattern[: LARGE[key].count] + context.rank + step
            exchange.push(key)
        exchange.wait_key(1, SOON)
        exchange.wait(SOON)
        size = context.size
        for key in (0, 1):
            summed = size * (pattern[: LARGE[key].count] + step) + size * (size - 1) / 2
            np.testing.assert_array_equal(view(exchange, key, spec), 2 * summed)
    assert exchange.counters.steps == 3
    assert exchange.counters.pushed == 3 * sum(key.nbytes for key in LARGE)
    exchange.close()
    backend.close()
    return backend.server_pid or 0


@pytest.mark.parametrize(("where", "hosts", "servers"), DEPLOYMENTS)
def test_keys_beyond_4_mib_are_exact(where: str, hosts: bool, servers: int) -> None:
    pids = run_threads(3, sum_large, hosts, servers, zmq_servers=where)
    assert len(set(pids) - {0}) == servers


def test_dedicated_servers_serve_one_job_and_end_with_it() -> None:
    with running(2, threads=2) as one, running(2) as other:
        where = f"{one.address}, {other.address}"
        run_threads(2, sum_large, False, 2, zmq_servers=where, token=TOKEN)


def open_only(context: Context) -> None:
    connected(context).close()


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [({}, ConfigError, "needs the PHUB_TOKEN"), ({"token": "a wrong one"}, AuthError, "refused")],
)
def test_dedicated_servers_need_their_token(
    settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    with running(1, used=False) as server, pytest.raises(error, match=said):
        run_threads(1, open_only, zmq_servers=server.address, **settings)


def test_different_places_of_servers_are_a_mismatch() -> None:
    def body(context: Context) -> None:
        where = "central" if context.rank == 0 else "sharded"
        config = dataclasses.replace(context.config, zmq_servers=where)
        with pytest.raises(MismatchError, match="rank 0 has 'central', rank 1 has 'sharded'"):
            connected(dataclasses.replace(context, config=config))

    run_threads(2, body)


def use_wrongly(context: Context) -> None:
    """All that an exchange refuses, on one rank."""
    backend = connected(context)

    def opened(name: str, **fields: object) -> object:
        return backend.open_exchange(ExchangeSpec(name, KEYS, **fields))  # type: ignore[arg-type]

    cases: list[tuple[dict[str, object], str]] = [
        ({"op": ReduceOp.MAX}, "summed or averaged"),
        ({"place": "nowhere"}, "place='nowhere'"),
        ({"place": "server", "shared_model": True}, "pbox"),
    ]
    for fields, said in cases:
        with pytest.raises(ConfigError, match=said):
            opened("refused", **fields)
    integers = [Key("steps", (1,), DType.INT64)]
    with pytest.raises(ConfigError, match="no optimizer for 'steps' of int64"):
        backend.open_exchange(ExchangeSpec("refused", integers, place="server"))
    exchange = backend.open_exchange(ExchangeSpec("model", KEYS, place="server"))
    with pytest.raises(ConfigError, match="root 3"):
        exchange.initialize(3)
    exchange.initialize(0)
    with pytest.raises(ConfigError, match="expected 2 parameter groups, got 1"):
        exchange.set_hyper([SGD()])
    exchange.set_hyper([SGD(), SGD()])
    exchange.push(0)
    with pytest.raises(ConfigError, match="before it"):
        exchange.set_hyper([SGD(), SGD()])
    with pytest.raises(ConfigError, match="'fc.weight' was pushed twice"):
        exchange.push(0)
    with pytest.raises(ConfigError, match="before these keys were pushed: .*fc.bias"):
        exchange.wait(SOON)
    plain = backend.open_exchange(ExchangeSpec("plain", KEYS))
    with pytest.raises(ConfigError, match="place='worker'"):
        plain.set_hyper([SGD()])
    backend.close()


def test_wrong_uses_are_refused() -> None:
    run_threads(1, use_wrongly)


def with_exchange(body: Callable[..., None], size: int, place: str) -> None:
    spec = ExchangeSpec("model", KEYS, place=place)

    def rank(context: Context) -> None:
        backend = connected(context)
        exchange = backend.open_exchange(spec)
        exchange.initialize(0)
        body(context, exchange)
        context.rendezvous.barrier("over", SOON)
        backend.close()

    run_threads(size, rank)


def test_who_is_missing_is_named_and_may_still_come() -> None:
    def body(context: Context, exchange: Exchange) -> None:
        if context.rank == 1:
            context.rendezvous.barrier("waited", SOON)
        for key in range(len(KEYS)):
            exchange.push(key)
        if context.rank == 0:
            with pytest.raises(PeerTimeout, match=r"key 'fc.weight' of 'model'; .*ranks 1") as late:
                exchange.wait(0.3)
            assert late.value.ranks == (1,)
            context.rendezvous.barrier("waited", SOON)
        exchange.wait(SOON)

    with_exchange(body, 2, "worker")


def test_hyperparameters_that_differ_are_named_on_all_ranks() -> None:
    def body(context: Context, exchange: Exchange) -> None:
        exchange.set_hyper([SGD(lr=0.5 - 0.25 * context.rank), SGD()])
        for key in range(len(KEYS)):
            exchange.push(key)
        with pytest.raises(MismatchError, match=r"rank 0 has lr 0.5 .*rank 1 has lr 0.25"):
            exchange.wait(SOON)

    with_exchange(body, 2, "server")


@pytest.mark.parametrize(
    ("arguments", "token", "said"),
    [
        (["--workers", "0"], TOKEN, "expected at least 1"),
        (["--workers", "1", "--threads", "-1"], TOKEN, "expected at least 1 and 0"),
        (["--workers", "1"], "", "set PHUB_TOKEN"),
        (["--workers", "1", "--host", "192.0.2.1"], TOKEN, "cannot listen on 192.0.2.1:0"),
    ],
)
def test_what_no_server_can_be_started_with(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    token: str,
    said: str,
) -> None:
    monkeypatch.setenv("PHUB_TOKEN", token)
    assert cli.main(["serve-zmq", *arguments]) == 1
    assert said in capsys.readouterr().err
