"""Measuring between threads, processes, and ranks that die; no number of a busy machine counts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ranks import run_processes, run_threads

from phub_collective import cli
from phub_collective.backends.base import Context
from phub_collective.errors import PeerLost, PeerTimeout
from phub_collective.probing import measure as measuring
from phub_collective.probing.matrix import Matrix
from phub_collective.probing.measure import measure, steady_rate
from phub_collective.probing.report import ranks_text

SECONDS = 0.02


def probe(context: Context, alone: bool = False) -> Matrix:
    return measure(context, SECONDS, alone, per_rank=True)


def complete(matrix: Matrix) -> bool:
    """Whether all but the diagonal is measured."""
    return all(
        (value is None) == (a == b) and (value is None or value > 0)
        for square in (matrix.bandwidth, matrix.latency)
        for a, line in enumerate(square)
        for b, value in enumerate(line)
    )


class TestRate:
    def test_a_steady_stream_is_what_it_is(self) -> None:
        assert steady_rate([0.5 + i / 100 for i in range(101)], 1000) == pytest.approx(100e3)

    def test_the_beginning_does_not_count(self) -> None:
        """A burst at once, or a slow start; then 100 blocks a second."""
        after = [0.2 + i / 100 for i in range(100)]
        for first in ([0.0] * 500, [0.0, 0.1]):
            assert steady_rate([*first, *after], 1000) == pytest.approx(100e3)

    def test_two_blocks_are_enough(self) -> None:
        assert steady_rate([1.0, 3.0], 1000) == pytest.approx(500)
        assert steady_rate([0.0, 0.0, 1.0], 1000) == pytest.approx(1000)


@pytest.mark.parametrize("alone", [False, True])
def test_all_ranks_hold_one_matrix_of_all_pairs(alone: bool) -> None:
    found = run_threads(3, probe, alone)
    assert found[0] == found[1] == found[2]
    assert found[0].alone == alone
    assert [host.ranks for host in found[0].hosts] == [(0,), (1,), (2,)]
    assert {host.name for host in found[0].hosts} == {socket.gethostname()}
    assert complete(found[0])
    assert all(value is None or value < 1.0 for line in found[0].latency for value in line)


def test_a_host_is_measured_once_however_many_ranks_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "hosts_of", lambda rendezvous: [[0, 2], [1, 3]])
    sent: list[str] = []
    stream = measuring.stream

    def noted(sock: socket.socket, seconds: float) -> float | None:
        sent.append(threading.current_thread().name)
        return stream(sock, seconds)

    monkeypatch.setattr(measuring, "stream", noted)
    matrix = run_threads(4, measure, SECONDS)[3]
    assert [host.ranks for host in matrix.hosts] == [(0, 2), (1, 3)]
    assert complete(matrix)
    assert sorted(sent) == ["rank0", "rank1"]


def test_ranks_of_one_host_have_no_link() -> None:
    matrix = run_threads(2, measure, SECONDS)[0]
    assert [host.ranks for host in matrix.hosts] == [(0, 1)]
    assert matrix.bandwidth == ((None,),)
    assert matrix.groups == [[0]]


def test_a_silent_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    woken = threading.Event()
    monkeypatch.setattr(measuring, "answer", lambda sock: woken.wait(30))
    try:
        with pytest.raises(PeerTimeout, match=r"\[probe\] rank 0 .* rank 1.* silent") as caught:
            run_threads(2, probe, timeout=1.0)
    finally:
        woken.set()
    assert caught.value.ranks == (1,)


def lose_rank_1(context: Context) -> int:
    """The rank that rank 0 has lost."""
    if context.rank == 1:
        vars(measuring)["receive"] = lambda sock: os._exit(1)
    with pytest.raises(PeerLost) as caught:
        probe(context)
    return caught.value.rank


def test_a_rank_that_dies_is_named() -> None:
    assert run_processes(2, lose_rank_1, dying=[1]) == [1, None]


def test_the_command_starts_its_own_ranks(tmp_path: Path) -> None:
    mine = ("PHUB_", "PMI_", "PMIX_", "OMPI_", "RANK", "WORLD_SIZE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    file = tmp_path / "links.json"
    done = subprocess.run(
        [sys.executable, "-m", "phub_collective", "probe", "-np", "3", "--seconds", "0.05",
         "--json", str(file)],
        env=environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    matrix = Matrix.load(file)
    assert [host.ranks for host in matrix.hosts] == [(0,), (1,), (2,)]
    assert complete(matrix)
    lines = done.stdout.splitlines()
    assert lines[0] == "# 3 hosts, 3 ranks; disjoint pairs at the same time"
    assert [line for line in lines if line.startswith("group ")] == [
        f"group {number}: ranks {ranks_text(group)}"
        for number, group in enumerate(matrix.groups, 1)
    ]


@pytest.mark.parametrize("flags", [("-np", "0"), ("--seconds", "0"), ("--seconds", "nan")])
def test_wrong_flags_start_nothing(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["probe", *flags]) == 1
    assert "[probe]" in capsys.readouterr().err
