"""The torch face between processes: collectives, state, training against a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch_scenarios as scenarios
import torch_training as training
from torch_ranks import TorchRanks

from phub_collective import backends

SIZE = 3  # neither 1 nor a power of two


def usable(*names: str) -> list[Any]:
    """Parameters; what cannot be used here is skipped with the reason."""
    reasons = {name: backends.unavailable_reason(name) for name in names}
    return [
        pytest.param(name, marks=[pytest.mark.skip(reason=f"{name}: {reason}")] if reason else [])
        for name, reason in reasons.items()
    ]


every_backend = pytest.mark.parametrize(
    "backend", usable("pbox", "ring", "halving_doubling", "gloo")
)
needs_pbox = pytest.mark.skipif(
    backends.unavailable_reason("pbox") is not None, reason="no native core"
)
SERVER = {"optimizer_place": "server"}
SHARED = {"optimizer_place": "server", "shared_model": True}
WAITING = {"optimizer_place": "server", "wait_in_forward": True}
ORDERED = {"optimizer_place": "server", "deterministic": True}
on_server = pytest.mark.parametrize("options", [SERVER, SHARED], ids=["server", "shared"])


@pytest.fixture(scope="module")
def ranks() -> Iterator[TorchRanks]:
    """A job whose unnamed choices are the PBox, or Gloo where there is no native core."""
    missing = backends.unavailable_reason("pbox")
    with TorchRanks(SIZE, backend="gloo" if missing else "pbox", timeout=20.0) as job:
        yield job


def test_identity(ranks: TorchRanks) -> None:
    assert ranks.run(scenarios.identity) == [(r, SIZE, r, SIZE, 0, 1) for r in range(SIZE)]


@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.reduce_every_dtype,
        scenarios.reduce_in_all_spellings,
        scenarios.reduce_groups,
        scenarios.reduce_in_16_bits,
        scenarios.submit_in_different_orders,
        scenarios.differentiate,
        scenarios.broadcast_everything,
        scenarios.refuse_bad_tensors,
        scenarios.exchange_objects,
        scenarios.broadcast_model,
        scenarios.broadcast_optimizers,
    ],
    ids=lambda fn: fn.__name__,
)
def test_collectives(ranks: TorchRanks, scenario: Callable[[], None]) -> None:
    ranks.run(scenario)


def test_broadcast_of_different_models_names_both_sides_everywhere(ranks: TorchRanks) -> None:
    for text in ranks.run(scenarios.refuse_different_models):
        assert "rank 1 has 'w' float32 (3,), rank 0 (the root) has 'w' float32 (2,)" in text


@pytest.mark.parametrize("backend", usable("pbox", "ring", "halving_doubling", "gloo"))
def test_unnamed_operations_that_differ_are_an_error_everywhere(backend: str) -> None:
    """Long before anything counts as stalled."""
    with TorchRanks(SIZE, backend=backend) as job:
        goes_on = backend != "pbox"  # where the error of a name in use is the job's
        for texts in zip(*job.run(scenarios.refuse_different_operations, goes_on), strict=True):
            for text in texts:
                assert "unnamed operation" in text
                assert "rank 0" in text or "rank 1" in text
                assert "rank 2" in text


def test_a_loop_of_unnamed_operations_registers_nothing_in_the_end(ranks: TorchRanks) -> None:
    for rounds in ranks.run(scenarios.count_registrations):
        assert rounds[0] > 0
        assert rounds[-3:] == [0, 0, 0]


@every_backend
def test_training_equals_the_single_process(ranks: TorchRanks, backend: str) -> None:
    assert max(ranks.run(training.train, {"backend": backend})) <= 1e-5


@needs_pbox
@pytest.mark.parametrize(
    "options",
    [SERVER, SHARED, WAITING, ORDERED],
    ids=["server", "shared", "waiting in forward", "deterministic"],
)
def test_training_on_the_server_equals_the_single_process(
    ranks: TorchRanks, options: dict[str, Any]
) -> None:
    assert max(ranks.run(training.train, options)) <= 1e-5


@needs_pbox
@on_server
def test_training_goes_on_from_a_checkpoint(ranks: TorchRanks, options: dict[str, Any]) -> None:
    assert max(ranks.run(training.continue_from_a_checkpoint, options)) <= 1e-5


@every_backend
def test_ranks_may_use_different_branches(ranks: TorchRanks, backend: str) -> None:
    assert max(ranks.run(training.train_different_branches, backend)) <= 1e-5


@every_backend
def test_accumulation_clipping_casts_and_layouts(ranks: TorchRanks, backend: str) -> None:
    assert max(ranks.run(training.train_with_changes, backend)) <= 1e-5


@every_backend
def test_two_optimizers(ranks: TorchRanks, backend: str) -> None:
    assert max(ranks.run(training.train_two_models, backend)) <= 1e-5


@needs_pbox
@on_server
def test_loaded_weights_are_adopted(ranks: TorchRanks, options: dict[str, Any]) -> None:
    assert max(ranks.run(training.adopt_loaded_weights, options)) <= 1e-5


@needs_pbox
def test_stray_write_to_the_shared_model_reaches_nobody_else(ranks: TorchRanks) -> None:
    assert ranks.run(training.stray_write) == [True] + [False] * (SIZE - 1)


@every_backend
def test_models_that_differ_are_refused_at_registration(ranks: TorchRanks, backend: str) -> None:
    """Every rank gets the error, both sides are named, and the job goes on."""
    for text in ranks.run(training.open_different_models, backend):
        assert "'weight'" in text
        assert "rank 0 has" in text
        assert "rank 1 has" in text or "rank 2 has" in text
    assert max(ranks.run(training.train, {"backend": backend})) <= 1e-5


@needs_pbox
@pytest.mark.parametrize("lane", ["shm", "tcp"])
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_leave_while_backward_goes_on(size: int, lane: str) -> None:
    with TorchRanks(size, backend="pbox", lane=lane) as job:
        for rank, (error, part) in enumerate(job.run(training.overlap, {})):
            print(f"rank {rank} of {size}, {lane}: {part:.0%} left in backward, off by {error:.1e}")
            assert error <= 1e-5
            assert part >= 0.5


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        *[pytest.param(*one.values, {}, marks=one.marks) for one in usable("pbox", "ring", "gloo")],
        pytest.param("pbox", SERVER, marks=needs_pbox),
        pytest.param("pbox", SHARED, marks=needs_pbox),
    ],
)
def test_lost_rank_is_an_error_everywhere(backend: str, options: dict[str, Any]) -> None:
    timeout = 10.0
    with TorchRanks(SIZE, backend=backend, timeout=timeout) as job:
        found = job.run(training.lose_a_rank, options, dying=[SIZE - 1])
    for text, elapsed in found[:-1]:
        assert text.startswith("PeerLost")
        assert f"rank {SIZE - 1}" in text
        assert elapsed < timeout
