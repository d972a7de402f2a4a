"""A matrix of links: its file, and how it is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from link_matrices import FIGURE_6_GROUPS, GBIT, figure_6, grouped, matrix_of, square

from phub_collective.errors import ConfigError
from phub_collective.probing.matrix import Matrix
from phub_collective.probing.report import lines_of, ranks_text

TWO_EACH = [[0, 1], [2, 3], [4, 5]]


def test_a_file_holds_all_of_it(tmp_path: Path) -> None:
    matrix = matrix_of(figure_6(), alone=True)
    path = tmp_path / "links.json"
    path.write_text(json.dumps(matrix.to_json()))
    assert Matrix.load(path) == matrix
    stored = json.loads(path.read_text())
    assert stored["groups"] == FIGURE_6_GROUPS
    assert stored["bandwidth_bytes_per_s"][0][2] == pytest.approx(8.95 * GBIT)
    assert stored["latency_s"][0] == [None] + [pytest.approx(1e-4)] * 7
    assert stored["hosts"][3] == {"name": "node3", "ranks": [3]}


def test_ranks_know_their_hosts() -> None:
    matrix = matrix_of(square(3, lambda a, b: 1.0), [[0, 3], [1, 2], [4]])
    assert [matrix.host_of(rank) for rank in range(5)] == [0, 1, 1, 0, 2]
    assert matrix.size == 5


def without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda fields: fields.pop(key)


def with_value(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda fields: fields.update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("latency_s"), "KeyError"),
        (with_value("hosts", 3), "TypeError"),
        (with_value("hosts", [{"name": "a", "ranks": [0]}]), "1 x 1 values for 1 hosts"),
        (with_value("latency_s", [[None, 1], [1, None]]), "3 x 3 values"),
        (with_value("latency_s", [[None, "x", 1], [1, None, 1], [1, 1, None]]), "TypeError"),
        (
            with_value("bandwidth_bytes_per_s", [[None, 1, 1], [1, None, None], [1, 1, None]]),
            "from host 1 to host 2, got None",
        ),
        (
            with_value("hosts", [{"name": "a", "ranks": [rank]} for rank in (0, 1, 1)]),
            "each rank on one host",
        ),
    ],
)
def test_what_is_no_matrix_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    fields = json.loads(json.dumps(matrix_of(square(3, lambda a, b: 1.0)).to_json()))
    change(fields)
    with pytest.raises(ConfigError, match=message):
        Matrix.from_json(fields)
    path = tmp_path / "links.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=rf"\[probe\] {path}: expected"):
        Matrix.load(path)


@pytest.mark.parametrize("text", [None, "{no json", "[]"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "links.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)):
        Matrix.load(path)


def test_it_is_printed_by_host_and_rank_with_its_groups() -> None:
    rates = grouped([[0, 2], [1]], 9.0, 4.5)
    lines = list(lines_of(matrix_of(rates, TWO_EACH)))
    assert lines[0] == "# 3 hosts, 6 ranks; disjoint pairs at the same time"
    assert [line.split() for line in lines[2:6]] == [
        ["0", "2", "4"],
        ["0-1", "node0", "-", "4.5", "9"],
        ["2-3", "node1", "4.5", "-", "4.5"],
        ["4-5", "node2", "9", "4.5", "-"],
    ]
    assert lines[8].split() == ["0-1", "node0", "-", "100", "100"]
    assert lines[-3:] == ["# 2 groups of hosts", "group 1: ranks 0-1,4-5", "group 2: ranks 2-3"]


def test_one_host_is_printed_too() -> None:
    lines = list(lines_of(matrix_of([[None]], [[0, 1]], alone=True)))
    assert lines[0] == "# 1 hosts, 2 ranks; one pair at a time"
    assert lines[-2:] == ["# all hosts are one group", "group 1: ranks 0-1"]


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "0"), ([0, 1], "0-1"), ([7, 0, 1, 2, 5], "0-2,5,7")]
)
def test_runs_of_ranks(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text
