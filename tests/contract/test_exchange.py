"""The exchange of a model over every backend: exact, in any order of keys, agreed by all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from contract import checks
from contract.cases import encode
from contract.jobs import Job, lineup

from phub_collective.backends.base import Backend, DType, Exchange, ExchangeSpec, Key, ReduceOp
from phub_collective.backends.compression import Compression
from phub_collective.errors import MismatchError

KEYS = [
    Key("conv.weight", (8, 3, 3, 3), DType.FLOAT32),
    Key("conv.bias", (8,), DType.FLOAT32),
    Key("nothing", (0, 5), DType.FLOAT32),
    Key("half", (33,), DType.FLOAT16),
    Key("brain", (257,), DType.BFLOAT16),
    Key("steps", (1,), DType.INT64),
    Key("fc.weight", (300, 210), DType.FLOAT32),
]


def put(exchange: Exchange, key: int, numbers: np.ndarray) -> None:
    begin = exchange.offsets[key]
    exchange.arena[begin : begin + KEYS[key].nbytes] = encode(numbers, KEYS[key].dtype)


def check(exchange: Exchange, key: int, numbers: np.ndarray) -> None:
    begin = exchange.offsets[key]
    got = exchange.result[begin : begin + KEYS[key].nbytes]
    assert np.array_equal(got, encode(numbers, KEYS[key].dtype)), KEYS[key].name


def exchanges_are_exact(backend: Backend, op: ReduceOp, bucket_bytes: int) -> None:
    """Keys pushed in another order on each rank, for several steps; one rank has no gradient for
    one key in each step."""
    rank, size = backend.context.rank, backend.context.size
    spec = ExchangeSpec(f"model.{op.name}", KEYS, op, bucket_bytes=bucket_bytes)
    exchange = backend.open_exchange(spec)
    shuffle = random.Random(rank)
    order = list(range(len(KEYS)))
    factor = 1 if op is ReduceOp.SUM else 1 / size
    for step in range(4):
        shuffle.shuffle(order)
        without = step % len(KEYS)
        for key in order:
            pattern = np.arange(KEYS[key].count) % 3 * size
            put(exchange, key, pattern + size * rank)
            exchange.push(key, no_grad=key == without and rank == size - 1)
        exchange.wait_key(0, checks.WAIT_S)
        exchange.wait(checks.WAIT_S)
        for key in order:
            having = size - 1 if key == without else size
            pattern = np.arange(KEYS[key].count) % 3 * size
            check(exchange, key, (having * pattern + size * sum(range(having))) * factor)
    assert exchange.counters.steps == 4
    assert exchange.counters.pushed >= 4 * sum(key.nbytes for key in KEYS[:-1])
    exchange.close()


def initialize_makes_all_equal(backend: Backend) -> None:
    rank, size = backend.context.rank, backend.context.size
    exchange = backend.open_exchange(ExchangeSpec("weights", KEYS))
    for root in (0, size - 1):
        for key, entry in enumerate(KEYS):
            put(exchange, key, np.full(entry.count, 10 * root + rank))
        exchange.initialize(root)
        for key, entry in enumerate(KEYS):
            check(exchange, key, np.full(entry.count, 10 * root + root))
    exchange.close()


def casts_are_exact_on_what_16_bits_hold(backend: Backend) -> None:
    rank, size = backend.context.rank, backend.context.size
    floats = [key for key in KEYS if key.dtype is DType.FLOAT32]
    for name in ("fp16", "bf16"):
        spec = ExchangeSpec(name, floats, ReduceOp.SUM, compression=Compression.of(name))
        exchange = backend.open_exchange(spec)
        for step in range(3):
            for index, key in enumerate(floats):
                begin, numbers = exchange.offsets[index], np.arange(key.count) % 5 + rank + step
                exchange.arena[begin : begin + key.nbytes] = encode(numbers, key.dtype)
                exchange.push(index)
            exchange.wait(checks.WAIT_S)
            for index, key in enumerate(floats):
                begin = exchange.offsets[index]
                got = exchange.result[begin : begin + key.nbytes]
                total = size * (np.arange(key.count) % 5 + step) + sum(range(size))
                assert np.array_equal(got, encode(total, key.dtype)), (name, key.name)
        exchange.close()


def tables_are_compared(backend: Backend) -> None:
    keys = list(KEYS)
    if backend.context.rank == 1:
        keys[1] = Key("conv.bias", (9,), DType.FLOAT32)
    with pytest.raises(MismatchError) as caught:
        backend.open_exchange(ExchangeSpec("unequal", keys))
    text = str(caught.value)
    assert "conv.bias" in text
    assert "rank 1" in text
    assert "8" in text
    assert "9" in text


def two_models_at_once(backend: Backend) -> None:
    """Two exchanges are open, and their steps overlap."""
    size = backend.context.size
    models = [backend.open_exchange(ExchangeSpec(name, KEYS)) for name in ("a", "b")]
    for _ in range(2):
        for key, entry in enumerate(KEYS):
            for model in models if backend.context.rank % 2 else reversed(models):
                put(model, key, np.full(entry.count, size))
                model.push(key)
        for model in models:
            model.wait(checks.WAIT_S)
            for key, entry in enumerate(KEYS):
                check(model, key, np.full(entry.count, size))
    for model in models:
        model.close()


@pytest.mark.parametrize("job", lineup(1, 2, 3, 8), indirect=True)
@pytest.mark.parametrize(
    ("op", "bucket_bytes"), [(ReduceOp.SUM, 4096), (ReduceOp.AVERAGE, 1 << 20)]
)
def test_exchanges_are_exact(job: Job, op: ReduceOp, bucket_bytes: int) -> None:
    job.check(exchanges_are_exact, op, bucket_bytes)


@pytest.mark.parametrize("job", lineup(1, 2, 3, 8), indirect=True)
@pytest.mark.parametrize(
    "promise",
    [initialize_makes_all_equal, two_models_at_once, casts_are_exact_on_what_16_bits_hold],
)
def test_promise(job: Job, promise: Callable[..., None]) -> None:
    job.check(promise)


@pytest.mark.parametrize("arguments", lineup(3))
def test_tables_are_compared(
    fresh_job: Callable[..., Job], arguments: tuple[str, str, int]
) -> None:
    fresh_job(*arguments).check(tables_are_compared)
