"""Modes of the optimizer on the PBox: sums in a fixed order, asynchronous and bounded staleness;
and its state, saved and set."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from pbox_jobs import LANES, SOON, Box, Model, box, spec_of, together

from phub_collective.backends.base import SGD, Adam, DType, ExchangeSpec, KeyState, ReduceOp
from phub_collective.errors import ConfigError, PeerTimeout

SHAPES: list[tuple[int, ...]] = [(40, 25), (0,), (7,), (2000,)]
lanes = pytest.mark.parametrize("lane", LANES)


@pytest.fixture(scope="module")
def pbox() -> Iterator[Box]:
    with box() as made:
        yield made


def server_spec(**fields: Any) -> ExchangeSpec:
    return spec_of(SHAPES, place="server", **fields)


def joined(pbox: Box, size: int, spec: ExchangeSpec, lane: str) -> list[Model]:
    job = pbox.job(size, lane)
    return together(size, lambda rank: job.exchange(rank, spec))


def close_all(models: list[Model]) -> None:
    together(len(models), lambda rank: models[rank].close())


def randoms(seed: int, spec: ExchangeSpec) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(key.shape).astype(np.float32) for key in spec.keys]


# --- deterministic ---


def start(models: list[Model], rank: int) -> list[np.ndarray]:
    return models[rank].initialize(randoms(9, models[rank].spec))


def late_step(
    models: list[Model], step: int, delays: Sequence[float], rank: int
) -> list[np.ndarray]:
    time.sleep(delays[rank])
    model = models[rank]
    if model.spec.place == "server":
        model.exchange.set_hyper([SGD(lr=0.1, momentum=0.9)])
    return model.step(list(randoms(10 * step + rank, model.spec)))


@pytest.mark.parametrize("place", ["worker", "server"])
def test_the_same_bits_in_every_run_and_on_both_lanes(pbox: Box, place: str) -> None:
    """Three ranks that push in another order each time: sums of floats depend on the order."""
    spec = spec_of(SHAPES, op=ReduceOp.SUM, place=place, deterministic=True)
    seen = set()
    for run in range(20):
        shuffled = random.Random(run)
        models = joined(pbox, 3, spec, LANES[run % 2])
        if place == "server":
            together(3, partial(start, models))
        for step in range(2):
            delays = [shuffled.random() / 100 for _ in models]
            results = together(3, partial(late_step, models, step, delays))
            for result in results:
                assert [r.tobytes() for r in result] == [r.tobytes() for r in results[0]]
        seen.add(b"".join(r.tobytes() for r in results[0]))
        close_all(models)
    assert len(seen) == 1


# --- steps of single ranks ---


@lanes
def test_asynchronous_ranks_make_steps_of_their_own(pbox: Box, lane: str) -> None:
    spec = server_spec(staleness=math.inf)
    models = joined(pbox, 2, spec, lane)
    together(2, lambda rank: models[rank].initialize(randoms(0, spec)))
    ones = [np.ones(key.shape, np.float32) for key in spec.keys]
    for model in models:
        model.exchange.set_hyper([SGD(lr=0.5)])
    expected = randoms(0, spec)
    for rank in (0, 0, 1, 0, 1):  # the other one does nothing meanwhile
        expected = [e - np.float32(0.5) for e in expected]  # the average of one gradient
        for got, wanted in zip(models[rank].step(list(ones)), expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    models[1].exchange.set_hyper([SGD(lr=0.25)])  # each rank's own
    models[1].step(list(ones))
    models[0].exchange.pull(0)
    np.testing.assert_allclose(models[0].view(0), expected[0] - 0.25, rtol=1e-6, atol=1e-6)
    close_all(models)


@lanes
@pytest.mark.parametrize("staleness", [1, 3])
def test_nobody_is_further_ahead_than_allowed(pbox: Box, lane: str, staleness: int) -> None:
    spec = server_spec(staleness=staleness)
    models = joined(pbox, 3, spec, lane)
    together(3, lambda rank: models[rank].initialize(randoms(0, spec)))
    clocks, worst = [0, 0, 0], [0]
    lock = threading.Lock()

    def train(rank: int) -> None:
        models[rank].exchange.set_hyper([SGD(lr=0.01)])
        pause = random.Random(rank)
        for _ in range(20):
            time.sleep(pause.random() / 200 * (1 + 2 * rank))
            models[rank].step(list(randoms(rank, spec)))
            with lock:
                clocks[rank] += 1
                worst[0] = max(worst[0], max(clocks) - min(clocks))

    together(3, train)
    # A rank counts its step after the answer: others may be one further when it gets to that.
    assert 1 <= worst[0] <= staleness + 1
    close_all(models)


@lanes
def test_who_waits_for_the_slowest_rank_learns_which_it_is(pbox: Box, lane: str) -> None:
    spec = server_spec(staleness=1)
    models = joined(pbox, 2, spec, lane)
    together(2, lambda rank: models[rank].initialize(randoms(0, spec)))
    models[0].exchange.set_hyper([SGD()])
    models[0].step(list(randoms(1, spec)))
    for key in range(len(spec.keys)):
        models[0].exchange.push(key)
    with pytest.raises(PeerTimeout, match=r"ranks \[1\]"):
        models[0].exchange.wait(0.2)
    models[1].exchange.set_hyper([SGD()])
    models[1].step(list(randoms(1, spec)))
    models[0].exchange.wait(SOON)
    close_all(models)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"staleness": -1}, "staleness=-1"),
        ({"staleness": math.nan}, "staleness=nan"),
        ({"staleness": 1, "place": "worker"}, "needs the optimizer on the server"),
        ({"staleness": 1, "shared_model": True}, "not shared"),
        ({"staleness": 1, "deterministic": True}, "deterministic"),
    ],
)
def test_what_does_not_go_together_is_refused(pbox: Box, fields: dict[str, Any], text: str) -> None:
    spec = spec_of(SHAPES, **{"place": "server", **fields})
    with pytest.raises(ConfigError, match=text):
        pbox.job(1, "shm").exchange(0, spec)


# --- state ---


def step_all(models: list[Model], rule: SGD | Adam, begin: int, end: int) -> list[np.ndarray]:
    """Steps [begin, end) with made-up gradients; rank 0's result."""
    spec = models[0].spec

    def train(rank: int) -> list[np.ndarray]:
        models[rank].exchange.set_hyper([rule])
        result = models[rank].results()
        for step in range(begin, end):
            gradients = randoms(100 * step + rank, spec)
            result = models[rank].step([as_stored(g, spec) for g in gradients])
        return result

    return together(len(models), train)[0]


def as_stored(array: np.ndarray, spec: ExchangeSpec) -> np.ndarray:
    return array.astype(spec.keys[0].dtype.stored)


@lanes
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16], ids=["float32", "float16"])
@pytest.mark.parametrize("rule", [SGD(0.1, 0.9), Adam(0.01), Adam(0.01, amsgrad=True)], ids=str)
def test_another_job_goes_on_from_saved_state(
    pbox: Box, lane: str, dtype: DType, rule: SGD | Adam
) -> None:
    spec = spec_of(SHAPES, dtype, place="server", state_arrays=rule.state_arrays)
    start = [as_stored(w, spec) for w in randoms(0, spec)]
    models = joined(pbox, 2, spec, lane)
    together(2, lambda rank: models[rank].initialize(start))
    step_all(models, rule, 0, 3)
    weights = models[1].results()
    state = models[1].exchange.read_state()  # any rank's business
    expected = step_all(models, rule, 3, 6)
    close_all(models)
    assert [one.taken for one in state] == [3, 0, 3, 3]  # one key has no elements
    others = joined(pbox, 2, spec, lane)

    def resume(rank: int) -> None:
        for key, weight in enumerate(weights):
            others[rank].view(key)[...] = weight
        # Only the root's counts.
        mine = state if rank == 0 else [KeyState(99, []) for _ in spec.keys]
        others[rank].exchange.initialize(0, mine)

    together(2, resume)
    for got, wanted in zip(step_all(others, rule, 3, 6), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    close_all(others)


def test_state_of_another_shape_is_refused(pbox: Box) -> None:
    (model,) = joined(pbox, 1, server_spec(), "tcp")
    wrong = [KeyState(1, [np.zeros(3, np.float32)]) for _ in SHAPES]
    with pytest.raises(ConfigError, match="expected 1000 elements of float32, got 3 of float32"):
        model.exchange.initialize(0, wrong)
    close_all([model])


def test_state_is_read_between_steps_and_where_the_optimizer_is(pbox: Box) -> None:
    (model,) = joined(pbox, 1, server_spec(), "tcp")
    model.exchange.push(0)
    with pytest.raises(ConfigError, match="between a step's first push and its wait"):
        model.exchange.read_state()
    (other,) = joined(pbox, 1, spec_of(SHAPES), "tcp")
    with pytest.raises(ConfigError, match="runs no optimizer"):
        other.exchange.read_state()
    model.connection.close()
    other.connection.close()
