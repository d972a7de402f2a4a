"""What measured links say about backends and about racks."""

from __future__ import annotations

from math import inf

import pytest
from link_matrices import FIGURE_6_GROUPS, GBIT, Square, figure_6, grouped, matrix_of, square

from phub_collective.errors import ConfigError
from phub_collective.probing.matrix import Matrix
from phub_collective.selection.costmodel import form_of
from phub_collective.selection.explain_links import lines_of
from phub_collective.selection.links import bottleneck, parameters, racks_of

MIB = 1 << 20
EQUAL = matrix_of(square(4, lambda a, b: 10.0))
TWO_A_HOST = [[0, 1], [2, 3], [4, 5], [6, 7]]


def one_slow(sender: int, receiver: int) -> Square:
    """Four hosts at 10 Gbit/s, one direction at 1."""
    return square(4, lambda a, b: 1.0 if (a, b) == (sender, receiver) else 10.0)


def predicted(backend: str, matrix: Matrix, nbytes: int) -> float:
    found = parameters(backend, matrix)
    assert found is not None
    return found.seconds(form_of(backend, nbytes, matrix.size))


class TestBottleneck:
    @pytest.mark.parametrize(
        ("backend", "used", "unused"),
        [
            ("ring", (1, 2), (2, 1)),
            ("ring", (3, 0), (0, 2)),
            ("gloo", (3, 0), (0, 2)),
            ("somebody_elses", (3, 0), (0, 2)),
            ("halving_doubling", (0, 2), (0, 3)),
            ("pbox", (3, 0), (1, 2)),
            ("pbox", (0, 2), (2, 3)),
        ],
    )
    def test_only_links_in_use_count(
        self, backend: str, used: tuple[int, int], unused: tuple[int, int]
    ) -> None:
        found = bottleneck(backend, matrix_of(one_slow(*used)))
        assert found == (*used, 1, 1.0 * GBIT)
        found = bottleneck(backend, matrix_of(one_slow(*unused)))
        assert found is not None
        assert found.bandwidth == 10.0 * GBIT

    def test_ranks_of_a_host_share_its_link(self) -> None:
        """Of a ring only one flow leaves a host; its two ranks push to the PBox at once."""
        matrix = matrix_of(square(4, lambda a, b: 10.0), TWO_A_HOST)
        flows = {}
        for backend in ("ring", "pbox", "halving_doubling"):
            found = bottleneck(backend, matrix)
            assert found is not None
            assert found.bandwidth == pytest.approx(10.0 * GBIT / found.flows)
            flows[backend] = found.flows
        assert flows == {"ring": 1, "pbox": 2, "halving_doubling": 2}

    @pytest.mark.parametrize("backend", ["ring", "pbox", "halving_doubling"])
    def test_one_host_has_no_links(self, backend: str) -> None:
        matrix = matrix_of([[None]], [[0, 1, 2]])
        assert bottleneck(backend, matrix) is None
        assert parameters(backend, matrix) is None


class TestParameters:
    def test_a_ring_takes_its_share_of_the_slowest_link(self) -> None:
        """2 (n - 1) / n of 10 MB at 1 Gbit/s, and 100 us for each of 6 steps."""
        found = predicted("ring", matrix_of(one_slow(1, 2)), 10**7)
        assert found == pytest.approx(1.5 * 0.08 + 6 * 1e-4)

    def test_the_servers_link_takes_all_other_workers(self) -> None:
        assert predicted("pbox", EQUAL, 10**7) == pytest.approx(3 * 0.008 + 2e-4)

    def test_a_worker_may_be_slower_than_the_server(self) -> None:
        matrix = matrix_of(one_slow(2, 0))
        assert predicted("pbox", matrix, 10**7) == pytest.approx(0.08 + 2e-4)

    def test_the_slowest_latency_in_use_counts(self) -> None:
        found = parameters("ring", EQUAL)
        assert found is not None
        assert found.latency == pytest.approx(1e-4)


class TestRacks:
    def test_groups_are_racks(self) -> None:
        racks = racks_of(matrix_of(figure_6(), alone=True))
        assert racks.workers == (5, 3)
        assert racks.worker_link == racks.pbox_link == pytest.approx(8.95 * GBIT)
        assert racks.uplink == pytest.approx(4.7 * GBIT)
        assert racks.latency == pytest.approx(1e-4)

    def test_pairs_at_once_show_how_much_crosses(self) -> None:
        """Three hosts can meet the other five at the same time: three flows, or two of them one
        way and one the other."""
        racks = racks_of(matrix_of(figure_6()))
        assert racks.uplink in [pytest.approx(flows * 4.7 * GBIT) for flows in (2, 3)]

    def test_a_users_rates_win(self) -> None:
        racks = racks_of(matrix_of(figure_6()), uplink=3e9, pbox_link=7e9)
        assert (racks.uplink, racks.pbox_link) == (3e9, 7e9)
        with pytest.raises(ConfigError, match="uplink"):
            racks_of(matrix_of(figure_6()), uplink=0.0)

    def test_ranks_of_a_host_share_its_link(self) -> None:
        racks = racks_of(matrix_of(grouped([[0, 1], [2, 3]], 10.0, 2.0), TWO_A_HOST))
        assert racks.workers == (4, 4)
        assert racks.worker_link == pytest.approx(5.0 * GBIT)
        assert racks.pbox_link == pytest.approx(10.0 * GBIT)

    def test_a_host_alone_in_its_group_has_its_fastest_link(self) -> None:
        racks = racks_of(matrix_of(grouped([[0, 1, 2], [3]], 10.0, 2.0)))
        assert racks.workers == (3, 1)
        assert racks.worker_link == pytest.approx(2.0 * GBIT)

    def test_one_host(self) -> None:
        racks = racks_of(matrix_of([[None]], [[0, 1]]))
        assert racks.workers == (2,)
        assert (racks.uplink, racks.latency) == (inf, 0.0)


class TestLines:
    def test_the_slowest_links_and_the_levels(self) -> None:
        lines = list(lines_of(matrix_of(figure_6()), ["ring", "pbox"], uplink=4.7))
        assert lines[1] == "# links: 8 hosts, 8 ranks; a PBox on the first host"
        (ring,) = (line for line in lines if line.startswith("ring"))
        assert ring.split()[:6] == ["ring", "0", "->", "1", "4.7", "Gbit/s"]
        assert any(line.startswith("# two levels: 2 racks of 5, 3 workers") for line in lines)
        assert any(line.startswith("# pairs were measured at the same time") for line in lines)
        links = "worker 8.95 Gbit/s, PBox 8.95 Gbit/s, rack to the others 4.7 Gbit/s"
        assert f"# {links}, 100 us" in lines
        rows = [line.split() for line in lines if line.endswith(("yes", "no", "pipelined"))]
        assert [row[0] for row in rows[-4:]] == ["1MiB", "25MiB", "100MiB", "500MiB"]

    @pytest.mark.parametrize(
        ("uplink", "verdict"), [(100.0, "no"), (35.0, "if pipelined"), (1.0, "yes")]
    )
    def test_the_verdict(self, uplink: float, verdict: str) -> None:
        """4 and 4 workers at 10 Gbit/s, PBoxes at 40. Of a gigabyte, inside 0.8 s; across 4 GB
        flat, and 1 GB around the ring: it pays below 30 Gbit/s, pipelined below 40."""
        matrix = matrix_of(grouped([range(4), range(4, 8)], 10.0, 5.0))
        lines = list(lines_of(matrix, [], uplink, pbox_link=40.0))
        assert lines[-1].split()[0] == "500MiB"
        assert lines[-1].endswith(f"  {verdict}")

    def test_what_was_only_seen_is_a_lower_bound(self) -> None:
        lines = list(lines_of(matrix_of(figure_6(), alone=True), ["ring"]))
        assert any("rack to the others at least 4.7 Gbit/s, 100 us" in line for line in lines)
        assert not any(line.startswith("# pairs were measured") for line in lines)

    def test_one_group_and_one_host(self) -> None:
        lines = list(lines_of(EQUAL, ["ring"]))
        assert lines[-1] == "# all hosts are one group: there are no two levels to reduce in"
        lines = list(lines_of(matrix_of([[None]], [[0, 1]]), ["ring"]))
        assert any(line.endswith("no link: all ranks are on one host") for line in lines)

    def test_figure_6_groups_are_the_racks(self) -> None:
        assert racks_of(matrix_of(figure_6())).workers == tuple(map(len, FIGURE_6_GROUPS))
