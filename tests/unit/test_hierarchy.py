"""Whether reducing in two levels pays: the estimate at its limits, and by hand."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phub_collective.errors import ConfigError
from phub_collective.selection.hierarchy import Racks, estimate, flat_bytes, ring_bytes

MIB = 1 << 20
EIGHT_EACH = Racks((8, 8, 8, 8), 1e9, 8e9, 2e9, 1e-4)  # full inside, 4:1 to the others

rates = st.floats(1e6, 1e12)
workers = st.lists(st.integers(1, 50), min_size=1, max_size=8).map(tuple)
any_racks = st.builds(Racks, workers, rates, rates, rates, st.floats(0, 1))


def test_by_hand() -> None:
    """8 workers in each of 4 racks, 1 GB."""
    found = estimate(10**9, EIGHT_EACH)
    assert found.flat == pytest.approx(2 * 8 * (3 / 4) / 2)
    assert found.inside == pytest.approx(1.0)
    assert found.ring == pytest.approx(2 * (3 / 4) / 2 + 6e-4)
    assert found.in_turn == pytest.approx(1.7506)
    assert found.pipelined == pytest.approx(1.0)
    assert found.pays
    assert found.pays_pipelined


@given(st.integers(1, 50), rates, rates, rates, st.integers(1, 1 << 32))
def test_one_rack_has_nothing_to_gain(
    count: int, worker: float, pbox: float, uplink: float, nbytes: int
) -> None:
    found = estimate(nbytes, Racks((count,), worker, pbox, uplink, 1e-3))
    assert found.flat == found.ring == 0
    assert not found.pays
    assert not found.pays_pipelined


@pytest.mark.parametrize("racks", [2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_ring_moves_a_rack_of_workers_times_less_across(racks: int, count: int) -> None:
    assert flat_bytes(MIB, (count,) * racks) == pytest.approx(count * ring_bytes(MIB, racks))


def test_of_unequal_racks_the_one_that_sends_most_counts() -> None:
    """5 and 3 of 8: the gradients of 5 for 3 shards, and 5 shards' answers to 3, of 8 each."""
    assert flat_bytes(8, (5, 3)) == flat_bytes(8, (3, 5)) == 2 * 5 * 3
    assert flat_bytes(6, (1, 2, 3)) == 2 * 3 * 3


@given(st.integers(2, 8), rates, rates, rates, st.integers(1, 1 << 32))
def test_racks_of_one_worker_have_nothing_to_gain(
    racks: int, worker: float, pbox: float, uplink: float, nbytes: int
) -> None:
    found = estimate(nbytes, Racks((1,) * racks, worker, pbox, uplink, 0.0))
    assert not found.pays
    assert not found.pays_pipelined


def test_two_full_racks_have_nothing_to_gain() -> None:
    """Without oversubscription the flat transfers take as long as the rack's own."""
    found = estimate(MIB, Racks((8, 8), 1e9, 8e9, 8e9, 0.0))
    assert found.flat == pytest.approx(found.inside)
    assert not found.pays


def test_small_messages_are_all_latency() -> None:
    assert not estimate(4096, EIGHT_EACH).pays_pipelined
    assert estimate(1 << 30, EIGHT_EACH).pays


def test_a_slow_pbox_holds_both_levels_up() -> None:
    slow = Racks((8, 8), 1e9, 0.5e9, 1e9, 0.0)
    found = estimate(10**9, slow)
    assert found.inside == pytest.approx(16.0)
    assert found.ring == pytest.approx(2.0)
    assert not found.pays_pipelined


def test_a_slow_core_is_relieved_by_as_much_as_a_rack_has_workers() -> None:
    found = estimate(1 << 30, Racks((8, 8), 1e12, 1e12, 1e6, 0.0))
    assert found.flat / found.pipelined == pytest.approx(8)


@given(any_racks, st.integers(0, 1 << 34))
def test_what_pays_in_turn_pays_pipelined(racks: Racks, nbytes: int) -> None:
    found = estimate(nbytes, racks)
    assert found.pipelined <= found.in_turn
    assert found.pays_pipelined or not found.pays


@pytest.mark.parametrize(
    "fields",
    [
        ((), 1, 1, 1, 0),
        ((2, 0), 1, 1, 1, 0),
        ((2, 2), 0, 1, 1, 0),
        ((2, 2), 1, -1, 1, 0),
        ((2, 2), 1, 1, float("nan"), 0),
        ((2, 2), 1, 1, 1, -1),
    ],
)
def test_what_cannot_be_is_refused(
    fields: tuple[tuple[int, ...], float, float, float, float],
) -> None:
    with pytest.raises(ConfigError, match=r"\[hierarchy\] expected"):
        Racks(*fields)


def test_links_that_are_no_limit() -> None:
    found = estimate(MIB, Racks((2, 2), inf, inf, inf, 1e-3))
    assert (found.flat, found.inside, found.ring) == (0, 0, 2e-3)
