"""Collectives and state, as every rank runs them in tests with real processes. Each function
asserts for itself; what it returns is compared between the ranks by the test."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import phub_collective.torch as hvd
from phub_collective.backends.base import Operation, Work
from phub_collective.backends.operations import describe
from phub_collective.errors import ConfigError, MismatchError
from phub_collective.torch import context


def identity() -> tuple[int, ...]:
    return (
        hvd.rank(),
        hvd.size(),
        hvd.local_rank(),
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
    )


def reduce_every_dtype() -> None:
    n, r = hvd.size(), hvd.rank()
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.int8,
    ):
        x = (torch.arange(10) + r).to(dtype)
        everyone = torch.stack([torch.arange(10) + other for other in range(n)])
        expected = {
            hvd.Sum: everyone.sum(0),
            hvd.Min: everyone.amin(0),
            hvd.Max: everyone.amax(0),
            hvd.Product: everyone.prod(0),
        }
        for op, values in expected.items():
            assert torch.equal(hvd.allreduce(x, op=op), values.to(dtype)), (dtype, op)
    flags = torch.tensor([True, r == 0, False])
    assert hvd.allreduce(flags, op=hvd.Sum).tolist() == [True, True, False]
    assert hvd.allreduce(flags, op=hvd.Product).tolist() == [True, n == 1, False]


def reduce_in_all_spellings() -> None:
    n, r = hvd.size(), hvd.rank()
    mean = sum(range(n)) / n
    x = torch.full((3, 4), float(r))
    assert torch.equal(hvd.allreduce(x), torch.full((3, 4), mean))
    assert torch.equal(x, torch.full((3, 4), float(r)))
    handle = hvd.allreduce_async(x, name="mean")
    assert hvd.synchronize(handle)[0, 0] == mean
    assert hvd.poll(handle)
    assert hvd.synchronize(handle)[0, 0] == mean
    version = x._version
    assert hvd.allreduce_(x, op=hvd.Sum) is x
    assert x[0, 0] == n * mean
    assert x._version > version
    y = torch.arange(12.0).view(3, 4).t()  # not contiguous
    assert hvd.synchronize(hvd.allreduce_async_(y, op=hvd.Sum)) is y
    assert torch.equal(y, n * torch.arange(12.0).view(3, 4).t())
    scaled = hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert scaled.tolist() == [2.0 * n] * 2
    assert hvd.allreduce(torch.tensor(7)).shape == ()
    assert hvd.allreduce(torch.zeros(0)).numel() == 0
    with pytest.warns(DeprecationWarning, match="op=hvd.Average"):
        assert hvd.allreduce(torch.ones(1), average=False).item() == n


def reduce_groups() -> None:
    n = hvd.size()

    def tensors() -> list[torch.Tensor]:
        return [torch.ones(3), torch.arange(4), torch.full((2, 2), 2.0), torch.zeros(0)]

    for result in (
        hvd.grouped_allreduce(tensors(), op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(tensors(), op=hvd.Sum, name="group")),
        hvd.grouped_allreduce_(tensors(), op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async_(tensors(), op=hvd.Sum)),
    ):
        for got, one in zip(result, tensors(), strict=True):
            assert torch.equal(got, n * one)
    inplace = tensors()
    assert hvd.grouped_allreduce_(inplace)[2] is inplace[2]
    assert hvd.grouped_allreduce([]) == []


def reduce_in_16_bits() -> None:
    """The result has the tensor's type and 16 bits' precision; integers are left alone."""
    n = hvd.size()
    x: Any = torch.full((3,), 1 + 2.0**-20, requires_grad=True)
    for compression in (hvd.Compression.fp16, hvd.Compression.bf16):
        result = hvd.allreduce(x, op=hvd.Sum, compression=compression)
        assert result.dtype is torch.float32
        assert result.tolist() == [n] * 3
    result.sum().backward()
    assert x.grad.tolist() == [n] * 3
    pair = [torch.full((2,), 1 + 2.0**-40, dtype=torch.float64), torch.arange(3)]
    found = hvd.grouped_allreduce(pair, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert [one.dtype for one in found] == [torch.float64, torch.int64]
    assert found[0].tolist() == [n] * 2
    assert found[1].tolist() == [0, n, 2 * n]
    with pytest.raises(ConfigError, match="pass it to DistributedOptimizer"):
        hvd.allreduce(torch.ones(1), compression=hvd.Compression.one_bit)


def submit_in_different_orders() -> None:
    """Named operations meet by name; each rank waits for its last one first."""
    names = [f"t{i}" for i in range(6)]
    mine = names if hvd.rank() % 2 == 0 else names[::-1]
    handles = {
        name: hvd.allreduce_async(torch.full((5,), float(name[1])), name=name, op=hvd.Sum)
        for name in mine
    }
    for name in reversed(mine):
        assert hvd.synchronize(handles[name])[0] == float(name[1]) * hvd.size()


def differentiate() -> None:
    n, r = hvd.size(), hvd.rank()
    x: Any = torch.full((2,), float(r + 1), requires_grad=True)
    ((r + 1.0) * hvd.allreduce(x, op=hvd.Sum)).sum().backward()
    total = n * (n + 1) / 2
    assert x.grad.tolist() == [total, total]
    x.grad = None
    a, b = hvd.grouped_allreduce([x, 2 * x], op=hvd.Average, name="pair")
    (a.sum() + b.sum()).backward()
    assert x.grad.tolist() == [3.0, 3.0]
    x.grad = None
    (hvd.broadcast(x, 0) * (r + 1.0)).sum().backward()
    assert x.grad.tolist() == ([total / n] * 2 if r == 0 else [0.0, 0.0])
    with pytest.raises(ConfigError, match="op=Max has no gradient"):
        hvd.allreduce(x, op=hvd.Max).sum().backward()


def broadcast_everything() -> None:
    n, r = hvd.size(), hvd.rank()
    for root in range(n):
        x = torch.full((3,), float(r))
        assert hvd.broadcast(x, root).tolist() == [root] * 3
        assert x.tolist() == [r] * 3
        assert hvd.synchronize(hvd.broadcast_async(x, root, name="b")).tolist() == [root] * 3
        assert hvd.broadcast_(x, root) is x
        assert x.tolist() == [root] * 3
    odd = torch.full((4,), 1j * r, dtype=torch.complex64)  # moved, though never reduced
    assert hvd.synchronize(hvd.broadcast_async_(odd, n - 1)).tolist() == [1j * (n - 1)] * 4
    with pytest.raises(ConfigError, match="root_rank=99"):
        hvd.broadcast(torch.ones(1), 99)
    hvd.barrier()


def refuse_bad_tensors() -> None:
    with pytest.raises(ConfigError, match="is complex64; expected one of"):
        hvd.allreduce(torch.ones(1, dtype=torch.complex64))
    with pytest.raises(ConfigError, match="is on meta; expected host memory"):
        hvd.allreduce_(torch.ones(1, device="meta"))
    with pytest.raises(ConfigError, match="expected a dense tensor"):
        hvd.broadcast(torch.ones(2).to_sparse(), 0)
    with pytest.raises(ConfigError, match="only floating types are scaled"):
        hvd.allreduce(torch.ones(1, dtype=torch.int32), op=hvd.Sum, prescale_factor=2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ConfigError, match="expected only op"):
            hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(ConfigError, match="expected one of hvd"):
        hvd.allreduce(torch.ones(1), op="sum")  # type: ignore[arg-type]


def refuse_different_operations(goes_on: bool) -> list[str]:
    """The errors of unnamed operations that are others on the last rank. First none has had a
    success before; then, if the job `goes_on` after the error of a name in use, all have."""
    odd = hvd.rank() == hvd.size() - 1
    attempts: list[Callable[[], object]] = [
        lambda: hvd.allreduce(torch.ones(100_001 if odd else 100_000)),
        lambda: hvd.allreduce(torch.ones(10, dtype=torch.float64 if odd else torch.float32)),
        lambda: hvd.allreduce(torch.ones(10), op=hvd.Sum if odd else hvd.Average),
        lambda: hvd.broadcast(torch.ones(10), 0) if odd else hvd.allreduce(torch.ones(10)),
        lambda: hvd.barrier() if odd else hvd.allreduce_(torch.ones(10)),
        lambda: hvd.grouped_allreduce([torch.ones(4)] * (3 if odd else 2)),
        lambda: hvd.allreduce(torch.ones(11 if odd else 10)),
    ]
    texts: list[str] = []
    for attempt in attempts + (attempts if goes_on else attempts[-1:]):
        if len(texts) >= len(attempts):
            for count in (10, 20, 10, 10):
                assert hvd.allreduce(torch.ones(count))[0] == 1
        with pytest.raises(MismatchError) as caught:
            attempt()
        texts.append(str(caught.value))
    return texts


def count_registrations() -> list[int]:
    """How many names are taken in each round of a loop of unlike unnamed operations."""
    used: list[str] = []
    session = context.face().session
    submit = session.submit

    def count(operation: Operation) -> Work:
        used.append(f"{operation.name} {describe(operation)}")
        return submit(operation)

    rounds = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "submit", count)
        for _ in range(8):
            known = set(used)
            hvd.allreduce(torch.ones(3), op=hvd.Sum)
            hvd.allreduce(torch.ones(3), op=hvd.Average)
            hvd.allreduce(torch.ones(5), op=hvd.Sum, prescale_factor=0.5)
            handles = [hvd.allreduce_async(torch.ones(count)) for count in (5, 6, 5)]
            hvd.barrier()
            for handle in handles:
                hvd.synchronize(handle)
            rounds.append(len(set(used) - known))
    return rounds


# ---- state


def exchange_objects() -> None:
    n, r = hvd.size(), hvd.rank()
    assert hvd.broadcast_object({"rank": r, "big": "x" * 100_000}, 1)["rank"] == 1
    assert hvd.broadcast_object(lambda: r, 0, name="function")() == 0
    assert hvd.allgather_object(("rank", r, "y" * r)) == [("rank", i, "y" * i) for i in range(n)]


def broadcast_model() -> None:
    torch.manual_seed(hvd.rank())
    model: Any = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 3), torch.nn.BatchNorm2d(3)).half()
    model[0].to(memory_format=torch.channels_last)
    hvd.broadcast_parameters(model.state_dict(), 1)
    total = sum(float(tensor.double().sum()) for tensor in model.state_dict().values())
    assert len(set(hvd.allgather_object(total))) == 1
    torch.manual_seed(1)
    expected = torch.nn.Conv2d(1, 3, 3).half()
    assert torch.equal(model[0].weight, expected.weight)
    hvd.broadcast_parameters(model.named_parameters(), 0)
    hvd.broadcast_parameters(list(model.parameters()), 0)


def refuse_different_models() -> str:
    """Every rank, the root too, gets the error; the job goes on."""
    with pytest.raises(MismatchError) as caught:
        hvd.broadcast_parameters({"w": torch.ones(3 if hvd.rank() == 1 else 2)}, 0)
    hvd.broadcast_parameters({"w": torch.ones(2)}, 0)
    return str(caught.value)


def broadcast_optimizers() -> None:
    """Fresh and used, with hyperparameters; the root's own is not altered."""
    for kind in (torch.optim.SGD, torch.optim.Adam):
        model = torch.nn.Linear(3, 2)
        optimizer = kind(model.parameters(), lr=0.1 * (hvd.rank() + 1))
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.param_groups[0]["lr"] == 0.1
        assert not optimizer.state
        if hvd.rank() == 0:  # as if only the root had loaded a checkpoint
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        before = [p.detach().clone() for p in model.parameters()]
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        states = hvd.allgather_object(str(optimizer.state_dict()))
        assert set(states) == {states[0]}
    parameters = list(model.parameters())[: 1 if hvd.rank() == 1 else 2]
    with pytest.raises(MismatchError, match=r"rank 1 has a group of 1, rank 0 .* a group of 2"):
        hvd.broadcast_optimizer_state(torch.optim.SGD(parameters), 0)
    with pytest.raises(ConfigError, match="LBFGS belongs to one rank's line search"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
