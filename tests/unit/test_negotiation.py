"""How ranks agree on one order of operations: every rank decides the same, whatever the rounds."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from phub_collective.backends.negotiation import Announcement, Negotiation, Refuse, Start


def said(*names: str, description: str = "float32[4] sum") -> list[Announcement]:
    return [Announcement(name, description) for name in names]


def test_starts_when_the_last_rank_has_announced() -> None:
    negotiation = Negotiation(3)
    assert negotiation.take([said("x"), [], said("y", "x")]) == []
    assert negotiation.missing("x") == (1,)
    assert negotiation.missing("y") == (0, 1)
    assert negotiation.take([[], said("x"), []]) == [Start("x", "float32[4] sum")]
    assert negotiation.missing("x") == ()


def test_a_difference_is_refused_at_once_and_names_both_sides() -> None:
    negotiation = Negotiation(3)
    decisions = negotiation.take([[], said("x", description="b"), said("x", description="c")])
    assert decisions == [Refuse("x", "rank 1 has b, rank 2 has c", frozenset({0}))]


def test_a_rank_that_comes_after_the_refusal_does_not_begin_a_new_use() -> None:
    negotiation = Negotiation(3)
    negotiation.take([said("x", description="a"), said("x", description="b"), []])
    again = said("x", description="a")
    assert negotiation.take([again, again, again]) == []  # rank 2's belongs to the refused use
    assert negotiation.missing("x") == (2,)
    assert negotiation.take([[], [], again]) == [Start("x", "a")]


def test_a_rank_may_be_late_for_two_refusals() -> None:
    negotiation = Negotiation(3)
    for _ in range(2):
        negotiation.take([said("x", description="a"), said("x", description="b"), []])
    again = said("x", description="a")
    for announcements in ([[], [], again], [[], [], again], [again, again, []]):
        assert negotiation.take(announcements) == []
    assert negotiation.take([[], [], again]) == [Start("x", "a")]


@given(size=st.integers(1, 6), names=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_any_order_in_any_rounds_starts_everything_once(size: int, names: int, seed: int) -> None:
    chance = random.Random(seed)
    queues = [chance.sample([f"n{i}" for i in range(names)], names) for _ in range(size)]
    here, there = Negotiation(size), Negotiation(size)
    started: list[str] = []
    while any(queues):
        round_ = []
        for queue in queues:
            taken = chance.randint(0, len(queue))
            round_.append(said(*queue[:taken]))
            del queue[:taken]
        decisions = here.take(round_)
        assert decisions == there.take(round_)
        started += [decision.name for decision in decisions]
    assert sorted(started) == sorted(f"n{i}" for i in range(names))
