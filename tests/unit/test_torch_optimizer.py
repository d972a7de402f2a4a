"""The course of a step of DistributedOptimizer, on a session without transport."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch_standin import StandInExchange, StandInSession, names

import phub_collective.torch as hvd
from phub_collective.errors import ConfigError, DuplicateName, MismatchError, PeerLost
from phub_collective.torch import context


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> StandInSession:
    standin = StandInSession()
    monkeypatch.setattr(context, "_face", context.Face(cast(Any, standin)))
    return standin


def network() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))


def wrapped(model: Any, lr: float = 0.1, **kwargs: Any) -> Any:
    sgd = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), **kwargs)


def backward(model: Any, seed: int = 0) -> None:
    data = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    model(data).square().sum().backward()


def weights(model: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for left, right in zip(one, other, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-7)


def trained(steps: int, **changes: Any) -> list[torch.Tensor]:
    """The weights after plain training."""
    model = network()
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        sgd.zero_grad()
        backward(model, step)
        sgd.step()
    return weights(model)


# ---- the wrapper itself


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


# ---- keys


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


# ---- steps


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
    for step in range(4):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(model, step)
        optimizer.step()
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


# ---- changes after wrapping


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


# ---- several optimizers, errors, memory


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
