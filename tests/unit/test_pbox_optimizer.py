"""The optimizer on the PBox against torch.optim, over every path of a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from pbox_jobs import LANES, Box, Model, box, outcomes, spec_of, together

from phub_collective.backends.base import SGD, Adam, DType, ExchangeSpec, Hyper, ReduceOp
from phub_collective.backends.pbox.exchange import PboxExchange
from phub_collective.errors import ConfigError, MismatchError

SHAPES: list[tuple[int, ...]] = [(40, 25), (0,), (7,), (), (3, 5, 2), (2000,)]
Gradients = list[list[np.ndarray | None]]  # by rank and key

# How a gradient reaches the core and the weights come back.
PATHS = [
    pytest.param("shm", False, id="in-place"),
    pytest.param("shm", True, id="shared-model"),
    pytest.param("tcp", False, id="lanes"),
]
paths = pytest.mark.parametrize(("lane", "shared"), PATHS)


@pytest.fixture(scope="module")
def pbox() -> Iterator[Box]:
    with box() as made:
        yield made


def server_spec(shared: bool, **fields: Any) -> ExchangeSpec:
    return spec_of(place="server", shared_model=shared, **{"shapes": SHAPES, **fields})


def randoms(seed: int, spec: ExchangeSpec, dtype: str = "float32") -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(key.shape).astype(dtype) for key in spec.keys]


def gradients_of(step: int, spec: ExchangeSpec, size: int, dtype: str = "float32") -> Gradients:
    return [list(randoms(1000 * step + rank + 1, spec, dtype)) for rank in range(size)]


class Oracle:
    """One copy of the model, trained by torch with the averaged gradients."""

    def __init__(
        self, spec: ExchangeSpec, weights: list[np.ndarray], groups: Sequence[Hyper]
    ) -> None:
        self.parameters = [torch.nn.Parameter(torch.from_numpy(w.copy())) for w in weights]
        members: list[list[torch.nn.Parameter]] = [[] for _ in groups]
        for key, parameter in zip(spec.keys, self.parameters, strict=True):
            members[key.group].append(parameter)
        self._groups = [
            {"params": list(params), **vars(hyper)}
            for params, hyper in zip(members, groups, strict=True)
        ]
        rule = torch.optim.SGD if isinstance(groups[0], SGD) else torch.optim.Adam
        self.optimizer = rule(self._groups, lr=1.0)

    def step(self, gradients: Gradients, groups: Sequence[Hyper]) -> None:
        for group, hyper in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(vars(hyper))
        for parameter, per_rank in zip(self.parameters, zip(*gradients, strict=True), strict=True):
            given = [g for g in per_rank if g is not None]
            mean = np.asarray(
                sum(given) / np.asarray(len(gradients), parameter.detach().numpy().dtype)
            )
            parameter.grad = torch.from_numpy(mean) if given else None
        self.optimizer.step()

    def check(self, results: list[np.ndarray], tolerance: float) -> None:
        for parameter, result in zip(self.parameters, results, strict=True):
            expected = parameter.detach().numpy()
            np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance)


def train(
    models: list[Model], oracle: Oracle, schedule: Sequence[Sequence[Hyper]], tolerance: float
) -> None:
    """One step for each entry of the schedule, checked on every rank at the end of each tenth."""
    spec, size = models[0].spec, len(models)
    dtype = spec.keys[0].dtype.name.lower()
    for step, groups in enumerate(schedule):
        gradients = gradients_of(step, spec, size, dtype)
        oracle.step(gradients, groups)

        def one(
            rank: int, groups: Sequence[Hyper] = groups, gradients: Gradients = gradients
        ) -> list[np.ndarray]:
            models[rank].exchange.set_hyper(groups)
            return models[rank].step(gradients[rank])

        results = together(size, one)
        if step % 10 == 9 or step == len(schedule) - 1:
            for result in results:
                oracle.check(result, tolerance)


def joined(pbox: Box, size: int, spec: ExchangeSpec, lane: str, **config: Any) -> list[Model]:
    job = pbox.job(size, lane, **config)
    return together(size, lambda rank: job.exchange(rank, spec))


def adopt(
    models: list[Model], weights: list[list[np.ndarray]], root: int, rank: int
) -> list[np.ndarray]:
    return models[rank].initialize(weights[rank], root)


def close_all(models: list[Model]) -> None:
    together(len(models), lambda rank: models[rank].close())


def run(
    pbox: Box,
    spec: ExchangeSpec,
    lane: str,
    schedule: Sequence[Sequence[Hyper]],
    size: int = 2,
    **job: Any,
) -> None:
    """Train from rank 0's weights and compare with torch."""
    models = joined(pbox, size, spec, lane, **job)
    dtype = spec.keys[0].dtype.name.lower()
    weights = randoms(0, spec, dtype)
    start = together(size, lambda r: models[r].initialize(randoms(r, spec, dtype)))
    for result in start:
        for got, expected in zip(result, weights, strict=True):
            np.testing.assert_array_equal(got, expected)
    tolerance = 1e-13 if dtype == "float64" else 2e-5
    train(models, Oracle(spec, weights, schedule[0]), schedule, tolerance)
    close_all(models)


RULES = [
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9),
    SGD(lr=0.1, momentum=0.9, dampening=0.3),
    SGD(lr=0.05, momentum=0.9, nesterov=True),
    SGD(lr=0.1, weight_decay=0.01),
    SGD(lr=0.01, momentum=0.8, weight_decay=0.1, maximize=True),
    SGD(lr=0.05, momentum=0.9, weight_decay=0.01, nesterov=True, maximize=True),
    Adam(lr=0.01),
    Adam(lr=0.01, betas=(0.8, 0.99), weight_decay=0.1, maximize=True),
    Adam(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    Adam(lr=0.01, amsgrad=True),
]


@paths
@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
def test_100_steps_equal_torch(pbox: Box, lane: str, shared: bool, rule: Hyper) -> None:
    spec = server_spec(shared, state_arrays=rule.state_arrays)
    run(pbox, spec, lane, [[rule]] * 100)


@paths
def test_groups_and_a_rate_that_changes_every_step(pbox: Box, lane: str, shared: bool) -> None:
    spec = server_spec(shared, groups=[0, 1, 2, 0, 1, 4])  # group 3 has no keys
    schedule = []
    for step in range(30):
        lr = 0.1 / (1 + step)
        schedule.append(
            [
                SGD(lr=lr, momentum=0.9),
                SGD(lr=2 * lr, momentum=0.5, nesterov=True),
                SGD(lr=lr, weight_decay=0.1),
                SGD(lr=lr),
                SGD(lr=lr, momentum=0.9 if step % 3 else 0.0),  # outlives steps without it
            ]
        )
    run(pbox, spec, lane, schedule)


@paths
def test_double_precision(pbox: Box, lane: str, shared: bool) -> None:
    rule = SGD(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01)
    run(pbox, server_spec(shared, dtype=DType.FLOAT64), lane, [[rule]] * 20)


@paths
@pytest.mark.parametrize("chunk_bytes", [4 << 10, 2 << 20])
def test_small_and_large_chunks(pbox: Box, lane: str, shared: bool, chunk_bytes: int) -> None:
    shapes: list[tuple[int, ...]] = [*[(1,)] * 50, (0,), (1023,), (1024,), (1025,), (200_000,)]
    spec = server_spec(shared, shapes=shapes)
    run(pbox, spec, lane, [[SGD(lr=0.1, momentum=0.9)]] * 4, chunk_bytes=chunk_bytes)


@paths
def test_eight_workers(pbox: Box, lane: str, shared: bool) -> None:
    run(pbox, server_spec(shared), lane, [[SGD(lr=0.1, momentum=0.9)]] * 10, size=8)


@paths
def test_a_model_without_elements(pbox: Box, lane: str, shared: bool) -> None:
    run(pbox, server_spec(shared, shapes=[(0,), (3, 0)]), lane, [[SGD()]] * 3)
    models = joined(pbox, 2, server_spec(shared, shapes=[]), lane)
    assert together(2, lambda rank: models[rank].initialize([])) == [[], []]
    assert together(2, lambda rank: models[rank].step([])) == [[], []]
    close_all(models)


# --- 16-bit weights with a master in single precision ---


def to_float(array: np.ndarray, dtype: DType) -> np.ndarray:
    """16-bit floats as float32; bfloat16 stands in uint16."""
    if dtype is DType.FLOAT16:
        return array.astype(np.float32)
    return (array.astype(np.uint32) << 16).view(np.float32)


def to_16bit(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Rounded to nearest even."""
    if dtype is DType.FLOAT16:
        return array.astype(np.float16)
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@paths
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_16bit_weights_have_a_master(pbox: Box, lane: str, shared: bool, dtype: DType) -> None:
    """The steps are too small for 16 bits, so only a wider copy can add them up."""
    spec, size = server_spec(shared, dtype=dtype), 2
    models = joined(pbox, size, spec, lane)
    weights = [to_16bit(w, dtype) for w in randoms(0, spec)]
    together(size, lambda rank: models[rank].initialize(weights))
    master = [to_float(w, dtype) for w in weights]
    momentum = [np.zeros_like(m) for m in master]
    rule = SGD(lr=1e-4, momentum=0.9, weight_decay=0.01)
    for step in range(20):
        gradients = [
            [to_16bit(g, dtype) for g in randoms(100 * step + r + 1, spec)] for r in (0, 1)
        ]
        for key in range(len(master)):
            total = sum(to_float(gradients[rank][key], dtype) for rank in range(size))
            g = total * np.float32(0.5) + np.float32(rule.weight_decay) * master[key]
            momentum[key] = g if step == 0 else np.float32(rule.momentum) * momentum[key] + g
            master[key] = master[key] - np.float32(rule.lr) * momentum[key]

        def one(rank: int, gradients: Any = gradients) -> list[np.ndarray]:
            models[rank].exchange.set_hyper([rule])
            return models[rank].step(gradients[rank])

        results = together(size, one)
    for result in results:
        for got, expected in zip(result, master, strict=True):
            np.testing.assert_array_equal(got, to_16bit(expected, dtype))
    moved = to_16bit(master[0], dtype) != weights[0]
    assert moved.mean() > 0.3
    close_all(models)


# --- gradients that are not there ---


@paths
def test_a_key_without_gradient(pbox: Box, lane: str, shared: bool) -> None:
    """By all ranks: weights and momentum stay. By some: counts as zeros."""
    spec, size = server_spec(shared), 3
    models = joined(pbox, size, spec, lane)
    weights = randoms(0, spec)
    together(size, lambda rank: models[rank].initialize(weights))
    rule = [SGD(lr=0.1, momentum=0.9, weight_decay=0.1)]
    oracle = Oracle(spec, weights, rule)
    random = np.random.default_rng(5)
    for step in range(40):
        gradients = gradients_of(step, spec, size)
        for key in range(len(spec.keys)):
            none_by = random.choice([0, 0, 1, 2, 3])
            for rank in random.permutation(size)[:none_by]:
                gradients[rank][key] = None
        oracle.step(gradients, rule)

        def one(rank: int, gradients: Gradients = gradients) -> list[np.ndarray]:
            models[rank].exchange.set_hyper(rule)
            return models[rank].step(gradients[rank])

        for result in together(size, one):
            oracle.check(result, 2e-5)
    close_all(models)


@paths
def test_weights_loaded_in_mid_training_are_adopted(pbox: Box, lane: str, shared: bool) -> None:
    spec = server_spec(shared)
    models = joined(pbox, 2, spec, lane)
    rule = [[SGD(lr=0.1, momentum=0.9)]] * 7
    oracle = Oracle(spec, randoms(0, spec), rule[0])
    together(2, lambda rank: models[rank].initialize(randoms(rank, spec)))
    train(models, oracle, rule, 2e-5)
    loaded = randoms(77, spec)
    for root in (1, 0):  # twice: an even and an odd number of exchanges so far
        for parameter, weight in zip(oracle.parameters, loaded, strict=True):
            parameter.data = torch.from_numpy(weight.copy())
        given = [loaded if rank == root else randoms(9, spec) for rank in (0, 1)]
        for result in together(2, partial(adopt, models, given, root)):
            oracle.check(result, 0)
        train(models, oracle, rule[:3], 2e-5)
    close_all(models)


# --- disagreement ---


@paths
def test_hyperparameters_that_differ_are_named(pbox: Box, lane: str, shared: bool) -> None:
    spec = server_spec(shared)
    models = joined(pbox, 2, spec, lane)
    together(2, lambda rank: models[rank].initialize(randoms(0, spec)))

    def one(rank: int) -> None:
        models[rank].exchange.set_hyper([SGD(lr=0.1, momentum=0.9 - 0.4 * rank)])
        models[rank].step(list(randoms(1, spec)))

    for error in outcomes(2, one):
        assert isinstance(error, MismatchError)
        assert "rank 0 has sgd lr 0.1 weight_decay 0 momentum 0.9" in str(error)
        assert "rank 1 has sgd lr 0.1 weight_decay 0 momentum 0.5" in str(error)
    close_all(models)


@pytest.mark.parametrize("lane", LANES)
def test_hyperparameters_that_one_rank_never_set_are_named(pbox: Box, lane: str) -> None:
    spec = server_spec(False)
    models = joined(pbox, 2, spec, lane)
    together(2, lambda rank: models[rank].initialize(randoms(0, spec)))
    models[0].exchange.set_hyper([SGD()])
    for error in outcomes(2, lambda rank: models[rank].step(list(randoms(1, spec)))):
        assert isinstance(error, MismatchError)
        assert "rank 1 has not set hyperparameters" in str(error)
    close_all(models)


def test_hyperparameters_are_for_the_next_step_and_for_all_groups(pbox: Box) -> None:
    spec = server_spec(False, groups=[0, 1, 0, 0, 0, 0])
    (model,) = joined(pbox, 1, spec, "shm")
    with model:
        model.initialize(randoms(0, spec))
        with pytest.raises(ConfigError, match="expected 2 parameter groups, got 1"):
            model.exchange.set_hyper([SGD()])
        model.exchange.set_hyper([SGD(), SGD()])
        model.exchange.push(0)
        with pytest.raises(ConfigError, match="before it"):
            model.exchange.set_hyper([SGD(), SGD()])


def test_what_no_server_can_optimize_is_refused(pbox: Box) -> None:
    connection = pbox.job(1, "tcp").connect(0)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dtype": DType.INT32}, "no optimizer for 'p0' of int32"),
        ({"op": ReduceOp.MAX}, "summed or averaged"),
        ({"place": "nowhere"}, "place='nowhere'"),
        ({"place": "worker", "shared_model": True}, "optimizer on the server"),
        ({"shared_model": True}, "shm lanes"),  # over tcp nothing can be shared
    ]
    for fields, text in cases:
        with pytest.raises(ConfigError, match=text):
            PboxExchange(connection, spec_of([(3,)], **{"place": "server", **fields}), 4096)
    connection.close()


# --- the shared model ---


def test_a_workers_own_writes_reach_nobody_and_can_be_undone(pbox: Box) -> None:
    spec = server_spec(True)
    models = joined(pbox, 2, spec, "shm")
    weights = randoms(0, spec)
    together(2, lambda rank: models[rank].initialize(weights))
    oracle = Oracle(spec, weights, [SGD(lr=0.1)])
    for step in range(4):  # in both buffers
        models[0].view(0, result=True)[...] = 1e9
        gradients = gradients_of(step, spec, 2)
        oracle.step(gradients, [SGD(lr=0.1)])

        def one(rank: int, gradients: Gradients = gradients) -> list[np.ndarray]:
            models[rank].exchange.set_hyper([SGD(lr=0.1)])
            return models[rank].step(gradients[rank])

        oracle.check(together(2, one)[1], 2e-5)
    # Whatever a rank wrote into its own pages is forgotten when weights are adopted.
    loaded = randoms(1, spec)
    together(2, lambda rank: models[rank].initialize(loaded))
    for model in models:
        np.testing.assert_array_equal(model.view(0, result=True), loaded[0])
    oracle = Oracle(spec, loaded, [SGD(lr=0.1)])
    train(models, oracle, [[SGD(lr=0.1)]] * 2, 2e-5)
    close_all(models)


def test_results_alternate_between_the_two_buffers_without_a_copy(pbox: Box) -> None:
    spec = server_spec(True)
    (model,) = joined(pbox, 1, spec, "shm")
    with model:
        model.initialize(randoms(0, spec))
        places = []
        for step in range(4):
            model.exchange.set_hyper([SGD(lr=0.1)])
            model.step(list(randoms(step, spec)))
            places.append(model.exchange.result.__array_interface__["data"][0])
        assert places[0] == places[2]
        assert places[1] == places[3]
        assert places[0] != places[1]
