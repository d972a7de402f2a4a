"""The paper's experiments: their floors, what they make of rows, the report, and all of them in
small where labs are allowed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from experiments import floors, published, report
from experiments.base import Rows, Scale
from experiments.catalogue import EXPERIMENTS, WAITING
from experiments.cells import SYSTEMS, WITH_PSHARD, Cell, exchange, rack
from experiments.figure15 import Figure15
from experiments.requirements import Floors
from experiments.runner import CellError, finish, require_memory
from experiments.store import Store
from experiments.table02 import formula
from experiments.table05 import Table5
from lab import check, network
from lab.topology import MTU_SHARE, Shape
from lab.worker import Iteration, summary

ROOT = Path(__file__).resolve().parents[2]
PAPER = [sys.executable, str(ROOT / "scripts/paper.py")]
USED = check.Use(0.9, 0.5, 0, 0)


class TestFloors:
    def test_a_pbox_with_enough_links_takes_one_model_each_way(self) -> None:
        shape = Shape(8, link=1e9, pbox_links=8)
        assert floors.exchange("pbox", 10**6, shape) == pytest.approx(8e-3 / MTU_SHARE)

    def test_a_pbox_with_one_link_takes_all_models(self) -> None:
        shape = Shape(8, link=1e9, pbox_links=1)
        assert floors.exchange("pbox", 10**6, shape) == pytest.approx(8 * 8e-3 / MTU_SHARE)

    def test_a_pbox_on_a_workers_host_takes_the_models_of_the_others(self) -> None:
        shape = Shape(8, link=1e9, pbox_links=0)
        assert floors.exchange("pbox", 10**6, shape) == pytest.approx(7 * 8e-3 / MTU_SHARE)

    @pytest.mark.parametrize("system", ["pshard", "ring", "halving_doubling", "gloo"])
    def test_collectives_and_shards_of_eight_take_seven_quarters(self, system: str) -> None:
        assert floors.moved(system, 1000, 8) == pytest.approx(1750)

    def test_other_numbers_of_workers_cost_halving_doubling_more(self) -> None:
        assert floors.moved("ring", 1000, 6) == pytest.approx(5 / 3 * 1000, rel=1e-4)
        assert floors.moved("halving_doubling", 1000, 6) > 5 / 3 * 1000

    def test_one_worker_moves_something_to_a_pbox_only(self) -> None:
        assert floors.moved("pbox", 1000, 1) == 1000
        assert floors.moved("ring", 1000, 1) == floors.moved("pshard", 1000, 1) == 0

    def test_gradients_leave_during_backward(self) -> None:
        assert floors.step(1.0, 3.0, 2 / 3) == pytest.approx(1.0 + 2.0)
        assert floors.step(5.0, 3.0, 2 / 3) == pytest.approx(1.0 + 5.0)


class TestPublished:
    def test_the_formulas_give_what_the_paper_printed(self) -> None:
        for model, values in published.TABLE_2.items():
            for name, printed in values.items():
                # Rounded are the value, and the batch's time to three digits.
                assert abs(formula(model, name) - printed) <= 0.5 + 0.003 * printed

    def test_every_network_has_a_batch(self) -> None:
        assert set(published.BATCH_S) == set(published.BATCH_SIZE) == set(published.NETWORKS)


class TestCost:
    def test_the_examples_gains_are_near_the_papers(self) -> None:
        found = Table5().findings(Rows([]))
        assert all(claim.holds for claim in found.claims)
        (table,) = found.tables
        _, *lines = table.lines
        assert [line[0] for line in lines] == list(published.TABLE_5)
        assert [line[2] for line in lines] == ["+25.7%", "+5.4%", "+36.0%"]


class TestCells:
    def test_only_who_needs_a_pbox_gets_one(self) -> None:
        links = {
            system: exchange(system, "ResNet18", rack(8, 10)).shape.pbox_links
            for system in (*WITH_PSHARD, "auto")
        }
        assert {system for system, count in links.items() if count} == {"pbox", "auto"}

    def test_a_key_tells_measurements_apart_and_labels_do_not_count(self) -> None:
        shape = rack(8, 10)
        cells = [
            exchange("pbox", "ResNet18", shape),
            exchange("pbox", "ResNet18", shape, chunk_bytes=4096),
            exchange("pbox", "ResNet18", shape, batch_s=0.1),
            exchange("pbox", "ResNet18", rack(7, 10)),
            exchange("ring", "ResNet18", shape),
        ]
        assert len({cell.key for cell in cells}) == len(cells)
        labelled = exchange("pbox", "ResNet18", shape, labels={"place": "lab"})
        assert labelled.key == cells[0].key

    def test_what_does_not_fit_into_memory_is_refused_with_the_estimate(self) -> None:
        cell = exchange("ring", "VGG19", rack(150, 0))
        assert cell.memory > 150 * 500 << 20
        with pytest.raises(CellError, match=r"needs about \d+"):
            require_memory([Cell("worker", Shape(1), memory=1 << 50)])

    @pytest.mark.parametrize("name", list(EXPERIMENTS))
    def test_the_links_of_eight_workers_are_slow_enough_for_this_machine(self, name: str) -> None:
        for cell in EXPERIMENTS[name].cells(Scale.FULL):
            if not cell.here:
                rate = cell.shape.shaped(cell.shape.link)
                assert rate * cell.shape.workers <= 4.01e9
                assert cell.seconds > 0
                assert cell.memory > 0


def output(**changed: Any) -> dict[str, Any]:
    """What rank 0 of eight writes of an exchange of a megabyte."""
    row = {"backend": "pbox", "bytes": 10**6, "wrong": 0, "exchanges": 3}
    row |= {"seconds": [1e-3, 2e-3, 3e-3], "pressure": [0.1, 0.9, 0.9]}
    return {**row, "least_received": 10**6, "least_sent": 10**6, **changed}


class TestFinish:
    cell = exchange("pbox", "ResNet18", rack(8, 10))

    def test_a_row_has_its_median_and_its_floor(self) -> None:
        row = finish(self.cell, [output()], USED)
        assert row["median_s"] == 2e-3
        assert row["floor_s"] == pytest.approx(0.8e-3 / MTU_SHARE)
        assert row["cpu_bound"]  # far from its floor, and processes waited for processors

    def test_at_its_floor_a_run_is_not_cpu_bound(self) -> None:
        row = finish(self.cell, [output(seconds=[0.84e-3] * 3)], USED)
        assert not row["cpu_bound"]

    def test_wrong_numbers_are_an_error(self) -> None:
        with pytest.raises(CellError, match="wrong"):
            finish(self.cell, [output(wrong=1)], USED)

    @pytest.mark.parametrize("which", ["least_received", "least_sent"])
    def test_links_that_moved_too_little_are_an_error(self, which: str) -> None:
        with pytest.raises(CellError, match="another way"):
            finish(self.cell, [output(**{which: 10**6 - 1})], USED)

    def test_an_iteration_lasts_until_its_last_rank(self) -> None:
        ranks = [
            [Iteration(10.0, 11.0, 0, 100, 300, 0.5)],
            [Iteration(10.0, 14.0, 0, 200, 150, 0.0)],
        ]
        found = summary(ranks, burst=2, dilation=2.0)
        assert found["seconds"] == [1.0]
        assert (found["least_received"], found["least_sent"]) == (50, 75)
        assert found["pressure"] == [0.125]


class TestReport:
    @staticmethod
    def rows(times_floor: float) -> list[dict[str, Any]]:
        common = {
            "links": 10,
            "dilation": 112.0,
            "commit": "c",
            "code": "d",
            "date": "e",
            "key": "",
        }
        return [
            {"system": system, "model": model, "workers": 8, "times_floor": times_floor}
            | {"median_s": {"pbox": 1.0}.get(system, 1.75), "cpu_bound": times_floor > 1.03}
            | common
            for system in SYSTEMS
            for model in ("ResNet18", "AlexNet")
        ]

    def test_what_does_not_hold_stands_first(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        store.keep("floors", self.rows(1.5))
        claims = report.write(store, tmp_path)
        assert any(claim.holds is False for claim in claims)
        text = (tmp_path / "REPORT.md").read_text()
        missed = text.index("not reached\n\n- floors: ResNet18, pbox: 1.5000 x floor")
        assert missed < text.index("and reached")
        assert "cpu-bound, so slower than links allow: 8 of them" in text
        assert (tmp_path / "floors.png").stat().st_size > 5000

    def test_bars_that_are_reached(self) -> None:
        claims = Floors().findings(Rows(self.rows(1.01))).claims
        assert claims
        assert all(claim.holds for claim in claims)

    def test_scaling_is_judged_from_the_first_to_the_last_worker(self) -> None:
        def rows(last: float) -> Rows:
            times = {1: 1.0, 8: last}
            return Rows(
                {"system": "pbox", "workers": count, "median_s": seconds}
                for count, seconds in times.items()
            )

        assert [c.holds for c in Figure15().findings(rows(1.02)).claims if c.bar] == [True]
        assert [c.holds for c in Figure15().findings(rows(1.05)).claims if c.bar] == [False]

    def test_an_unmeasured_experiment_is_said_to_be_one(self, tmp_path: Path) -> None:
        report.write(Store(tmp_path), tmp_path)
        text = (tmp_path / "REPORT.md").read_text()
        assert text.count("Not measured yet.") == sum(
            experiment.kind != "arithmetic" for experiment in EXPERIMENTS.values()
        )
        for one in WAITING:
            assert f"- {one.name}: " in text


class TestStore:
    def test_rows_of_the_same_code_are_known_again(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        store.stamp = {"code": "abc"}
        store.keep("one", [{"key": "k", "code": "abc"}, {"key": "l", "code": "older"}])
        assert set(store.known()) == {"k"}
        store.stamp = {"code": "abc-changed"}
        assert not store.known()


class TestCommandLine:
    def test_list_names_times_and_what_waits(self) -> None:
        done = subprocess.run([*PAPER, "list"], capture_output=True, text=True, check=True)
        for name in EXPERIMENTS:
            assert re.search(rf"^{name} +\d+\.\d", done.stdout, re.M)
        for one in WAITING:
            assert re.search(rf"^{one.name} +- .*waits for", done.stdout, re.M)

    @pytest.mark.parametrize(("name", "says"), [("figure99", "no experiment"), ("table4", "waits")])
    def test_what_cannot_be_run_is_refused(self, name: str, says: str, tmp_path: Path) -> None:
        words = [*PAPER, name, "--results", str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert says in done.stderr


@pytest.mark.timeout(300)
def test_all_experiments_in_small(tmp_path: Path) -> None:
    """Real labs, real processes; every element compared, every link's counters read."""
    try:
        network.require_kernel()
    except network.LabError as error:
        pytest.skip(str(error))
    words = [*PAPER, "all", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 3), done.stdout + done.stderr  # 3: a busy machine
    run = {name: cells for name, one in EXPERIMENTS.items() if (cells := one.cells(Scale.QUICK))}
    assert len(run) > 6
    for name, cells in run.items():
        rows = json.loads((tmp_path / f"{name}.json").read_text())
        assert len(rows) == len(cells)
        assert not any(row.get("wrong") for row in rows)
        assert (tmp_path / f"{name}.png").exists()
    assert not network.namespaces()


@pytest.mark.skipif(not os.environ.get("PHUB_TEST_LONG"), reason="long: set PHUB_TEST_LONG=1")
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.timeout(180)
def test_whatever_is_killed_nothing_is_left_after_the_next_down(seed: int, tmp_path: Path) -> None:
    """A random process of an experiment, or the experiment itself, at a random moment."""
    try:
        network.require_kernel()
    except network.LabError as error:
        pytest.skip(str(error))
    random, shared = Random(seed), set(os.listdir("/dev/shm"))
    words = [*PAPER, "table2", "--quick", "--results", str(tmp_path)]
    with open(tmp_path / "output", "w") as output:
        paper = psutil.Popen(words, stdout=output, stderr=output)
        deadline = time.monotonic() + 60
        while not network.processes(f"t{paper.pid}"):
            assert paper.poll() is None, "it ended"
            assert time.monotonic() < deadline, "no lab was started"
            time.sleep(0.05)
        time.sleep(random.uniform(0.0, 5.0))
        tree = [paper, *paper.children(recursive=True)]
        random.choice(tree).kill()
        paper.wait(90)
    down = [sys.executable, str(ROOT / "scripts/rack.py"), "down", "--name", "no such"]
    assert subprocess.run(down, check=False).returncode == 0
    assert not network.namespaces(f"t{paper.pid}")
    gone, alive = psutil.wait_procs(tree, timeout=10)
    assert len(gone) == len(tree), alive
    assert set(os.listdir("/dev/shm")) <= shared
