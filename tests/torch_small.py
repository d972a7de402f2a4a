"""A small model and its training, for tests of the torch face on a session without transport."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch_standin import StandInSession

import phub_collective.torch as hvd
from phub_collective.torch import context


def join(monkeypatch: pytest.MonkeyPatch) -> StandInSession:
    """Be in a job that is a stand-in, until the test ends."""
    session = StandInSession()
    monkeypatch.setattr(context, "_face", context.Face(cast(Any, session)))
    return session


def network() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))


def wrapped(model: Any, lr: float = 0.1, **kwargs: Any) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), **kwargs)


def backward(model: Any, seed: int = 0) -> None:
    data = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    model(data).square().sum().backward()


def train(model: Any, optimizer: Any, steps: int) -> None:
    """As `trained`; gradients are forgotten in both ways by turns."""
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(model, step)
        optimizer.step()


def weights(model: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)


def trained(steps: int) -> list[torch.Tensor]:
    """The weights after plain training."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        sgd.zero_grad()
        backward(model, step)
        sgd.step()
    return weights(model)
