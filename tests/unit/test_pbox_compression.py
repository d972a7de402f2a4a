"""Packed gradients through a PBox, over real lanes, against their NumPy twins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pbox_jobs import LANES, SOON, Box, Job, Model, box, outcomes, spec_of, together

from phub_collective.backends.base import SGD, DType, ExchangeSpec, ReduceOp
from phub_collective.backends.compression import Compression
from phub_collective.backends.pbox.exchange import PboxExchange
from phub_collective.backends.pbox.keytable import TableSpec
from phub_collective.errors import ConfigError, MismatchError, ProtocolError
from phub_collective.kernels import reference
from phub_collective.kernels.packed_reference import Sender

CHUNK_BYTES = 4 << 10
SHAPES: list[tuple[int, ...]] = [(40, 25), (0,), (7,), (), (3, 5, 2), (5000,)]
STEPS = 5
Gradients = list[list[np.ndarray | None]]  # by rank and key

each_lane = pytest.mark.parametrize("lane", LANES)
each_choice = pytest.mark.parametrize(
    "compression", ["fp16", "bf16", "two_bit:0.7", "one_bit", "topk:0.05"]
)


@pytest.fixture(scope="module")
def pbox() -> Iterator[Box]:
    with box() as made:
        yield made


def packed_spec(compression: str, **fields: Any) -> ExchangeSpec:
    return spec_of(compression=Compression.of(compression), **{"shapes": SHAPES, **fields})


def gradients_of(step: int, size: int) -> Gradients:
    """Some keys without a gradient on some ranks, and one on all of them."""
    random = np.random.default_rng(step)
    gradients: Gradients = [
        [random.standard_normal(shape).astype(np.float32) for shape in SHAPES] for _ in range(size)
    ]
    if step % 3 == 0:
        gradients[step % size][0] = None
    for rank in range(size):
        if step % 2:
            gradients[rank][4] = None
    return gradients


class Twin:
    """What the server adds up in each step, by rank and key."""

    def __init__(self, spec: ExchangeSpec, size: int) -> None:
        self._spec = spec
        self._senders = [
            [Sender(spec.compression, key.count, CHUNK_BYTES // 4) for key in spec.keys]
            for _ in range(size)
        ]

    def sums(self, gradients: Gradients, prescale: float = 1.0) -> list[np.ndarray | None]:
        """Of each key; None where no rank has a gradient."""
        sums: list[np.ndarray | None] = []
        for key, entry in enumerate(self._spec.keys):
            arrived = [
                senders[key].arrives(gradient.reshape(-1)) * np.float32(prescale)
                for senders, given in zip(self._senders, gradients, strict=True)
                if (gradient := given[key]) is not None
            ]
            sums.append(np.add.reduce(arrived).reshape(entry.shape) if arrived else None)
        return sums


def opened(pbox: Box, size: int, spec: ExchangeSpec, lane: str) -> list[Model]:
    job = pbox.job(size, lane, CHUNK_BYTES)
    return together(size, lambda rank: job.exchange(rank, spec))


def close_all(models: list[Model]) -> None:
    together(len(models), lambda rank: models[rank].close())


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for the order in which the core has added."""
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@each_lane
@each_choice
@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums_equal_their_twin(pbox: Box, lane: str, size: int, compression: str) -> None:
    spec = packed_spec(compression, op=ReduceOp.SUM, prescale=0.5, postscale=4.0)
    models, twin = opened(pbox, size, spec, lane), Twin(spec, size)
    for step in range(STEPS):
        gradients = gradients_of(step, size)
        expected = twin.sums(gradients, 0.5)

        def one(rank: int, gradients: Gradients = gradients) -> list[np.ndarray]:
            return models[rank].step(gradients[rank])

        for results in together(size, one):
            for got, total in zip(results, expected, strict=True):
                assert_close(got, np.zeros_like(got) if total is None else 4 * total)
    close_all(models)


@each_lane
@each_choice
def test_the_server_steps_with_what_arrives(pbox: Box, lane: str, compression: str) -> None:
    """Weights come and go in full precision; a key without gradients is left alone."""
    size, hyper = 3, SGD(lr=0.1, momentum=0.9, weight_decay=0.01)
    spec = packed_spec(compression, place="server")
    models, twin = opened(pbox, size, spec, lane), Twin(spec, size)
    weights: list[np.ndarray] = [
        np.random.default_rng(key).standard_normal(shape).astype(np.float32)
        for key, shape in enumerate(SHAPES)
    ]
    for results in together(size, lambda rank: models[rank].initialize(weights)):
        for got, weight in zip(results, weights, strict=True):
            np.testing.assert_array_equal(got, weight)
    momenta: list[np.ndarray | None] = [None] * len(SHAPES)
    for step in range(STEPS):
        gradients = gradients_of(step, size)
        for key, total in enumerate(twin.sums(gradients)):
            if total is not None:
                weights[key], momenta[key] = reference.sgd(
                    hyper, weights[key], momenta[key], total, 1 / size
                )

        def one(rank: int, gradients: Gradients = gradients) -> list[np.ndarray]:
            models[rank].exchange.set_hyper([hyper])
            return models[rank].step(gradients[rank])

        for results in together(size, one):
            for got, weight in zip(results, weights, strict=True):
                assert_close(got, weight)
    close_all(models)


@each_lane
def test_residuals_outlive_an_adoption_of_weights(pbox: Box, lane: str) -> None:
    spec = packed_spec("two_bit:1.0", shapes=[(3,)], op=ReduceOp.SUM)
    (model,) = opened(pbox, 1, spec, lane)
    assert model.step([np.array([0.75, -0.75, 0.25], np.float32)])[0].tolist() == [0, 0, 0]
    weights = np.array([0.1, 1e-7, 1e9], np.float32)
    np.testing.assert_array_equal(model.initialize([weights])[0], weights)
    assert model.step([np.array([0.75, 0.25, 0.25], np.float32)])[0].tolist() == [1, 0, 0]
    close_all([model])


@each_lane
@pytest.mark.parametrize(
    ("compression", "least"), [("fp16", 1.9), ("two_bit", 15), ("one_bit", 29), ("topk:0.01", 45)]
)
def test_what_travels_is_packed(pbox: Box, lane: str, compression: str, least: float) -> None:
    """On shm as well: a packed gradient is payload of its lane."""
    count = 1 << 18
    spec = packed_spec(compression, shapes=[(count,)], op=ReduceOp.SUM)
    (model,) = together(1, lambda _: pbox.job(1, lane).exchange(0, spec))
    model.step([np.ones(count, np.float32)])
    headers = 16 * (4 * count // (32 << 10))
    assert 4 * count / (model.exchange.counters.pushed - headers) >= least
    close_all([model])


# --- what is refused ---


def test_what_cannot_be_compressed_is_refused(pbox: Box) -> None:
    connection = pbox.job(1, "shm").connect(0)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"dtype": DType.FLOAT64}, "two_bit:0.5 takes float32 gradients; 'p0' is of float64"),
        ({"dtype": DType.FLOAT16}, "'p0' is of float16"),
        ({"dtype": DType.INT32}, "'p0' is of int32"),
        ({"place": "server", "shared_model": True}, "with shared_model=True"),
    ]
    for fields, text in cases:
        spec = packed_spec("two_bit", shapes=[(3,)], **fields)
        with pytest.raises(ConfigError, match=text):
            PboxExchange(connection, spec, CHUNK_BYTES)
    connection.close()


def test_ranks_that_compress_differently_are_named(pbox: Box) -> None:
    job = pbox.job(2, "tcp")
    specs = [packed_spec("two_bit:0.5"), packed_spec("two_bit:0.25")]
    for error in outcomes(2, lambda rank: job.exchange(rank, specs[rank])):
        assert isinstance(error, MismatchError)
        assert "rank 0 has" in str(error)
        assert "compression two_bit:0.5" in str(error)
        assert "compression two_bit:0.25" in str(error)


def table(**fields: Any) -> TableSpec:
    keys = spec_of([(10,)]).keys
    made = TableSpec("t", tuple(keys), ReduceOp.SUM, 1.0, 1.0, CHUNK_BYTES, model=True)
    return replace(made, **fields)


@pytest.mark.parametrize(
    "packing",
    [
        {"packing": 6, "parameter": 0.0},
        {"packing": 3, "parameter": -1.0},
        {"packing": 3, "parameter": float("nan")},
        {"packing": 5, "parameter": 0.75},
        {"packing": 3},
        3,
        None,
    ],
)
def test_a_hostile_compression_is_no_key_table(packing: object) -> None:
    message = {**table().to_json(), "compression": packing}
    with pytest.raises(ProtocolError, match="malformed key table"):
        TableSpec.from_json(message)
    good = table(compression=Compression.of("topk:0.25"))
    assert TableSpec.from_json(good.to_json()) == good


def register(job: Job, spec: TableSpec) -> object:
    """What the server answers to a table that no honest worker would register."""
    answers: list[object] = []
    answered = threading.Event()

    def on_registered(found: object, error: object) -> None:
        answers.append(error or found)
        answered.set()

    connection = job.connect(0)
    connection.register(spec, on_registered)
    assert answered.wait(SOON)
    connection.close()
    return answers[0]


@pytest.mark.parametrize("fields", [{"shared": True, "server": True}, {"op": ReduceOp.MAX}])
def test_the_server_checks_what_a_client_did_not(pbox: Box, fields: dict[str, Any]) -> None:
    spec = table(compression=Compression.of("one_bit"), **fields)
    error = register(pbox.job(1, "shm"), spec)
    assert isinstance(error, ConfigError)
    assert "expected a known packing of float32 gradients" in str(error)
