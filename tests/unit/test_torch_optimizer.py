"""DistributedOptimizer as an object, and what it exchanges, on a session without transport."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch_small import assert_equal, backward, join, network, weights, wrapped
from torch_standin import StandInSession, names

import phub_collective.torch as hvd
from phub_collective.errors import ConfigError, DuplicateName, MismatchError
from phub_collective.torch import context


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> StandInSession:
    return join(monkeypatch)


def test_the_same_object_comes_back_as_a_subclass(session: StandInSession) -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    groups, state = sgd.param_groups, sgd.state
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    assert optimizer is sgd
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert optimizer.param_groups is groups
    assert optimizer.state is state


def test_wrapping_twice_is_refused(session: StandInSession) -> None:
    optimizer = wrapped(network())
    with pytest.raises(ConfigError, match="distributed already"):
        hvd.DistributedOptimizer(optimizer)


def test_refused_optimizer_is_left_as_it_was(session: StandInSession) -> None:
    session.refusal = MismatchError("rank 0 has this, rank 1 has that")
    model = network()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(MismatchError, match="rank 1 has that"):
        hvd.DistributedOptimizer(sgd, model.named_parameters())
    assert type(sgd) is torch.optim.SGD
    backward(model)
    sgd.step()


@pytest.mark.parametrize("clone", [lambda o: pickle.loads(pickle.dumps(o)), copy.deepcopy])
def test_copies_are_distributed_again(session: StandInSession, clone: Callable[[Any], Any]) -> None:
    model = network()
    optimizer = wrapped(model, lr=0.25)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    backward(model)
    optimizer.step()
    copied = clone(optimizer)
    assert isinstance(copied, torch.optim.SGD)
    assert copied.param_groups[0]["lr"] == 0.25
    momentum = [s["momentum_buffer"] for s in optimizer.state.values()]
    assert_equal([s["momentum_buffer"] for s in copied.state.values()], momentum)
    assert len(session.exchanges) == 1
    for parameter in copied.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    copied.step()  # joins the job now, under the same names
    assert names(session.exchanges[1].spec.keys) == names(session.exchanges[0].spec.keys)
    assert session.exchanges[1].spec.name == "optimizer.1"


def test_loading_a_pickle_needs_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_face", context.Face(cast(Any, StandInSession())))
    data = pickle.dumps(wrapped(network()))
    monkeypatch.setattr(context, "_face", None)
    loaded = pickle.loads(data)
    assert loaded.param_groups[0]["momentum"] == 0.9
    with pytest.raises(ConfigError, match=r"call hvd.init\(\)"):
        loaded.step()


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_schedulers_made_before_or_after(session: StandInSession, scheduler_first: bool) -> None:
    model = network()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    schedule = [torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)] if scheduler_first else []
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    schedule = schedule or [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            backward(model)
            optimizer.step()
            schedule[0].step()
    assert optimizer.param_groups[0]["lr"] == 0.025
    assert len(session.exchanges[0].pushes) == 3


def test_step_before_scheduler_is_still_told(session: StandInSession) -> None:
    optimizer = wrapped(network())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        scheduler.step()


def test_keys_stand_in_the_order_of_names(session: StandInSession) -> None:
    model = network()
    named = list(model.named_parameters())
    groups = [{"params": [named[3][1], named[0][1]]}, {"params": [named[1][1], named[2][1]]}]
    hvd.DistributedOptimizer(torch.optim.SGD(groups, 0.1), named)
    keys = session.exchanges[0].spec.keys
    assert names(keys) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [key.group for key in keys] == [0, 1, 1, 0]


def test_names_are_made_from_positions(session: StandInSession) -> None:
    hvd.DistributedOptimizer(torch.optim.SGD(network().parameters(), 0.1))
    assert names(session.exchanges[0].spec.keys) == [f"group0.parameter{i}" for i in range(4)]


def test_duplicate_names_are_refused_with_a_cure(session: StandInSession) -> None:
    one, two = network(), network()
    named = [*one.named_parameters(), *two.named_parameters()]
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1)
    with pytest.raises(DuplicateName, match=r"'0\.weight' twice.*each model's name in front"):
        hvd.DistributedOptimizer(optimizer, named)


def test_parameters_without_a_name_are_refused(session: StandInSession) -> None:
    model = network()
    with pytest.raises(ConfigError, match=r"1 parameters .* number 3 of shape \(2,\)"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.1), list(model.named_parameters())[:3]
        )


def test_frozen_and_empty_parameters_are_left_out(session: StandInSession) -> None:
    model = network()
    model[0].requires_grad_(False)
    model.register_parameter("empty", torch.nn.Parameter(torch.zeros(0)))
    optimizer = wrapped(model)
    before = weights(model[0])
    backward(model)
    optimizer.step()
    assert names(session.exchanges[0].spec.keys) == ["2.weight", "2.bias"]
    assert_equal(weights(model[0]), before)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"backward_passes_per_step": 0}, "expected at least 1"),
        ({"op": hvd.Max}, "hvd.Average or hvd.Sum"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "needs op=hvd.Average"),
        ({"gradient_predivide_factor": 0.0}, "expected more than 0"),
        ({"compression": "fp16"}, "expected Compression.none"),
        ({"groups": -1}, "groups=-1"),
        ({"groups": [[torch.zeros(1)]]}, "lists of the optimizer's parameters"),
        ({"optimizer_place": "moon"}, "expected 'worker' or 'server'"),
        ({"shared_model": True}, "needs optimizer_place='server'"),
        ({"hold": True}, "hold=True is not available"),
    ],
)
def test_bad_arguments(session: StandInSession, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        wrapped(network(), **arguments)


def test_arguments_reach_the_exchange(session: StandInSession) -> None:
    wrapped(network(), gradient_predivide_factor=4.0, groups=2)
    spec = session.exchanges[0].spec
    assert (spec.prescale, spec.postscale) == (0.25, 4.0)
    assert spec.bucket_bytes == (12 + 3 + 6 + 2) * 4 // 2
    assert spec.op is hvd.Average
    assert not spec.compression.packs
    wrapped(network(), compression=hvd.Compression.two_bit(0.25))
    assert str(session.exchanges[1].spec.compression) == "two_bit:0.25"
