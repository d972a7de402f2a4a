"""Groups of hosts, told from the bandwidths between them."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_matrices import FIGURE_6_GROUPS, Square, figure_6, grouped, square

from phub_collective.errors import ConfigError
from phub_collective.probing.groups import APART, bandwidth_between, groups_of


def disturbed(rates: Square, share: float, seed: int) -> Square:
    """Every value off by up to `share` of it, each direction by itself."""
    numbers = random.Random(seed)
    return square(
        len(rates), lambda a, b: (rates[a][b] or 0.0) * (1 + numbers.uniform(-share, share))
    )


class TestGroups:
    def test_the_papers_hosts_fall_into_its_groups(self) -> None:
        assert FIGURE_6_GROUPS == [[0, 2, 3, 4, 6], [1, 5, 7]]
        assert groups_of(figure_6()) == FIGURE_6_GROUPS

    def test_rates_within_a_group_differ_as_printed(self) -> None:
        """8.9 to 9.0."""
        near = [8.9 + 0.1 * host / 7 for host in range(8)]
        rates = square(8, lambda a, b: near[a] if figure_6()[a][b] == 8.95 else 4.7)
        assert {rate for line in rates for rate in line} == {None, 4.7, *near}
        assert groups_of(rates) == FIGURE_6_GROUPS

    @given(st.integers(0, 1000))
    def test_a_few_percent_of_noise_change_nothing(self, seed: int) -> None:
        assert groups_of(disturbed(figure_6(), 0.05, seed)) == FIGURE_6_GROUPS

    @given(st.integers(1, 12), st.integers(0, 1000))
    def test_equal_links_are_one_group_noise_or_not(self, count: int, seed: int) -> None:
        rates = square(count, lambda a, b: 10.0)
        assert groups_of(rates) == groups_of(disturbed(rates, 0.05, seed)) == [[*range(count)]]

    @pytest.mark.parametrize(
        ("racks", "found"),
        [(8.0, [[0, 1, 2, 3], [4, 5, 6, 7]]), (2.0, [[0, 1], [2, 3], [4, 5], [6, 7]])],
    )
    def test_of_three_levels_the_widest_gap_counts(
        self, racks: float, found: list[list[int]]
    ) -> None:
        """Two hosts a rack at 10, two racks a site at `racks`, 1 between the sites."""
        rates = square(
            8, lambda a, b: 10.0 if a // 2 == b // 2 else racks if a // 4 == b // 4 else 1.0
        )
        assert groups_of(rates) == found

    def test_few_hosts(self) -> None:
        assert groups_of([]) == []
        assert groups_of([[None]]) == [[0]]
        assert groups_of(square(2, lambda a, b: 1.0 + a)) == [[0, 1]]

    def test_the_slower_direction_counts(self) -> None:
        """Host 2 sends as fast as the others, but nobody reaches it as fast."""
        rates = square(4, lambda a, b: 3.0 if b == 2 else 9.0)
        assert groups_of(rates) == [[0, 1, 3], [2]]
        assert bandwidth_between(rates, 2, 0) == bandwidth_between(rates, 0, 2) == 3.0

    def test_one_slow_link_between_near_hosts_makes_no_group(self) -> None:
        rates = figure_6()
        rates[0][2] = 0.5
        assert groups_of(rates) == FIGURE_6_GROUPS

    @pytest.mark.parametrize(("factor", "groups"), [(0.99, 1), (1.01, 2)])
    def test_where_one_group_becomes_two(self, factor: float, groups: int) -> None:
        rates = grouped([[0, 1], [2, 3]], APART * factor, 1.0)
        assert len(groups_of(rates)) == groups

    @pytest.mark.parametrize("wrong", [None, 0.0, -1.0, float("nan")])
    def test_a_missing_pair_is_named(self, wrong: float | None) -> None:
        rates = square(3, lambda a, b: 1.0)
        rates[2][1] = wrong
        with pytest.raises(ConfigError, match=r"\[probe\].* from host 2 to host 1, got"):
            groups_of(rates)

    def test_a_short_line_is_a_missing_pair(self) -> None:
        with pytest.raises(ConfigError, match="from host 0 to host 2, got None"):
            groups_of([[None, 1.0], [1.0, None, 1.0], [1.0, 1.0, None]])

    @given(st.permutations(range(8)))
    def test_the_order_of_hosts_does_not_count(self, order: list[int]) -> None:
        rates = figure_6()
        moved = [[rates[a][b] for b in order] for a in order]
        found = [sorted(order[host] for host in group) for group in groups_of(moved)]
        assert sorted(found) == FIGURE_6_GROUPS
