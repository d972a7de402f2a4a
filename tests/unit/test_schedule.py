"""Schedules run in simulation: no network, every size from 1 to 17, any interleaving."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phub_collective.backends import schedule
from phub_collective.backends.schedule import NOBODY, Step

Plan = Callable[[int, int, int], list[Step]]

ALGORITHMS: dict[str, Plan] = {
    "ring": schedule.ring,
    "halving_doubling": schedule.halving_doubling,
}
SIZES = range(1, 18)
POWERS = (1, 2, 4, 8, 16)


class Simulation:
    """Runs one plan per rank. A message is a reference into its sender's buffer, read only when
    it is delivered, so a plan that overwrites a range too early gives a wrong result."""

    def __init__(self, plans: list[list[Step]], buffers: list[np.ndarray], seed: int) -> None:
        self.plans, self.buffers = plans, buffers
        self.random = random.Random(seed)
        self.position = [0] * len(plans)  # the step whose receive is awaited
        self.sent = [0] * len(plans)  # steps whose send has started
        self.wires: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)

    def run(self) -> None:
        while True:
            for rank in range(len(self.plans)):
                self.advance(rank)
            ready = [pair for pair in self.wires if self.deliverable(*pair)]
            if not ready:
                break
            self.deliver(*self.random.choice(ready))
        assert not any(self.wires.values()), "messages were sent that nobody receives"
        waiting = [r for r, plan in enumerate(self.plans) if self.position[r] < len(plan)]
        assert not waiting, f"ranks {waiting} wait for messages that nobody sends"

    def advance(self, rank: int) -> None:
        """Start every send that is allowed, pass every step that receives nothing."""
        plan = self.plans[rank]
        while True:
            if self.sent[rank] == self.position[rank] < len(plan):
                step = plan[self.sent[rank]]
                if step.send_to != NOBODY:
                    self.wires[rank, step.send_to].append(step.send)
                self.sent[rank] += 1
            at = self.position[rank]
            if at == len(plan) or plan[at].recv_from != NOBODY:
                return
            self.position[rank] += 1

    def deliverable(self, source: int, target: int) -> bool:
        at = self.position[target]
        plan = self.plans[target]
        return bool(self.wires[source, target]) and plan[at].recv_from == source

    def deliver(self, source: int, target: int) -> None:
        begin, end = self.wires[source, target].popleft()
        step = self.plans[target][self.position[target]]
        assert (begin, end) == step.recv, "both sides must name the same range"
        for (sender, _), queue in self.wires.items():
            clashes = [r for r in queue if r[0] < end and begin < r[1]] if sender == target else []
            assert not clashes, f"rank {target} overwrites {clashes}, which is still being sent"
        piece = self.buffers[source][begin:end]
        if step.reduce:
            self.buffers[target][begin:end] += piece
        else:
            self.buffers[target][begin:end] = piece
        self.position[target] += 1


def simulate_allreduce(plan: Plan, size: int, count: int, seed: int = 0) -> list[list[Step]]:
    plans = [plan(rank, size, count) for rank in range(size)]
    buffers = [np.random.default_rng(rank).integers(1 << 40, size=count) for rank in range(size)]
    expected = np.sum(buffers, axis=0)
    Simulation(plans, buffers, seed).run()
    for rank in range(size):
        assert np.array_equal(buffers[rank], expected), (size, count, rank)
    return plans


def sent_elements(plan: list[Step]) -> int:
    return sum(end - begin for _, (begin, end), *_ in plan)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("size", SIZES)
def test_allreduce_is_exact(name: str, size: int) -> None:
    for count in {0, 1, 2, size - 1, size, size + 1, 3 * size + 2, 257}:
        simulate_allreduce(ALGORITHMS[name], size, count, seed=count)


@given(
    name=st.sampled_from(sorted(ALGORITHMS)),
    size=st.integers(1, 40),
    count=st.integers(0, 300),
    seed=st.integers(0, 2**32),
)
def test_allreduce_in_any_interleaving(name: str, size: int, count: int, seed: int) -> None:
    simulate_allreduce(ALGORITHMS[name], size, count, seed)


@given(
    size=st.integers(1, 40), root=st.integers(0, 39), count=st.integers(0, 50), seed=st.integers()
)
def test_broadcast_in_any_interleaving(size: int, root: int, count: int, seed: int) -> None:
    root %= size
    plans = [schedule.broadcast(rank, size, count, root) for rank in range(size)]
    buffers = [np.full(count, rank) for rank in range(size)]
    Simulation(plans, buffers, seed).run()
    for buffer in buffers:
        assert np.array_equal(buffer, np.full(count, root))


@pytest.mark.parametrize("size", SIZES)
def test_ring_costs(size: int) -> None:
    count = 12 * size  # divisible, so the formula holds to the element
    for rank in range(size):
        plan = schedule.ring(rank, size, count)
        assert len(plan) == 2 * (size - 1)
        assert sent_elements(plan) * size == 2 * (size - 1) * count


@pytest.mark.parametrize("size", POWERS)
def test_halving_doubling_costs(size: int) -> None:
    count = 12 * size
    for rank in range(size):
        plan = schedule.halving_doubling(rank, size, count)
        assert len(plan) == 2 * log2(size)
        assert sent_elements(plan) * size == 2 * (size - 1) * count


@pytest.mark.parametrize("size", set(SIZES) - set(POWERS))
def test_binary_blocks_costs(size: int) -> None:
    count = 16 * 3
    widths = [1 << bit for bit in (4, 3, 2, 1, 0) if size >> bit & 1]
    rank = 0
    for index, width in enumerate(widths):
        above = widths[index - 1] if index else 0
        smaller = index + 1 < len(widths)
        steps = 2 * log2(width) + 2 * above / width + 2 * smaller
        elements = 2 * (width - 1) / width * count + (bool(above) + smaller) * count / width
        for _ in range(width):
            plan = schedule.halving_doubling(rank, size, count)
            assert len(plan) == steps
            assert sent_elements(plan) == elements
            rank += 1


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_costs(size: int) -> None:
    plans = [schedule.broadcast(rank, size, 5, root=size // 2) for rank in range(size)]
    assert sum(sent_elements(plan) for plan in plans) == 5 * (size - 1)
    assert max(len(plan) for plan in plans) <= (ceil(log2(size)) if size > 1 else 0)


def test_steps_are_plain_numbers() -> None:
    """The native executor takes the steps as tuples of integers."""
    assert schedule.ring(0, 2, 5) == [(1, (0, 2), 1, (2, 5), True), (1, (2, 5), 1, (0, 2), False)]


def test_the_simulation_catches_an_early_overwrite() -> None:
    """A plan that receives into what it is still sending must fail, or the tests above prove
    nothing: rank 0 gets rank 2's piece without rank 1 having received anything."""
    plans = [
        [Step(1, (0, 4), NOBODY, (0, 0), False), Step(NOBODY, (0, 0), 2, (0, 4), False)],
        [Step(NOBODY, (0, 0), 2, (0, 4), False), Step(NOBODY, (0, 0), 0, (0, 4), False)],
        [Step(0, (0, 4), NOBODY, (0, 0), False), Step(1, (0, 4), NOBODY, (0, 0), False)],
    ]

    def run_all() -> None:
        for seed in range(20):
            Simulation(plans, [np.zeros(4) for _ in plans], seed).run()

    with pytest.raises(AssertionError, match="still being sent"):
        run_all()
