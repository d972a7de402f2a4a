"""The rack lab: its plan, without a network; and small labs, where namespaces are allowed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lab import check, network, start
from lab.topology import MTU_SHARE, Shape, network_of
from lab.worker import layers_of

from phub_collective.models import model_keys
from phub_collective.probing.matrix import Matrix

ROOT = Path(__file__).resolve().parents[2]


class TestPlan:
    def test_workers_have_an_address_in_the_subnet_of_each_link_of_the_pbox(self) -> None:
        made = network_of(Shape(4, pbox_links=3))
        assert len(made.pboxes) == 1
        assert [link.addresses for link in made.pboxes[0].links] == [
            ("10.77.0.200",),
            ("10.77.1.200",),
            ("10.77.2.200",),
        ]
        assert [host.name for host in made.workers] == ["w0", "w1", "w2", "w3"]
        assert made.workers[2].addresses == ["10.77.0.12", "10.77.1.12", "10.77.2.12"]
        assert len(made.workers[2].links) == 1

    def test_all_addresses_differ(self) -> None:
        made = network_of(Shape(150, racks=2, pbox_links=10))
        addresses = [address for host in made.hosts for address in host.addresses]
        assert len(set(addresses)) == len(addresses)

    def test_racks_share_the_workers_and_hang_on_the_core(self) -> None:
        made = network_of(Shape(6, racks=3, link=10e9, core=20e9, dilation=10))
        assert [host.links[0].switch for host in made.workers] == [
            *("sw0", "sw0"),
            *("sw1", "sw1"),
            *("sw2", "sw2"),
        ]
        assert made.trunks == tuple((f"sw{rack}", "core", 2e9) for rack in range(3))
        assert [host.name for host in made.pboxes] == ["pbox0", "pbox1", "pbox2"]

    def test_rates_are_divided_by_the_dilation(self) -> None:
        made = network_of(Shape(2, link=56e9, dilation=112, pairs={(0, 1): 28e9}))
        assert made.workers[0].links[0].rate == pytest.approx(500e6)
        assert made.workers[0].pairs == (("10.77.0.11", 250e6),)
        assert made.workers[1].pairs == ()
        assert made.head.links[0].rate == 0

    @pytest.mark.parametrize(
        "shape",
        [Shape(0), Shape(5, racks=2), Shape(2, pbox_links=-1), Shape(2, pairs={(0, 2): 1e9})],
    )
    def test_what_cannot_be_is_refused(self, shape: Shape) -> None:
        with pytest.raises(ValueError, match="expected"):
            network_of(shape)

    def test_a_layers_tensors_come_together_and_the_last_layer_first(self) -> None:
        keys = model_keys("AlexNet")
        layers = layers_of(keys)
        assert sorted(key for layer in layers for key in layer) == list(range(len(keys)))
        assert layers[0][-1] == len(keys) - 1
        assert layers[-1][0] == 0
        assert all(len(layer) <= 2 for layer in layers)

    def test_a_link_is_measured_within_its_rack_and_not_at_the_rate_of_a_pair(self) -> None:
        made = network_of(Shape(4, racks=2, pairs={(0, 1): 1e9}))
        assert [check.neighbour(made, worker) for worker in made.workers] == [
            *(made.pboxes[:1] * 2),
            *(made.pboxes[1:] * 2),
        ]
        made = network_of(Shape(3, pbox_links=0, pairs={(0, 1): 1e9}))
        found = [check.neighbour(made, worker) for worker in made.workers]
        assert found == [made.workers[2], made.workers[2], made.workers[0]]
        made = network_of(Shape(2, racks=2, pbox_links=0))
        assert check.neighbour(made, made.workers[0]) is None

    def test_who_was_the_limit(self) -> None:
        assert check.Use(0.5, 0.6, 0).cpu_bound
        assert not check.Use(0.95, 0.6, 0).cpu_bound  # the link was
        assert not check.Use(0.5, 0.1, 0).cpu_bound  # nobody was: it computes, or waits


@pytest.fixture(scope="module")
def kernel() -> None:
    try:
        network.require_kernel()
    except network.LabError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("kernel")
class TestLab:
    def test_a_model_is_exchanged_over_shaped_links(self, tmp_path: Path) -> None:
        """Through phubrun and a PBox with two links; every element compared."""
        shape = Shape(2, link=4e9, pbox_links=2, dilation=20)
        made = network_of(shape)
        row_file = tmp_path / "row.json"
        words = [sys.executable, str(ROOT / "scripts/lab/worker.py"), "--model", "GoogleNet299"]
        with network.temporary(made) as lab:
            assert len(check.links(lab, made)) == 4  # raises when a link is not as asked
            with start.pbox(lab, made) as server:
                assert server is not None
                before = check.sample(lab, made)
                told = start.variables(shape, server) | {"PHUB_BACKEND": "pbox"}
                code = start.phubrun(
                    lab, made, [*words, "--iterations", "1", "--json", str(row_file)], told
                ).wait()
                used = check.use(made, before, check.sample(lab, made))
        assert code == 0
        row = json.loads(row_file.read_text())
        assert row["wrong"] == 0
        assert (row["backend"], row["exchanges"]) == ("pbox", 2)
        floor = row["bytes"] * 8 / (shape.link * MTU_SHARE)
        assert min(row["seconds"]) > 0.99 * floor  # nothing went another way
        assert used.nbytes > 2 * 2 * 2 * row["bytes"]  # two workers, two exchanges, both ways
        assert not network.namespaces(lab)

    def test_a_probe_finds_the_groups_that_links_were_shaped_to(self, tmp_path: Path) -> None:
        """Three hosts, two of them near each other, through phubrun."""
        near, far = 200e6, 80e6
        pairs = {(a, b): far if 1 in (a, b) else near for a in range(3) for b in range(3) if a != b}
        made = network_of(Shape(3, link=400e6, pbox_links=0, pairs=pairs))
        file = tmp_path / "links.json"
        words = [*start.PHUB, "probe", "--seconds", "0.3", "--json", str(file)]
        with network.temporary(made) as lab:
            assert start.phubrun(lab, made, words, {}).wait(60) == 0
        matrix = Matrix.load(file)
        assert [host.ranks for host in matrix.hosts] == [(0,), (1,), (2,)]
        assert matrix.groups == [[0, 2], [1]]
        for (a, b), rate in pairs.items():
            found = matrix.bandwidth[a][b]
            assert found is not None
            assert 0.5 < found * 8 / rate < 1.02, (a, b)  # a busy machine may be slower

    def test_a_killed_lab_is_removed_at_the_next_start(self) -> None:
        rack = [sys.executable, str(ROOT / "scripts/rack.py")]
        flags = ["--workers", "1", "--pbox-links", "1", "--link", "200mbit"]
        process = subprocess.Popen([*rack, "run", *flags, "--", "sleep", "1000"])
        lab = f"t{process.pid}"
        deadline = time.monotonic() + 60
        while not any(_command(pid).startswith(b"sleep") for pid in network.processes(lab)):
            assert process.poll() is None, "the lab ended"
            assert time.monotonic() < deadline, "nothing was started"
            time.sleep(0.05)
        workers = network.processes(lab)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert subprocess.run([*rack, "down", "--name", "no such"], check=False).returncode == 0
        assert not network.namespaces(lab)
        assert not [pid for pid in workers if _lives(pid)]

    def test_two_labs_at_once_and_each_can_be_taken_down(self) -> None:
        made = network_of(Shape(1, pbox_links=0))
        names = [f"test{os.getpid()}{letter}" for letter in "ab"]
        try:
            for name in names:
                network.build(name, made)
            with pytest.raises(network.LabError, match="exists"):
                network.build(names[0], made)
            network.remove(names[0])
            assert not network.namespaces(names[0])
            assert len(network.namespaces(names[1])) == 3
        finally:
            for name in names:
                network.remove(name)


def _lives(pid: int) -> bool:
    """Zombies, whose parent has not looked yet, do not count."""
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
