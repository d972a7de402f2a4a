"""Planning: the bandwidth formulas, the limits of scale, the cost model, and the paper's values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan

import pytest
from experiments import published
from hypothesis import given
from hypothesis import strategies as st

from phub_collective.errors import ConfigError
from phub_collective.models import model_keys
from phub_collective.planning import cost
from phub_collective.planning.bandwidth import DEPLOYMENTS, gbit, need
from phub_collective.planning.prices import Prices
from phub_collective.planning.scale import Resource, binding

some = st.floats(1e-3, 1e6)  # a positive number of an everyday size


class TestBandwidth:
    SERVERS: dict[str, Callable[[int], list[int]]] = {  # their machines; worker w is on machine w
        "CC": lambda n: [0],
        "CS": lambda n: list(range(n)),
        "NCC": lambda n: [n],
        "NCS": lambda n: list(range(n, 2 * n)),
    }

    @pytest.mark.parametrize("deployment", DEPLOYMENTS)
    def test_the_formulas_count_what_passes_between_machines(self, deployment: str) -> None:
        for workers in range(1, 18):
            servers = self.SERVERS[deployment](workers)
            moved: Counter[int] = Counter()  # models x servers, by machine
            for worker in range(workers):
                for server in servers:
                    if worker != server:  # a gradient and weights, past both machines' interfaces
                        moved.update({worker: 2, server: 2})
            expected = [moved[server] / len(servers) for server in servers]
            assert expected == pytest.approx(
                [need(deployment, 1, workers, 1)] * len(servers), rel=1e-12
            )

    @pytest.mark.parametrize("model", published.TABLE_2)
    def test_the_papers_table_2(self, model: str) -> None:
        """One time of a batch gives all four values as they are printed, and it is the time that
        the paper's own figure 5 shows."""
        printed = published.TABLE_2[model]
        nbytes = sum(key.nbytes for key in model_keys(model))
        in_a_second = {name: gbit(need(name, nbytes, 8, 1.0)) for name in DEPLOYMENTS}
        shortest = max(in_a_second[name] / (printed[name] + 0.5) for name in DEPLOYMENTS)
        longest = min(in_a_second[name] / (printed[name] - 0.5) for name in DEPLOYMENTS)
        assert shortest < longest
        batch_s = (shortest + longest) / 2
        assert printed == {
            name: round(gbit(need(name, nbytes, 8, batch_s))) for name in DEPLOYMENTS
        }
        digit = 0.05e-3  # the last one of the times below
        known = published.TABLE_2_BATCH_S[model]
        assert shortest - digit <= known <= longest + digit
        seen, mark = published.BATCH_S[model]
        assert mark == published.READ_OFF
        assert batch_s == pytest.approx(seen, rel=0.02)

    @given(nbytes=some, workers=st.integers(1, 1000), batch_s=some)
    def test_the_deployments_relations(self, nbytes: float, workers: int, batch_s: float) -> None:
        cc, cs, ncc, ncs = (need(name, nbytes, workers, batch_s) for name in DEPLOYMENTS)
        assert cc + ncs == pytest.approx(ncc)  # what a worker on the server's machine saves
        assert cs * workers == pytest.approx(2 * cc)  # shards: both ends of all that moves
        assert ncs * workers == pytest.approx(ncc)
        assert need("NCC", 2 * nbytes, workers, batch_s / 3) == pytest.approx(6 * ncc)

    @pytest.mark.parametrize(
        ("nbytes", "workers", "batch_s"),
        [(0, 8, 1), (1, 0, 1), (1, 8, 0), (1, 8, nan), (1, 8, inf)],
    )
    def test_no_need_of_nothing(self, nbytes: int, workers: int, batch_s: float) -> None:
        with pytest.raises(ConfigError, match=f"{workers} workers and {batch_s:g} s"):
            need("NCC", nbytes, workers, batch_s)


class TestScale:
    MEMORY = Resource("memory", need=6, limit=90)
    NETWORK = Resource("network", need=4, limit=140)

    def test_the_papers_120_workers(self) -> None:
        assert self.MEMORY.most_workers(8) == 120
        assert binding([self.MEMORY, self.NETWORK], 8) is self.MEMORY

    def test_a_platform_with_forty_percent_more(self) -> None:
        assert replace(self.MEMORY, limit=90 * 1.4).most_workers(8) == 168

    def test_the_network_can_bind_and_the_first_of_equals_does(self) -> None:
        narrow = replace(self.NETWORK, limit=59)
        assert binding([self.MEMORY, narrow], 8) is narrow
        assert narrow.most_workers(8) == 118
        equal = replace(self.NETWORK, limit=60)
        assert binding([self.MEMORY, equal], 8) is self.MEMORY

    @given(used=some, limit=some, workers=st.integers(1, 100))
    def test_one_more_would_be_too_many(self, used: float, limit: float, workers: int) -> None:
        most = Resource("memory", used, limit).most_workers(workers)
        assert most * used / workers <= limit * (1 + 1e-8)
        assert (most + 1) * used / workers > limit

    @pytest.mark.parametrize(
        ("used", "limit", "workers"),
        [(0, 90, 8), (6, -1, 8), (6, 90, 0), (nan, 90, 8), (6, inf, 8)],
    )
    def test_numbers_must_be_above_0(self, used: float, limit: float, workers: int) -> None:
        with pytest.raises(ConfigError, match=r"numbers above 0, got .* GB/s of network"):
            Resource("network", used, limit).most_workers(workers)


class TestCost:
    PRICES = Prices.example()

    def test_the_gains_of_the_example(self) -> None:
        gains = {
            worker: [f"{cost.gain(self.PRICES, worker, over):+.1%}" for over in (1, 2, 3)]
            for worker in self.PRICES.workers
        }
        assert gains == {
            "future GPUs": ["+20.7%", "+25.7%", "+27.4%"],
            "V100": ["+4.2%", "+5.4%", "+5.8%"],
            "cheap processors": ["+28.7%", "+36.0%", "+38.5%"],
        }

    def test_the_bars_that_the_authors_printed(self) -> None:
        """82.2 and 60.4 per 1000 dollars on their poster: what the example's rates are made for."""
        ours = cost.with_pbox(self.PRICES, "cheap processors", 2)
        assert f"{ours.per_1000_dollars:.1f}" == "82.2"
        assert f"{cost.baseline(self.PRICES, 'cheap processors').per_1000_dollars:.1f}" == "60.4"

    def test_a_machines_share_of_the_network(self) -> None:
        """N + S + C + F (4 S + 2 C), by hand."""
        links = self.PRICES.network
        assert cost.network(links.baseline, 1) == pytest.approx(795 + 5 * 21077 / 32 + 3 * 94)
        assert cost.network(links.pbox, 2) == pytest.approx(260 + 3 * 21077 / 128 + 2 * 31.25)

    @pytest.mark.parametrize(("ports", "workers"), [(20, [44, 65, 76]), (10, [54, 75, 86])])
    def test_a_rack_holds_what_one_switch_connects(self, ports: int, workers: list[int]) -> None:
        prices = replace(self.PRICES, pbox=replace(self.PRICES.pbox, ports=ports))
        assert [cost.workers_per_pbox(prices, over) for over in (1, 2, 3)] == workers

    @given(ports=st.integers(1, 4096), over=st.integers(1, 9))
    def test_no_port_of_a_switch_is_used_twice(self, ports: int, over: int) -> None:
        links = replace(
            self.PRICES.network, pbox=replace(self.PRICES.network.pbox, switch_ports=ports)
        )
        prices = replace(self.PRICES, network=links, pbox=replace(self.PRICES.pbox, ports=1))
        try:
            down = cost.workers_per_pbox(prices, over) + 1
        except ConfigError:
            down = ports * over // (1 + over)
            assert down <= 1
        assert down + down / over <= ports < (down + 1) + (down + 1) / over

    def test_a_switch_without_a_port_for_a_worker(self) -> None:
        prices = replace(self.PRICES, pbox=replace(self.PRICES.pbox, ports=64))
        message = (
            r"network.pbox.switch_ports=128, of which 64 .* at 1:1: .* more than pbox.ports=64"
        )
        with pytest.raises(ConfigError, match=message):
            cost.with_pbox(prices, "V100", 1)
        assert cost.workers_per_pbox(prices, 2) == 21

    @given(machine=some, speed=some, overhead=st.floats(0, 0.9), over=st.integers(1, 3))
    def test_the_gain_comes_of_speed_and_of_dollars_saved(
        self, machine: float, speed: float, overhead: float, over: int
    ) -> None:
        """1 + gain = r (1 + d / x): r the ratio of speeds, x what a worker costs with a PBox, d
        what it costs less than one without."""
        worker = replace(self.PRICES.workers["V100"], machine=machine, pbox_samples_per_s=speed)
        pbox = replace(self.PRICES.pbox, overhead=overhead)
        prices = replace(self.PRICES, workers={"w": worker}, pbox=pbox)
        before, after = cost.baseline(prices, "w"), cost.with_pbox(prices, "w", over)
        ratio = speed * (1 - overhead) / worker.baseline_samples_per_s
        saved = (before.dollars - after.dollars) / after.dollars
        assert 1 + cost.gain(prices, "w", over) == pytest.approx(ratio * (1 + saved))

    def test_what_makes_a_pbox_pay(self) -> None:
        """Less bisection, and a network that is more of a worker's price."""
        for worker in self.PRICES.workers:
            gains = [cost.gain(self.PRICES, worker, over) for over in cost.OVERSUBSCRIPTION]
            assert gains == sorted(gains)
        at_2 = {worker: cost.gain(self.PRICES, worker, 2) for worker in self.PRICES.workers}
        assert at_2["V100"] < at_2["future GPUs"] < at_2["cheap processors"]
