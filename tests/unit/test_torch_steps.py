"""The course of a step of DistributedOptimizer, on a session without transport."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_small import assert_equal, backward, join, network, train, trained, weights, wrapped
from torch_standin import StandInExchange, StandInSession

import phub_collective.torch as hvd
from phub_collective.errors import ConfigError


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> StandInSession:
    return join(monkeypatch)


def test_gradients_are_pushed_while_backward_goes_on(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    exchange = session.exchanges[0]
    seen: list[dict[str, bool]] = []
    hidden = model[0](torch.ones(5, 4))
    hidden.register_hook(lambda _: seen.append(dict(exchange.pushes[-1])))
    model[2](hidden).sum().backward()
    assert seen == [{"2.weight": False, "2.bias": False}]
    assert len(exchange.pushes[-1]) == 4
    optimizer.step()
    counters = optimizer.exchange_counters()
    assert counters == hvd.ExchangeCounters(23 * 4, 23 * 4, 1)


def test_training_equals_plain_training(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    train(model, optimizer, 4)
    assert_equal(weights(model), trained(4))


def test_results_replace_the_gradients(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)

    def halve(exchange: StandInExchange) -> None:
        exchange.arena.view("float32")[:] /= 2

    session.exchanges[0].on_wait = halve
    backward(model)
    local = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.synchronize()
    assert_equal([p.grad for p in model.parameters() if p.grad is not None], [g / 2 for g in local])


def test_unused_parameters_are_pushed_without_gradient(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    model[2](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    pushes = dict(session.exchanges[0].pushes[0])
    assert pushes == {"2.weight": False, "2.bias": False, "0.weight": True, "0.bias": True}
    assert model[0].weight.grad.tolist() == torch.zeros(3, 4).tolist()  # zeros, as in Horovod


def test_gradients_set_by_hand_are_exchanged(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.synchronize()
    assert {no_grad for _, no_grad in session.exchanges[0].pushes[0]} == {False}
    assert session.exchanges[0].values(0).tolist() == [1.0] * 12


def test_backward_passes_per_step(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model, backward_passes_per_step=2)
    exchange = session.exchanges[0]
    backward(model, 0)
    assert exchange.pushes == [[]]
    backward(model, 1)
    assert len(exchange.pushes[0]) == 4
    optimizer.step()
    optimizer.zero_grad()
    backward(model, 2)
    optimizer.step()  # a window of one: what is there is exchanged
    assert len(exchange.pushes[1]) == 4
    optimizer.set_backward_passes_per_step(1)
    optimizer.zero_grad()
    backward(model, 3)
    assert len(exchange.pushes[2]) == 4


def test_second_gradient_of_a_step_is_an_error_and_final(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    backward(model)
    with pytest.raises(ConfigError, match="got gradient 2 of a step; expected 1"):
        backward(model)
    with pytest.raises(ConfigError, match="got gradient 2"):
        optimizer.step()
    assert len(session.exchanges[0].pushes[0]) == 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_layer_in_three_checkpoints(session: StandInSession, reentrant: bool) -> None:
    layer = torch.nn.Linear(4, 4)
    passes = 3 if reentrant else 1
    optimizer = wrapped(layer, backward_passes_per_step=passes)
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(3):
        x = checkpoint(layer, x, use_reentrant=reentrant)
    x.sum().backward()
    assert len(session.exchanges[0].pushes[0]) == 2
    optimizer.step()


def test_reentrant_checkpoint_without_passes_names_the_cure(session: StandInSession) -> None:
    layer = torch.nn.Linear(4, 4)
    optimizer = wrapped(layer)
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(3):
        x = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(ConfigError, match="each segment of a reentrant checkpoint gives one"):
        x.sum().backward()
    assert optimizer.exchange_counters().steps == 0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_backward_and_step_drops_the_step(
    session: StandInSession, set_to_none: bool
) -> None:
    model = network()
    optimizer = wrapped(model)
    before = weights(model)
    backward(model, 7)
    optimizer.zero_grad(set_to_none)
    assert_equal(weights(model), before)
    for step in range(2):
        optimizer.zero_grad(set_to_none)
        backward(model, step)
        optimizer.step()
    assert_equal(weights(model), trained(2))
    assert len(session.exchanges[0].pushes) == 4  # the dropped one was finished, then two more


def test_zero_grad_forgets_a_partial_window(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model, backward_passes_per_step=2)
    backward(model, 7)
    optimizer.zero_grad()
    backward(model, 0)
    assert session.exchanges[0].pushes == [[]]


def test_clipping_between_synchronize_and_step(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    backward(model)
    optimizer.synchronize()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    before = weights(model)
    with optimizer.skip_synchronize():
        optimizer.step()
    moved = torch.cat([(b - a).flatten() for a, b in zip(before, weights(model), strict=True)])
    assert moved.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)
    assert len(session.exchanges[0].pushes) == 2
    backward(model)
    optimizer.step()
    assert len(session.exchanges[0].pushes) == 3


def test_step_after_synchronize_exchanges_once(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    backward(model)
    optimizer.synchronize()
    optimizer.step()
    assert len(session.exchanges[0].pushes) == 2
    assert_equal(weights(model), trained(1))


def test_skip_synchronize_needs_synchronize(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    backward(model)
    with (
        pytest.raises(ConfigError, match="call optimizer.synchronize"),
        optimizer.skip_synchronize(),
    ):
        optimizer.step()


def test_clipping_what_was_sent_is_an_error(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    backward(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with pytest.raises(ConfigError, match=r"changed after it was sent.*optimizer.synchronize\(\)"):
        optimizer.step()


def test_closure_is_followed_by_the_exchange(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)

    def closure() -> float:
        optimizer.zero_grad()
        backward(model, 0)
        return 5.0

    assert optimizer.step(closure) == 5.0
    assert len(session.exchanges[0].pushes) == 2
    assert_equal(weights(model), trained(1))


@pytest.mark.parametrize("infinite", [True, False])
def test_grad_scaler_sees_reduced_gradients(session: StandInSession, infinite: bool) -> None:
    """The other rank's infinity must make this rank skip, too."""
    model = network()
    optimizer = wrapped(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    if infinite:

        def overflow(exchange: StandInExchange) -> None:
            exchange.values(2)[0] = float("inf")

        session.exchanges[0].on_wait = overflow
    before = weights(model)
    data = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    scaler.scale(model(data).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_equal(weights(model), before if infinite else trained(1))
    assert scaler.get_scale() == (4.0 if infinite else 8.0)
    session.exchanges[0].on_wait = lambda exchange: None
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    assert len(session.exchanges[0].pushes) == 3


def test_step_hooks_run_once(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model)
    optimizer.load_state_dict(optimizer.state_dict())  # torch looks at `step` again
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    backward(model)
    optimizer.step()
    assert calls == [1]


def test_load_state_dict_begins_a_new_step(session: StandInSession) -> None:
    model = network()
    optimizer = wrapped(model, backward_passes_per_step=2)
    state = optimizer.state_dict()
    backward(model)
    optimizer.load_state_dict(state)
    backward(model)
    assert session.exchanges[0].pushes == [[]]
