"""The cost model: forms against the schedules, fits against known truth, choices by size."""

from __future__ import annotations

from math import inf, log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phub_collective.backends import schedule
from phub_collective.selection.costmodel import (
    Curve,
    Form,
    Parameters,
    cheapest,
    decisions,
    fit,
    form_of,
)

SIZES = [4 << 10, 64 << 10, 1 << 20, 16 << 20]
BACKENDS = ["pbox", "pshard", "ring", "halving_doubling", "mpi", "gloo", "somebody_elses"]


def points(backend: str, size: int, truth: Parameters) -> list[tuple[int, float]]:
    return [(nbytes, truth.seconds(form_of(backend, nbytes, size))) for nbytes in SIZES]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_forms_are_those_of_the_schedules(size: int) -> None:
    nbytes = 1 << 20
    share = 2 * (size - 1) / size
    assert form_of("ring", nbytes, size) == Form(2 * (size - 1), share * nbytes)
    assert form_of("halving_doubling", nbytes, size) == Form(2 * log2(size), share * nbytes)
    assert form_of("pbox", nbytes, size) == Form(2, size * nbytes)
    assert form_of("pshard", nbytes, size) == Form(2, share * nbytes)
    assert len(schedule.ring(0, size, 64)) == form_of("ring", 64, size).rounds


def test_binary_blocks_count_their_worst_rank() -> None:
    """With 9 ranks the odd one out sends all it has, and gets all of it back."""
    form = form_of("halving_doubling", 1000, 9)
    assert form.rounds == 2 * 8
    assert form.moved == pytest.approx(1000 * (2 * 7 / 8 + 1 / 8))


# Not the bare name as id: pytest-mpi takes one that is "mpi" for its marker.
@pytest.mark.parametrize("backend", BACKENDS, ids="of_{}".format)
@given(
    size=st.integers(2, 20),
    latency=st.floats(1e-6, 1e-2),
    bandwidth=st.floats(1e7, 1e11),
)
def test_fit_finds_the_truth(backend: str, size: int, latency: float, bandwidth: float) -> None:
    truth = Parameters(latency, bandwidth)
    found = fit(backend, size, points(backend, size, truth))
    for nbytes in [*SIZES, 256 << 20]:
        form = form_of(backend, nbytes, size)
        assert found.seconds(form) == pytest.approx(truth.seconds(form), rel=1e-3)


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 28), st.floats(1e-7, 100)),
        min_size=1,
        max_size=6,
        unique_by=lambda point: point[0],
    )
)
def test_no_measurement_makes_a_negative_parameter(measured: list[tuple[int, float]]) -> None:
    found = fit("ring", 4, measured)
    assert found.latency >= 0
    assert 0 < found.bandwidth <= inf
    curve = Curve.through("ring", 4, measured)
    for nbytes in (0, 1, 1000, 1 << 20, 1 << 33):
        assert 0 < curve.seconds(nbytes) < inf


def test_a_curve_goes_through_its_points() -> None:
    measured = [(1 << 20, 2e-3), (4 << 10, 1e-4), (16 << 20, 9e-2)]
    curve = Curve.through("gloo", 4, measured)
    for nbytes, seconds in measured:
        assert curve.seconds(nbytes) == pytest.approx(seconds)
    between = curve.seconds(4 << 20)  # the geometric middle of 1 and 16 MiB
    assert between == pytest.approx((2e-3 * 9e-2) ** 0.5)
    assert curve.seconds(0) == curve.seconds(1) == 1e-4


def test_beyond_the_probe_the_form_decides() -> None:
    truth = Parameters(1e-4, 1e9)
    curve = Curve.through("ring", 8, points("ring", 8, truth))
    for nbytes in (64 << 20, 1 << 30):
        expected = truth.seconds(form_of("ring", nbytes, 8))
        assert curve.seconds(nbytes) == pytest.approx(expected, rel=1e-3)


def test_decisions_are_ranges_of_sizes() -> None:
    curves = {
        "quick_start": Curve.through("ring", 2, points("ring", 2, Parameters(1e-5, 1e8))),
        "quick_flow": Curve.through("ring", 2, points("ring", 2, Parameters(1e-3, 1e9))),
    }
    rows = decisions(curves, [1 << bit for bit in range(10, 28)])
    assert [name for _, name in rows] == ["quick_start", "quick_flow"]
    start = rows[1][0]
    assert cheapest(curves, start // 4) == "quick_start"
    assert cheapest(curves, start) == "quick_flow"


def test_a_small_gain_does_not_change_the_choice() -> None:
    measured = {"a": [(1000, 1.0), (8000, 2.0)], "b": [(1000, 1.05), (8000, 1.9)]}
    curves = {name: Curve.through("ring", 2, points) for name, points in measured.items()}
    assert cheapest(curves, 8000) == "b"
    assert decisions(curves, [1000, 8000]) == [(1000, "a")]
    curves["b"] = Curve.through("ring", 2, [(1000, 1.05), (8000, 1.7)])
    assert decisions(curves, [1000, 8000]) == [(1000, "a"), (8000, "b")]


def test_ties_go_to_the_first() -> None:
    curve = Curve.through("ring", 2, [(1000, 1.0)])
    assert cheapest({"b": curve, "a": curve}, 5) == "b"


def test_one_rank_costs_nothing_but_still_has_a_curve() -> None:
    curve = Curve.through("ring", 1, [(1000, 1e-6), (1 << 20, 1e-5)])
    assert curve.seconds(1 << 30) == 1e-5
