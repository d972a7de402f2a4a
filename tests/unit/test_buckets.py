"""Gradients grouped into buckets: the plan, and when a bucket is handed to the backend."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phub_collective.backends.base import (
    SGD,
    Backend,
    Context,
    DType,
    ExchangeSpec,
    Key,
    Kind,
    Operation,
    ReduceOp,
    Work,
    layout,
)
from phub_collective.backends.buckets import BucketExchange, plan
from phub_collective.backends.compression import Compression
from phub_collective.backends.operations import first_difference
from phub_collective.config import Config
from phub_collective.errors import ConfigError
from phub_collective.rendezvous import LocalRendezvous


class Recorder(Backend):
    """A job of one rank that doubles what is reduced and keeps what was submitted."""

    name = "recorder"

    def __init__(self) -> None:
        self.context = Context(0, 1, 0, 1, LocalRendezvous(), Config())
        self.submitted: list[Operation] = []

    def submit(self, operation: Operation) -> Work:
        self.submitted.append(operation)
        assert operation.buffer is not None
        if operation.kind is Kind.ALLREDUCE:
            operation.buffer.array()[:] *= 2
        return Done()

    def close(self) -> None:
        pass


class Done:
    """Finished; keeps the timeouts of those who waited, and takes `seconds` of each."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.timeouts: list[float | None] = []

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        self.timeouts.append(timeout)
        time.sleep(self.seconds)


def keys_of(*counts: int, dtype: DType = DType.FLOAT32) -> list[Key]:
    return [Key(f"k{i}", (count,), dtype) for i, count in enumerate(counts)]


def opened(
    keys: Sequence[Key], bucket_bytes: int, compression: str = "none"
) -> tuple[Recorder, BucketExchange]:
    backend = Recorder()
    spec = ExchangeSpec(
        "model", keys, ReduceOp.SUM, bucket_bytes=bucket_bytes,
        compression=Compression.of(compression),
    )  # fmt: skip
    return backend, BucketExchange(backend, backend.context, spec)


def values(exchange: BucketExchange, key: int, count: int) -> np.ndarray:
    begin = exchange.offsets[key]
    return exchange.arena[begin : begin + 4 * count].view(np.float32)


@given(
    counts=st.lists(st.integers(0, 400), max_size=20),
    dtypes=st.lists(st.sampled_from([DType.FLOAT32, DType.FLOAT16]), min_size=20, max_size=20),
    limit=st.integers(1, 4000),
)
def test_plan_covers_the_keys_backwards(counts: list[int], dtypes: list[DType], limit: int) -> None:
    keys = [Key(f"k{i}", (n,), d) for i, (n, d) in enumerate(zip(counts, dtypes, strict=False))]
    offsets, _ = layout(keys)
    ends = [offset + key.nbytes for offset, key in zip(offsets, keys, strict=True)]
    buckets = plan([key.dtype for key in keys], offsets, ends, limit)
    assert [key for bucket in buckets for key in bucket.keys] == list(reversed(range(len(keys))))
    for bucket in buckets:
        assert {keys[key].dtype for key in bucket.keys} == {bucket.dtype}
        assert (bucket.begin, bucket.end) == (offsets[bucket.keys[-1]], ends[bucket.keys[0]])
        assert bucket.end - bucket.begin <= limit or len(bucket.keys) == 1
        assert (bucket.end - bucket.begin) % bucket.dtype.itemsize == 0


def test_a_bucket_is_submitted_with_its_last_key() -> None:
    backend, exchange = opened(keys_of(16, 16, 16), bucket_bytes=128)
    exchange.push(2)
    assert backend.submitted == []
    exchange.push(0)  # alone in its bucket: 1 and 2 fill the other
    exchange.push(1)
    assert [o.buffer.count for o in backend.submitted if o.buffer] == [16, 32]
    assert len({o.name for o in backend.submitted}) == 2
    exchange.wait()
    assert exchange.counters.pushed == 3 * 64
    assert exchange.counters.steps == 1


def test_steps_repeat_with_the_same_names() -> None:
    backend, exchange = opened(keys_of(4, 4), bucket_bytes=1 << 20)
    for step in range(3):
        for key in (0, 1):
            values(exchange, key, 4)[:] = step
            exchange.push(key)
        exchange.wait()
        assert (values(exchange, 0, 4) == 2 * step).all()
    assert len({operation.name for operation in backend.submitted}) == 1


def test_no_gradient_counts_as_zeros() -> None:
    _, exchange = opened(keys_of(4, 4), bucket_bytes=1 << 20)
    exchange.arena[:] = 255
    exchange.push(0, no_grad=True)
    values(exchange, 1, 4)[:] = 3
    exchange.push(1)
    exchange.wait()
    assert (values(exchange, 0, 4) == 0).all()
    assert (values(exchange, 1, 4) == 6).all()


def test_wrong_use_is_an_error_that_names_the_key() -> None:
    _, exchange = opened(keys_of(4, 4), bucket_bytes=16)
    exchange.push(0)
    with pytest.raises(ConfigError, match="'k0' was pushed twice"):
        exchange.push(0)
    with pytest.raises(ConfigError, match="'k1'"):
        exchange.wait()


@pytest.mark.parametrize("wrong", [{"place": "server"}, {"shared_model": True}])
def test_what_needs_a_server_is_refused(wrong: dict[str, object]) -> None:
    backend = Recorder()
    spec = ExchangeSpec("model", keys_of(4), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pbox"):
        backend.open_exchange(spec)


@pytest.mark.parametrize(
    ("compression", "dtype"), [("fp16", DType.FLOAT16), ("bf16", DType.BFLOAT16)]
)
def test_a_cast_is_reduced_in_16_bits(compression: str, dtype: DType) -> None:
    pytest.importorskip("phub_collective.backends.native._core")
    backend, exchange = opened(keys_of(5, 33), 16, compression)
    for step in range(3):
        for key, count in ((1, 33), (0, 5)):
            values(exchange, key, count)[:] = 1 + step + 2.0**-20  # is lost on the way
            exchange.push(key)
        exchange.wait_key(1)
        if dtype is DType.FLOAT16:
            assert (values(exchange, 1, 33) == 2 * (1 + step)).all()
        before = values(exchange, 1, 33).copy()
        exchange.wait()
        np.testing.assert_array_equal(values(exchange, 1, 33), before)  # brought back once
        np.testing.assert_array_equal(values(exchange, 0, 5), before[:5])
    assert {o.buffer.dtype for o in backend.submitted if o.buffer} == {dtype}
    assert exchange.counters.pushed == 3 * (5 + 33) * 2


def test_weights_are_never_cast() -> None:
    pytest.importorskip("phub_collective.backends.native._core")
    backend, exchange = opened(keys_of(5), 16, "fp16")
    exchange.initialize()
    assert [o.buffer.dtype for o in backend.submitted if o.buffer] == [DType.FLOAT32]


@pytest.mark.parametrize("compression", ["two_bit", "one_bit", "topk"])
def test_what_only_a_server_can_add_up_is_refused(compression: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[recorder\] compression {compression}.*use the pbox"):
        opened(keys_of(4), 16, compression)
    with pytest.raises(ConfigError, match="takes float32 gradients"):
        opened(keys_of(4, dtype=DType.FLOAT64), 16, "fp16")


def test_hyperparameters_are_refused() -> None:
    _, exchange = opened(keys_of(4), bucket_bytes=16)
    with pytest.raises(ConfigError, match="optimizer"):
        exchange.set_hyper([SGD()])


def test_the_timeout_of_a_step_is_not_that_of_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Done(seconds=0.05)
    monkeypatch.setattr(Recorder, "submit", lambda *_: work)
    _, exchange = opened(keys_of(1, 1, 1), 1)
    for timeout in (None, 0.08):
        for key in range(3):
            exchange.push(key)
        exchange.wait(timeout)
    assert work.timeouts[:3] == [None] * 3
    first, second, third = (timeout for timeout in work.timeouts[3:] if timeout is not None)
    assert first > second
    assert second <= 0.03
    assert third == 0.0


def test_the_first_difference_is_named() -> None:
    assert first_difference(["a", "b"], ["a", "c"], "rank 0", "rank 2") == (
        "entry 1: rank 0 has b, rank 2 has c"
    )
    assert "rank 2 has nothing" in first_difference(["a", "b"], ["a"], "rank 0", "rank 2")
