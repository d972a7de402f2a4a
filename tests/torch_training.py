"""Training, as every rank runs it in tests with real processes. What the functions return, most
often the largest difference to training in a single process, is judged by the test."""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import phub_collective.torch as hvd
from phub_collective.errors import MismatchError, PhubError
from phub_collective.torch.options import ExchangeCounters


class Net(torch.nn.Module):
    """A CNN without batch norm, with a tied layer, a branch that a step may leave out and a
    parameter that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3)
        self.tied = torch.nn.Linear(16, 16)
        self.left, self.right = torch.nn.Linear(16, 3), torch.nn.Linear(16, 3)
        self.unused = torch.nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, branch: str) -> torch.Tensor:
        x = torch.tanh(self.conv(x)).flatten(1)
        x = torch.tanh(self.tied(torch.tanh(self.tied(x))))
        return self.right(x) if branch == "right" else self.left(x)  # type: ignore[no-any-return]


SHARE = 3  # samples of a rank in a batch


def batch(step: int, ranks: slice) -> torch.Tensor:
    """Samples of some ranks in the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SHARE * hvd.size(), 1, 4, 4, generator=generator)[
        SHARE * (ranks.start or 0) : None if ranks.stop is None else SHARE * ranks.stop
    ]


def loss_of(model: torch.nn.Module, step: int, ranks: slice) -> torch.Tensor:
    data = batch(step, ranks).to(next(model.parameters()).dtype)
    result: torch.Tensor = model(data, "left").square().mean()
    return result


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, weight_decay=0.01)


def adam(model: torch.nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), 0.01, weight_decay=0.01)


def alone(
    steps: int, rule: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd, **options: Any
) -> Net:
    """The model after training on global batches, in this process only."""
    torch.manual_seed(0)
    model = Net()
    model.unused.requires_grad_(False)
    optimizer = rule(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    zeros = options.get("optimizer_place", "worker") == "worker"
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, slice(None)).backward()
        for parameter in model.right.parameters():
            # With the optimizer in the worker, unused parameters get zeros (and decay).
            parameter.grad = torch.zeros_like(parameter) if zeros else None
        optimizer.step()
        scheduler.step()
    return model


@torch.no_grad()
def difference(model: torch.nn.Module, other: torch.nn.Module) -> float:
    """Of the element that differs most."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def train(options: dict[str, Any], steps: int = 5) -> float:
    """The largest difference to the single process; ranks begin with different weights."""
    torch.manual_seed(hvd.rank())
    model = Net()
    model.unused.requires_grad_(False)
    optimizer: Any = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    mine = slice(hvd.rank(), hvd.rank() + 1)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(model, step, mine).backward()
        optimizer.step()
        scheduler.step()
    if options.get("wait_in_forward"):
        optimizer.synchronize()  # parameters are read without a forward
    return difference(model, alone(steps, **options))


def continue_from_a_checkpoint(options: dict[str, Any]) -> float:
    """Adam on the server; rank 0 saves after three steps, loads that, and broadcasts."""
    torch.manual_seed(hvd.rank())
    mine = slice(hvd.rank(), hvd.rank() + 1)
    saved: tuple[Any, Any] | None = None
    for begin, end in ((0, 3), (3, 6)):
        model = Net()
        model.unused.requires_grad_(False)
        optimizer: Any = hvd.DistributedOptimizer(adam(model), model.named_parameters(), **options)
        if saved is not None and hvd.rank() == 0:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        for step in range(begin, end):
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate(step)
            loss_of(model, step, mine).backward()
            optimizer.step()
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return difference(model, alone(6, adam, **options))


def rate(step: int) -> float:
    """What the scheduler of `alone` comes to, with Adam."""
    return 0.01 * 0.5 ** (step // 2)


def train_different_branches(backend: str) -> float:
    """Each rank uses another branch: what one has no gradient for comes from the others."""
    torch.manual_seed(0)
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), backend=backend
    )
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    branches = ["left" if rank % 2 == 0 else "right" for rank in range(hvd.size())]
    for step in range(3):
        optimizer.zero_grad()
        mine = batch(step, slice(hvd.rank(), hvd.rank() + 1))
        model(mine, branches[hvd.rank()]).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        for rank, branch in enumerate(branches):
            part = reference(batch(step, slice(rank, rank + 1)), branch).square().mean()
            (part / hvd.size()).backward()
        plain.step()
    return difference(model, reference)


def train_with_changes(backend: str) -> float:
    """Accumulation, a partial window, clipping, a dropped step, a cast and another layout."""
    torch.manual_seed(0)
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1),
        model.named_parameters(),
        backend=backend,
        backward_passes_per_step=2,
        gradient_predivide_factor=2.0,
        groups=3,
    )
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    mine = slice(hvd.rank(), hvd.rank() + 1)
    for step, passes in enumerate((2, 1, 2, 2)):
        if step == 2:
            model.double()
            reference.double()
        if step == 3:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        loss_of(model, 99, mine).backward()
        optimizer.zero_grad(set_to_none=step % 2 == 0)  # half a window: nothing was sent
        for index in range(passes):
            loss_of(model, 10 * step + index, mine).backward()
            loss_of(reference, 10 * step + index, slice(None)).backward()
        optimizer.synchronize()
        for parameters in (model.parameters(), reference.parameters()):
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    return difference(model, reference)


def train_two_models(backend: str) -> float:
    """Two optimizers, one of which gets gradients in the other's backward, and drops them."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(3, 3) for _ in range(4)]
    models[2].load_state_dict(models[0].state_dict())
    models[3].load_state_dict(models[1].state_dict())
    distributed: list[Any] = [
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), backend=backend)
        for model in models[:2]
    ]
    plain = [torch.optim.SGD(model.parameters(), 0.1) for model in models[2:]]
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        data = torch.randn(hvd.size(), 3, generator=generator)
        for (first, second), optimizers, x in (
            (models[:2], distributed, data[hvd.rank() : hvd.rank() + 1]),
            (models[2:], plain, data),
        ):
            optimizers[1].zero_grad()
            second(x).square().mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            second(first(x)).square().mean().backward()
            optimizers[0].step()
    distributed[1].zero_grad()
    return max(difference(models[0], models[2]), difference(models[1], models[3]))


def overlap(options: dict[str, Any]) -> tuple[float, float]:
    """(largest difference to a single process, part of the bytes that left in backward in the
    median step after the first), for a model of 40 MB whose backward takes about as long as its
    exchange over loopback."""

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(10)))

    model, reference, untrained = make(), make(), make()
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 1.0), model.named_parameters(), **options
    )
    plain = torch.optim.SGD(reference.parameters(), 1.0)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    parts: list[float] = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        data = torch.randn(128 * hvd.size(), 1024, generator=generator)
        before: ExchangeCounters = optimizer.exchange_counters()
        optimizer.zero_grad()
        (model(data[hvd.rank() :: hvd.size()]) - 1).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        (reference(data) - 1).square().mean().backward()
        plain.step()
        after: ExchangeCounters = optimizer.exchange_counters()
        moved = after.bytes_total - before.bytes_total
        assert moved >= nbytes
        parts.append((after.bytes_in_backward - before.bytes_in_backward) / moved)
    assert optimizer.exchange_counters().steps == 4
    assert difference(model, untrained) > 1e-3
    return difference(model, reference), statistics.median(parts[1:])


def adopt_loaded_weights(options: dict[str, Any]) -> float:
    """Rank 0 loads a checkpoint after wrapping and broadcasts it; training goes on from it."""
    torch.manual_seed(0)
    model, reference = Net(), Net()
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), **options
    )
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    mine = slice(hvd.rank(), hvd.rank() + 1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step, mine).backward()
        optimizer.step()
    if hvd.rank() == 0:
        model.load_state_dict(reference.state_dict())
    hvd.broadcast_parameters(model.state_dict(), 0)
    for step in range(3):
        for net, one, ranks in ((model, optimizer, mine), (reference, plain, slice(None))):
            one.zero_grad()
            loss_of(net, step, ranks).backward()
            one.step()
    return difference(model, reference)


def stray_write() -> bool:
    """Whether a write that torch does not count, to the weights of rank 0, is seen elsewhere."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), optimizer_place="server", shared_model=True
    )
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = model.weight.detach().clone()
    hvd.barrier()
    if hvd.rank() == 0:
        model.weight.data.add_(1.0)
    hvd.barrier()
    return not torch.equal(before, model.weight)


# ---- failures


def open_different_models(backend: str) -> str:
    """The error of an optimizer whose parameters differ between ranks."""
    width = 3 if hvd.rank() == 0 else 4
    model = torch.nn.Linear(2, width)
    with pytest.raises(MismatchError) as caught:
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), backend=backend
        )
    return str(caught.value)


def lose_a_rank(options: dict[str, Any]) -> tuple[str, float]:
    """(the survivors' error, seconds until they had it). The last rank dies in its second step."""
    model = torch.nn.Linear(50, 50)
    optimizer: Any = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), **options)
    model(torch.ones(2, 50)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    hvd.barrier()
    if hvd.rank() == hvd.size() - 1:
        os._exit(3)
    begin = time.monotonic()

    def step() -> None:
        model(torch.ones(2, 50)).sum().backward()
        optimizer.step()

    with pytest.raises(PhubError) as caught:
        step()
    elapsed = time.monotonic() - begin
    for later in (optimizer.step, optimizer.zero_grad):
        with pytest.raises(PhubError):
            later()
    with pytest.raises(PhubError):
        hvd.allreduce(torch.ones(2), name="later")
    assert time.monotonic() - begin - elapsed < 5.0
    hvd.shutdown()
    assert time.monotonic() - begin - elapsed < 10.0
    return f"{type(caught.value).__name__}: {caught.value}", elapsed
