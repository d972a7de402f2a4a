"""DistributedOptimizer with the optimizer on the server, on a session without transport whose
server is torch's own optimizer."""

import copy
from typing import Any

import pytest
import torch
from torch_small import assert_equal, backward, join, network, weights
from torch_standin import StandInSession

import phub_collective.torch as hvd
from phub_collective.backends.base import SGD
from phub_collective.errors import ConfigError

PLACES = [{"optimizer_place": "server"}, {"optimizer_place": "server", "shared_model": True}]
places = pytest.mark.parametrize("place", PLACES, ids=["copied", "shared"])


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> StandInSession:
    return join(monkeypatch)


def sgd_of(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01, nesterov=True)


def wrapped(model: Any, **place: Any) -> Any:
    return hvd.DistributedOptimizer(sgd_of(model), model.named_parameters(), **place)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    """The weights after `steps` steps with a falling learning rate."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(model, step)
        optimizer.step()
        scheduler.step()
    return weights(model)


@places
def test_training_equals_plain_training(session: StandInSession, place: dict[str, Any]) -> None:
    plain, model = network(), network()
    expected = train(plain, sgd_of(plain), 5)
    assert_equal(train(model, wrapped(model, **place), 5), expected)
    exchange = session.exchanges[0]
    assert exchange.spec.shared_model == ("shared_model" in place)
    assert exchange.initialized == 1
    assert [hypers[0].lr for hypers in exchange.hypers] == [0.1, 0.1, 0.05, 0.05, 0.025]


@places
def test_unused_parameters_are_left_alone(session: StandInSession, place: dict[str, Any]) -> None:
    model = network()
    optimizer = wrapped(model, **place)
    backward(model)
    optimizer.step()
    before = weights(model[0])
    model[2](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert_equal(weights(model[0]), before)
    assert model[0].weight.grad is None


def test_groups_have_their_own_hyperparameters(session: StandInSession) -> None:
    model = network()
    model[0].weight.requires_grad_(False)  # its group has no key at all
    groups = [
        {"params": [model[0].weight], "lr": 9.0},
        {"params": [model[0].bias], "lr": 0.5, "momentum": 0.25},
        {"params": model[2].parameters(), "dampening": 0.5, "maximize": True},
    ]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(groups, 0.1), model.named_parameters(), optimizer_place="server"
    )
    backward(model)
    optimizer.step()
    assert session.exchanges[0].hypers == [[SGD(0.5, 0.25), SGD(0.1, dampening=0.5, maximize=True)]]
    assert [key.group for key in session.exchanges[0].spec.keys] == [0, 1, 1]


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (torch.optim.RMSprop, "server' with RMSprop; the server runs torch.optim.SGD, Adam and Ad"),
        (type("Mine", (torch.optim.SGD,), {}), "with Mine"),
        (lambda p: torch.optim.SGD(p, differentiable=True), "differentiable=True"),
    ],
)
def test_optimizers_that_the_server_does_not_run(
    session: StandInSession, optimizer: Any, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        hvd.DistributedOptimizer(optimizer(network().parameters()), optimizer_place="server")


def test_rate_changed_before_step_is_an_error(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model, optimizer_place="server")
    backward(model)
    optimizer.param_groups[0]["lr"] = 0.7
    with pytest.raises(ConfigError, match=r"lr=0\.1.*lr=0\.7.*after optimizer\.step\(\)"):
        optimizer.step()


def test_what_needs_the_gradient_is_refused(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model, optimizer_place="server")
    backward(model)
    with pytest.raises(ConfigError, match="synchronize.*optimizer_place='worker'"):
        optimizer.synchronize()
    with (
        pytest.raises(ConfigError, match="skip_synchronize.*optimizer_place='worker'"),
        optimizer.skip_synchronize(),
    ):
        optimizer.step()
    with pytest.raises(ConfigError, match="zero_grad.*between backward.*freeze parameters"):
        optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    with pytest.raises(ConfigError, match="GradScaler.*optimizer_place='worker'"):
        scaler.step(optimizer)
    optimizer.step()
    backward(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(ConfigError, match="changed after it was sent.*needs optimizer_place"):
        optimizer.step()


RULES: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@places
@rules
def test_state_moves_to_the_server_and_back(
    session: StandInSession, place: dict[str, Any], rule: Any
) -> None:
    """Plain training, a checkpoint, training on the server, a checkpoint, plain training."""
    plain, model, last = network(), network(), network()
    expected = rule(plain.parameters())
    train_on(plain, expected, 0, 6)
    first = rule(model.parameters())
    train_on(model, first, 0, 2)
    served = hvd.DistributedOptimizer(first, model.named_parameters(), **place)
    assert not first.state  # it is on the server
    train_on(model, served, 2, 4)
    saved = served.state_dict()
    last.load_state_dict(model.state_dict())
    again = rule(last.parameters())
    again.load_state_dict(saved)
    train_on(last, again, 4, 6)
    torch.testing.assert_close(weights(last), weights(plain))
    torch.testing.assert_close(again.state_dict()["state"], expected.state_dict()["state"])


def train_on(model: Any, optimizer: Any, begin: int, end: int) -> None:
    """Steps [begin, end) of a training whose rate falls."""
    for step in range(begin, end):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        optimizer.param_groups[0]["lr"] = 0.02 * 0.5 ** (step // 2)
        backward(model, step)
        optimizer.step()


@rules
def test_loaded_state_is_the_servers_from_the_next_step(session: StandInSession, rule: Any) -> None:
    plain, model = network(), network()
    reference = rule(plain.parameters())
    train_on(plain, reference, 0, 1)
    saved = copy.deepcopy(reference.state_dict())
    model.load_state_dict(plain.state_dict())
    optimizer = hvd.DistributedOptimizer(
        rule(model.parameters()), model.named_parameters(), optimizer_place="server"
    )
    optimizer.load_state_dict(saved)
    torch.testing.assert_close(optimizer.state_dict()["state"], saved["state"])
    for one, its in ((plain, reference), (model, optimizer)):
        train_on(one, its, 1, 3)
    torch.testing.assert_close(weights(model), weights(plain))


def test_state_of_another_shape_is_refused(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model, optimizer_place="server")
    state = optimizer.state_dict()
    optimizer.load_state_dict({**state, "state": {0: {"momentum_buffer": torch.zeros(1)}}})
    backward(model)
    with pytest.raises(ConfigError, match=r"momentum_buffer of '0.weight': expected shape \(3, 4"):
        optimizer.step()


def test_state_of_another_optimizer_is_refused(session: StandInSession) -> None:
    model = network()
    adam = torch.optim.Adam(model.parameters())
    train(model, adam, 1)
    state = adam.state_dict()
    del state["state"][0]["exp_avg_sq"]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), model.named_parameters(), optimizer_place="server"
    )
    optimizer.load_state_dict(state)
    backward(model)
    with pytest.raises(ConfigError, match="expected exp_avg, exp_avg_sq, got step, exp_avg"):
        optimizer.step()


def test_state_is_not_read_while_the_server_changes_it(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model, optimizer_place="server")
    backward(model)
    with pytest.raises(ConfigError, match=r"before backward\(\) or after step"):
        optimizer.state_dict()


def test_closure_and_step_hooks(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model, optimizer_place="server")
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> float:
        optimizer.zero_grad()
        backward(model)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert calls == ["pre", "post"]
    assert len(session.exchanges[0].pushes) == 2


@places
def test_weights_written_by_hand_are_adopted(
    session: StandInSession, place: dict[str, Any]
) -> None:
    """Right after load_state_dict the gradients of the loaded weights are applied to them."""
    plain, model = network(), network()
    optimizer, expected = wrapped(model, **place), sgd_of(plain)
    for one, its in ((model, optimizer), (plain, expected)):
        backward(one, 5)
        its.step()
        its.zero_grad()
    loaded = {name: tensor + 1 for name, tensor in plain.state_dict().items()}
    model.load_state_dict(loaded)
    plain.load_state_dict(loaded)
    backward(model, 0)
    assert session.exchanges[0].pushes[-1] == []  # no overlap in this one step
    optimizer.step()
    backward(plain, 0)
    expected.step()
    assert_equal(weights(model), weights(plain))
    assert session.exchanges[0].initialized == 2
    assert session.operations == ["optimizer.0: weights were changed by hand"]
    backward(model, 1)
    assert len(session.exchanges[0].pushes[-1]) == 4
    optimizer.step()
    assert session.exchanges[0].initialized == 2


@places
def test_cast_after_wrapping(session: StandInSession, place: dict[str, Any]) -> None:
    model = network().double()
    optimizer = wrapped(model, **place)
    model.float()
    backward(model)
    optimizer.step()
    assert [exchange.closed for exchange in session.exchanges] == [True, False]
    assert session.exchanges[1].initialized == 1
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# ---- shared model


def shared(model: Any) -> Any:
    return wrapped(model, optimizer_place="server", shared_model=True)


def test_parameters_are_views_of_the_result(session: StandInSession) -> None:
    model = network()
    optimizer = shared(model)
    exchange = session.exchanges[0]
    for _ in range(3):
        first = exchange.result.ctypes.data
        assert model[0].weight.data_ptr() == first + exchange.offsets[0]
        backward(model)
        optimizer.step()
        assert exchange.result.ctypes.data != first
        assert model[0].weight.data_ptr() == exchange.result.ctypes.data + exchange.offsets[0]


@places
def test_graph_of_old_weights_is_an_error(session: StandInSession, place: dict[str, Any]) -> None:
    model = network()
    optimizer = wrapped(model, **place)
    early = model(torch.ones(1, 4, requires_grad=True)).square().sum()
    backward(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


def test_state_dict_returns_copies(session: StandInSession) -> None:
    model: Any = torch.nn.Sequential(network(), torch.nn.BatchNorm1d(2))
    optimizer = shared(model)
    kept = model.state_dict()
    before = {name: tensor.clone() for name, tensor in kept.items()}
    for _ in range(2):
        backward(model)
        optimizer.step()
    for name in ("0.0.weight", "1.bias"):
        assert torch.equal(kept[name], before[name])
    assert model.state_dict(keep_vars=True)["0.0.weight"] is model[0][0].weight


def test_broadcast_into_a_state_dict_reaches_the_parameters(session: StandInSession) -> None:
    model = network()
    optimizer = shared(model)
    state = model.state_dict()
    state["0.weight"].fill_(3.0)  # as if it had come from the root
    hvd.broadcast_parameters(state, 0)
    assert model[0].weight.unique().tolist() == [3.0]
    backward(model)
    optimizer.step()
    assert session.exchanges[0].initialized == 2
