"""Steps that do not wait: whoever uses new weights next does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_small
from torch_small import assert_equal, backward, join, network, train, trained, weights
from torch_standin import StandInExchange, StandInSession

import phub_collective.torch as hvd
from phub_collective.errors import ConfigError, PeerLost


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> StandInSession:
    return join(monkeypatch)


def wrapped(model: Any, **options: Any) -> Any:
    waiting = {"optimizer_place": "server", "wait_in_forward": True}
    return torch_small.wrapped(model, **{**waiting, **options})


def test_training_equals_plain_training(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    train(model, optimizer, 4)
    assert optimizer.exchange_counters().steps == 3  # the last one is not waited for yet
    optimizer.synchronize()
    assert optimizer.exchange_counters().steps == 4
    assert_equal(weights(model), trained(4))
    assert session.exchanges[0].spec.first_keys_first


def test_each_module_waits_for_its_own_weights_only(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    backward(model)
    before = weights(model)
    optimizer.step()
    exchange = session.exchanges[0]
    assert exchange.waited_for == []
    assert_equal(weights(model), before)
    model[0](torch.ones(1, 4))
    assert exchange.waited_for == ["0.weight", "0.bias"]
    assert_equal(weights(model[0]), trained(1)[:2])
    assert_equal(weights(model[2]), before[2:])
    model(torch.ones(1, 4))
    assert exchange.waited_for[2:] == ["2.weight", "2.bias"]
    model(torch.ones(1, 4))
    assert len(exchange.waited_for) == 4


def test_saved_weights_are_those_of_the_last_step(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    backward(model)
    optimizer.step()
    for saved, expected in zip(model.state_dict().values(), trained(1), strict=True):
        torch.testing.assert_close(saved, expected)
    state = optimizer.state_dict()["state"]
    assert sorted(state) == [0, 1, 2, 3]


def test_the_next_backward_waits_for_what_nobody_used(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    backward(model)
    optimizer.step()
    model[2](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    exchange = session.exchanges[0]
    assert exchange.counters.steps == 2
    assert dict(exchange.pushes[1]) == {
        "2.weight": False, "2.bias": False, "0.weight": True, "0.bias": True
    }  # fmt: skip
    assert_equal(weights(model[0]), trained(1)[:2])


def test_leaving_waits_for_the_last_step(session: StandInSession) -> None:
    """The other ranks need this one for theirs."""
    model = network()
    optimizer = wrapped(model)
    backward(model)
    optimizer.step()
    hvd.shutdown()
    assert session.exchanges[0].counters.steps == 1
    assert_equal(weights(model), trained(1))


def test_an_error_comes_where_the_weights_are_used(session: StandInSession) -> None:
    def lose(_: StandInExchange) -> None:
        raise PeerLost("rank 1 was lost")

    model = network()
    optimizer = wrapped(model)
    backward(model)
    session.exchanges[0].on_wait = lose
    optimizer.step()
    with pytest.raises(PeerLost, match="rank 1"):
        model(torch.ones(1, 4))
    with pytest.raises(PeerLost, match="rank 1"):
        optimizer.step()


def test_modules_outlive_their_optimizer(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    backward(model)
    optimizer.step()
    optimizer.synchronize()
    del optimizer
    model(torch.ones(1, 4))


@pytest.mark.parametrize("options", [{"optimizer_place": "worker"}, {"shared_model": True}])
def test_where_it_does_not_fit_it_is_refused(
    session: StandInSession, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="wait_in_forward=True needs optimizer_place='server'"):
        wrapped(network(), **options)
