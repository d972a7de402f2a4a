"""Who measures with whom, and when."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest

from phub_collective.probing.tournament import rounds, turns


@pytest.mark.parametrize("count", range(18))
def test_every_pair_meets_once_and_nobody_twice_in_a_round(count: int) -> None:
    found = rounds(count)
    assert len(found) == (0 if count < 2 else count - 1 if count % 2 == 0 else count)
    assert sorted(pair for pairs in found for pair in pairs) == [*combinations(range(count), 2)]
    for pairs in found:
        hosts = [host for pair in pairs for host in pair]
        assert len(set(hosts)) == len(hosts)
        assert len(pairs) == count // 2


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_turns_are_all_directions(count: int, alone: bool) -> None:
    found = turns(count, alone)
    assert sorted(pair for turn in found for pair in turn) == [*permutations(range(count), 2)]
    assert all(len(turn) == (1 if alone else count // 2) for turn in found)
    for there, back in zip(found[::2], found[1::2], strict=True):
        assert back == [(b, a) for a, b in there]
