"""What may change after wrapping, several optimizers and errors, on a session without transport."""

from typing import Any, cast

import pytest
import torch
from torch_small import assert_equal, backward, join, network, weights, wrapped
from torch_standin import StandInExchange, StandInSession, names

import phub_collective.torch as hvd
from phub_collective.errors import ConfigError, PeerLost
from phub_collective.torch import context


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> StandInSession:
    return join(monkeypatch)


def test_cast_lays_the_arena_anew(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    backward(model, 0)
    optimizer.step()
    model.double()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4).double()).sum().backward()
        optimizer.step()
    old, new = session.exchanges
    assert old.closed
    assert not new.closed
    assert new.spec.name == "optimizer.0@1"
    assert {key.dtype.name for key in new.spec.keys} == {"FLOAT64"}
    assert len(new.pushes) == 3
    assert optimizer.exchange_counters().steps == 3


def test_cast_of_one_layer_in_the_middle_of_a_run(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    backward(model)
    optimizer.step()
    model[0].to(torch.float64)
    optimizer.zero_grad()
    hidden = model[0](torch.ones(2, 4).double()).float()
    model[2](hidden).sum().backward()
    optimizer.step()
    assert [key.dtype.name for key in session.exchanges[1].spec.keys] == [
        "FLOAT64",
        "FLOAT64",
        "FLOAT32",
        "FLOAT32",
    ]


def test_memory_format_change_lays_the_arena_anew(session: StandInSession) -> None:
    model: Any = torch.nn.Conv2d(3, 4, 2)
    optimizer = wrapped(model)
    model.to(memory_format=torch.channels_last)
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    assert session.exchanges[1].spec.keys[0].strides == model.weight.stride()


def test_parameters_unfrozen_later_are_exchanged(session: StandInSession) -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = wrapped(model)
    backward(model)
    optimizer.step()
    model[0].requires_grad_(True)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    assert len(session.exchanges[1].spec.keys) == 4
    assert len(session.exchanges[1].pushes) == 3


def test_frozen_later_is_not_moved(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    backward(model)
    optimizer.step()
    model[0].requires_grad_(False)
    optimizer.zero_grad()
    before = weights(model[0])
    backward(model)
    optimizer.step()
    assert_equal(weights(model[0]), before)
    assert len(session.exchanges) == 1


def test_added_groups_are_exchanged(session: StandInSession) -> None:
    model, extra = network(), torch.nn.Linear(2, 1)
    optimizer = wrapped(model)
    optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.5})
    for _ in range(2):
        extra(model(torch.ones(1, 4))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    keys = session.exchanges[1].spec.keys
    assert names(keys)[-2:] == ["group1.parameter0", "group1.parameter1"]
    assert [key.group for key in keys] == [0, 0, 0, 0, 1, 1]
    assert dict(session.exchanges[1].pushes[1]) == dict.fromkeys(names(keys), False)


def test_cast_between_passes_of_a_step_is_an_error(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model, backward_passes_per_step=2)
    backward(model)
    model.double()
    with pytest.raises(ConfigError, match="float64 .*; expected float32"):
        model(torch.ones(2, 4).double()).sum().backward()
    with pytest.raises(ConfigError, match="expected float32"):
        optimizer.step()


def test_new_job_after_shutdown(session: StandInSession, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = wrapped(model)
    monkeypatch.setattr(context, "_face", None)
    with pytest.raises(ConfigError, match=r"call hvd.init\(\)"):
        backward(model)
    other = StandInSession()
    monkeypatch.setattr(context, "_face", context.Face(cast(Any, other)))
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert len(other.exchanges[0].pushes) == 2


def test_hooks_of_one_optimizer_fire_in_the_others_backward(session: StandInSession) -> None:
    """A GAN: the generator's backward gives the discriminator gradients that it drops."""
    generator, discriminator = torch.nn.Linear(2, 4), network()
    of_generator, of_discriminator = wrapped(generator), wrapped(discriminator)
    for _ in range(2):
        of_discriminator.zero_grad()
        backward(discriminator)
        of_discriminator.step()
        of_generator.zero_grad()
        discriminator(generator(torch.ones(1, 2))).sum().backward()
        of_generator.step()
    first, second = session.exchanges
    assert [len(pushes) for pushes in first.pushes] == [2, 2, 0]
    assert [len(pushes) for pushes in second.pushes] == [4, 4, 4, 4]
    of_discriminator.zero_grad()
    assert [len(pushes) for pushes in second.pushes] == [4, 4, 4, 4, 0]


def test_error_of_the_exchange_is_final(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)

    def lose(exchange: StandInExchange) -> None:
        raise PeerLost("rank 3 is gone", 3)

    session.exchanges[0].on_wait = lose
    backward(model)
    with pytest.raises(hvd.HorovodInternalError, match="rank 3 is gone"):
        optimizer.step()
    session.exchanges[0].on_wait = lambda exchange: None
    for later in (optimizer.step, optimizer.zero_grad, lambda: backward(model)):
        with pytest.raises(PeerLost, match="rank 3 is gone"):
            later()


def test_hooks_die_with_the_optimizer(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    exchange = session.exchanges[0]
    del optimizer
    backward(model)
    assert exchange.pushes == [[]]


def test_sparse_gradients(session: StandInSession) -> None:
    embedding = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(embedding.parameters(), 1.0), sparse_as_dense=True
    )
    before = embedding.weight.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        embedding(torch.tensor([1, 1, 3])).sum().backward()
        optimizer.step()
    assert (before - embedding.weight).sum(1).tolist() == pytest.approx([0, 8, 0, 4, 0])
    plain = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(plain.parameters(), 1.0))
    with pytest.raises(ConfigError, match="sparse_as_dense=True"):
        plain(torch.tensor([1])).sum().backward()
