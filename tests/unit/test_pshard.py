"""A PBox of several shards: the same results as of one, its memory, its errors, and who starts the
shards where. That reductions are right is in tests/contract."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil
import pytest
from pbox_jobs import (
    LANES,
    SOON,
    Box,
    Job,
    allreduce,
    box,
    outcomes,
    sharded_job,
    spec_of,
    together,
    until,
)
from ranks import ThreadRanks, run_threads

from phub_collective import backends
from phub_collective.backends.base import SGD, Context, DType, Key, ReduceOp
from phub_collective.backends.pbox import deploy
from phub_collective.backends.pbox.backend import PboxBackend
from phub_collective.backends.pbox.connection import Connection
from phub_collective.backends.pbox.exchange import PboxExchange
from phub_collective.backends.pbox.handshake import invitations
from phub_collective.backends.pbox.keytable import TableIds, TableSpec, placement_of
from phub_collective.backends.pbox.launch import LocalServer, start_server
from phub_collective.backends.pbox.service import connect_service, create_service
from phub_collective.config import Config
from phub_collective.errors import ConfigError, MismatchError, PeerLost, PeerTimeout, PhubError
from phub_collective.models import model_keys

SHARDS, WORKERS = 3, 3
SHAPES = [(300, 70), (7,), (0, 3), (50_000,), (129,)]
GROUPS = [0, 1, 0, 0, 1]


@pytest.fixture(scope="module")
def boxes() -> Iterator[list[Box]]:
    """Dedicated shards (NCS), each a PBox that other jobs may use, too."""
    with ExitStack() as stack:
        yield [stack.enter_context(box()) for _ in range(SHARDS)]


def tenants(boxes: list[Box], job: Job) -> list[Any]:
    """What each shard knows of a job."""
    return [one.server._jobs[job.name] for one in boxes]


# --- the same results ---


def train(job: Job, dtype: DType) -> list[list[np.ndarray]]:
    """The weights after every step of the server's SGD, the same on all ranks. Gradients are
    multiples of 1/8, so that the order of sums does not matter."""
    spec = spec_of(SHAPES, dtype, GROUPS, place="server")

    def rank(rank: int) -> list[list[np.ndarray]]:
        random = np.random.default_rng(rank)
        with job.exchange(rank, spec) as model:
            first = [random.integers(0, 50, shape) for shape in SHAPES]
            seen = [model.initialize([encoded(one, dtype) for one in first], root=1)]
            for step in range(4):
                hyper = SGD(lr=0.1 / (step + 1), momentum=0.9, weight_decay=0.01)
                model.exchange.set_hyper([hyper, dataclasses.replace(hyper, nesterov=True)])
                gradients = [random.integers(-40, 40, shape) / 8 for shape in SHAPES]
                kept = [encoded(one, dtype) for one in gradients]
                seen.append(model.step([*kept[:-1], None if rank == 2 else kept[-1]]))
            return seen

    ranks = together(WORKERS, rank)
    for other in ranks[1:]:
        for mine, theirs in zip(ranks[0], other, strict=True):
            assert all(map(np.array_equal, mine, theirs))
    return ranks[0]


def encoded(numbers: np.ndarray, dtype: DType) -> np.ndarray:
    """Exact in every type: bfloat16's bits are the upper half of float32's."""
    if dtype is not DType.BFLOAT16:
        return numbers.astype(dtype.stored)
    return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_weights_are_bitwise_those_of_one_pbox(boxes: list[Box], lane: str, dtype: DType) -> None:
    expected = train(boxes[0].job(WORKERS, "tcp"), dtype)
    job = sharded_job(boxes, WORKERS, lane)
    tenants(boxes, job)[1]._next = TableIds(5, 70, 9000, 11)  # shards number tables as they come
    found = train(job, dtype)
    for step, (weights, wanted) in enumerate(zip(found, expected, strict=True)):
        for key, (one, other) in enumerate(zip(weights, wanted, strict=True)):
            np.testing.assert_array_equal(one, other, f"step {step}, key {key}")


def test_a_service_over_shards(boxes: list[Box]) -> None:
    """Push and pull apart, with NumPy arrays."""
    address = ",".join(one.address for one in boxes)
    token = create_service(address, "service", 2)
    start = {"w": np.zeros((90, 1000), np.float32), "b": np.zeros(3, np.float32)}

    def rank(rank: int) -> np.ndarray:
        with connect_service(address, "service", token, rank) as service:
            service.init(start, SGD(lr=0.5))
            service.push("w", np.full((90, 1000), rank + 1, np.float32))
            service.push("b", start["b"])
            service.pull("b", SOON)
            return service.pull("w", SOON)

    for weights in together(2, rank):
        assert (weights == -0.75).all()


# --- placement ---


def test_neighbours_are_on_different_shards() -> None:
    """Workers push in one order, at about the same time: they must not all meet at one shard."""
    for name in ("ResNet50", "AlexNet"):
        spec = table_spec("model", tuple(model_keys(name)), model=True)
        placed = placement_of(spec, cores=1, interfaces=1, shards=8)
        sizes = np.array([chunk.nbytes for chunk in placed.chunks])
        for begin in range(0, len(sizes) - 64, 64):
            window = slice(begin, begin + 64)
            loads = np.bincount(placed.shard[window], sizes[window], 8)
            assert loads.max() <= 2 * loads.mean(), f"{name} at chunk {begin}"


def test_small_tensors_are_spread_over_shards_by_their_names() -> None:
    key = Key("k", (10,), DType.FLOAT32)
    places = set()
    for number in range(200):
        placed = placement_of(table_spec(f"t{number}", (key,)), cores=2, interfaces=1, shards=4)
        places.add((int(placed.shard[0]), int(placed.core[0])))
    assert places == {(shard, core) for shard in range(4) for core in range(2)}


def table_spec(name: str, keys: tuple[Key, ...], model: bool = False) -> TableSpec:
    return TableSpec(name, keys, ReduceOp.SUM, 1.0, 1.0, 32 << 10, model)


# --- what is wrong ---


def test_shards_must_be_those_of_one_job_in_its_order(boxes: list[Box]) -> None:
    job = sharded_job(boxes, 1)
    invited = invitations(job.address, job.name, job.token)
    with pytest.raises(ConfigError, match="expected shard 0 of 3, got shard 2 of 3"):
        Connection(invited[::-1], 0, job.config)
    job = sharded_job(boxes, 1)
    invited = invitations(job.address, job.name, job.token)
    with pytest.raises(ConfigError, match="expected shard 0 of 2, got shard 0 of 3"):
        Connection(invited[:2], 0, job.config)
    with pytest.raises(ConfigError, match="a token for each of 3 shards, got 1"):
        invitations(job.address, job.name, invited[0].token)
    with box(cores=1) as small:
        uneven = sharded_job([boxes[0], small], 1)
        with pytest.raises(ConfigError, match="shard 0 has cores 2, shard 1 has 1"):
            uneven.connect(0)


def test_a_shared_model_needs_one_pbox(boxes: list[Box]) -> None:
    job = sharded_job(boxes, 1, "shm")
    with pytest.raises(ConfigError, match="needs one PBox, this job has 3 shards"):
        job.exchange(0, spec_of([(3,)], place="server", shared_model=True))


@pytest.mark.parametrize("lane", LANES)
def test_tables_that_differ_are_a_mismatch_and_the_name_is_free_again(
    boxes: list[Box], lane: str
) -> None:
    job = sharded_job(boxes, 2, lane)
    connections = together(2, job.connect)
    for _ in range(3):
        errors = outcomes(2, lambda rank: register(connections[rank], 90_000 + rank))
        assert all(isinstance(error, MismatchError) for error in errors)
    together(2, lambda rank: register(connections[rank], 90_000))
    for connection in connections:
        connection.close()


def test_what_one_shard_refuses_is_refused(
    boxes: list[Box], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To all ranks; the other shards, which have made the table, forget it again."""
    job = sharded_job(boxes, 2)
    connections = together(2, job.connect)
    shards = tenants(boxes, job)
    full = shards[1]
    make: Callable[..., Any] = full._make

    def refuse(spec: TableSpec) -> Any:
        raise ConfigError("[pbox] no room for it")

    for _ in range(2):
        monkeypatch.setattr(full, "_make", refuse)
        errors = outcomes(2, lambda rank: register(connections[rank], 5000))
        assert all("no room for it" in str(error) for error in errors)
        monkeypatch.setattr(full, "_make", make)
        until(lambda: not any(one._tables for one in shards), "a table is left")
        together(2, lambda rank: register(connections[rank], 5000))
        until(lambda: not any(one._tables for one in shards), "a table is left")
    for connection in connections:
        connection.close()


def register(connection: Connection, count: int) -> None:
    """Register a model and close it again."""
    PboxExchange(connection, spec_of([(count,)]), connection.chunk_bytes).close()


@pytest.mark.parametrize("lane", LANES)
def test_a_stall_names_what_is_missing_once(boxes: list[Box], lane: str) -> None:
    job = sharded_job(boxes, 2, lane, stall_warning=0.1, stall_timeout=0.4)
    models = together(2, lambda rank: job.exchange(rank, spec_of([(90_000,), (7,)])))
    for key in range(2):
        models[0].exchange.push(key)
    with pytest.raises(PeerTimeout) as caught:
        models[0].exchange.wait()
    assert caught.value.ranks == (1,)
    assert str(caught.value).count("p0 from ranks [1]") == 1
    for model in models:
        model.close()


def test_a_shard_that_one_rank_has_lost_is_told_to_all(boxes: list[Box]) -> None:
    """And not taken for the loss of that rank."""
    job = sharded_job(boxes, 2)
    models = together(2, lambda rank: job.exchange(rank, spec_of([(90_000,)])))
    models[1].exchange.push(0)
    models[0].connection._fail(PeerLost("[pbox] rank 0 lost shard 1 of 3: it is silent", -3))
    models[0].close()
    with pytest.raises(PeerLost, match="shard 1 of 3") as caught:
        models[1].exchange.wait(SOON)
    assert caught.value.rank == -3
    models[1].close()


# --- shards that ranks start ---


def as_hosts(context: Context, first_of_host: tuple[int, ...]) -> Context:
    """As if ranks were on several hosts, the first of which are these."""
    first = max(rank for rank in first_of_host if rank <= context.rank)
    last = min([rank for rank in first_of_host if rank > context.rank], default=context.size)
    return dataclasses.replace(context, local_rank=context.rank - first, local_size=last - first)


@pytest.mark.parametrize(
    ("settings", "first_of_host", "shards"),
    [
        ({}, (0,), 1),
        ({}, (0, 2), 2),
        ({"shards": "rank"}, (0,), 3),
    ],
)
def test_there_is_a_shard_on_every_host_or_for_every_rank(
    settings: dict[str, Any], first_of_host: tuple[int, ...], shards: int
) -> None:
    def rank(context: Context) -> list[int]:
        backend = backends.create("pshard", as_hosts(context, first_of_host))
        assert isinstance(backend, PboxBackend)
        operation = allreduce("x", 1, 2)
        backend.submit(operation).wait(SOON)
        assert operation.buffer is not None
        assert operation.buffer.array().tolist() == [3, 6]
        assert backend.open_exchange(spec_of([(3,)])).backend == "pshard"
        pids = backend.server_pids
        context.rendezvous.barrier("checked")
        backend.close()
        return pids

    ranks = run_threads(3, rank, **settings)
    assert len(set(ranks[0])) == shards
    assert ranks == ranks[:1] * 3
    until(lambda: not any(map(psutil.pid_exists, ranks[0])), "a shard outlives its job")


def test_a_shard_takes_its_part_of_the_memory_only() -> None:
    """Sums, weights and momentum of a model of M bytes: 3 M in all, M on each of three shards."""
    nbytes = 48 << 20
    spec = spec_of([(nbytes // 16,)] * 4, place="server")

    def rank(context: Context) -> list[int]:
        backend = backends.create("pshard", context)
        assert isinstance(backend, PboxBackend)
        before = [psutil.Process(pid).memory_info().rss for pid in backend.server_pids]
        exchange = backend.open_exchange(spec)
        exchange.initialize()
        exchange.set_hyper([SGD(lr=0.1, momentum=0.9)])
        for key in range(len(spec.keys)):
            exchange.push(key)
        exchange.wait(SOON)
        after = [psutil.Process(pid).memory_info().rss for pid in backend.server_pids]
        context.rendezvous.barrier("measured")
        backend.close()
        return [late - early for early, late in zip(before, after, strict=True)]

    for grown in run_threads(3, rank, shards="rank", lane="tcp")[0]:
        assert 0.98 * nbytes < grown < 1.2 * nbytes + (8 << 20)


@pytest.mark.parametrize("lane", LANES)
def test_a_killed_shard_ends_the_job_everywhere(lane: str) -> None:
    def rank(context: Context) -> PhubError:
        backend = backends.create("pshard", context)
        assert isinstance(backend, PboxBackend)
        exchange = backend.open_exchange(spec_of([(300_000,)]))
        begin = 0.0
        try:
            for step in range(10_000):
                if step == 3 and context.rank == 0:
                    psutil.Process(backend.server_pids[1]).kill()
                exchange.push(0)
                begin = time.monotonic()
                exchange.wait(SOON)
            raise AssertionError("nobody was told")
        except PeerLost as error:
            assert time.monotonic() - begin < 5.0
            return error
        finally:
            backend.close()

    with ThreadRanks(3, shards="rank", lane=lane) as ranks:
        for error in ranks.run(rank):
            assert isinstance(error, PeerLost)
            assert error.rank == -3
            assert "shard 1 of 3" in str(error)


def test_why_a_rank_has_no_shard_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    started: list[LocalServer] = []

    def fails_once(config: Config, all_local: bool) -> LocalServer:
        if next(calls):
            raise PeerLost("[pbox] no such program")
        started.append(start_server(config, all_local))
        return started[0]

    monkeypatch.setattr(deploy, "start_server", fails_once)

    def rank(context: Context) -> None:
        with pytest.raises(PeerLost, match="no such program"):
            backends.create("pshard", context)

    run_threads(2, rank, shards="rank")
    assert started[0].process.poll() is not None
