"""Cores for interfaces, on described machines, and the topologies that sysfs and files give."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phub_collective.backends.pbox.numa import Core, Interface, Topology, assign
from phub_collective.backends.pbox.numa_sources import from_file, from_kernel, parse_cpus
from phub_collective.backends.pbox.placement import cores_of, place
from phub_collective.errors import ConfigError
from phub_collective.models import model_keys

# The paper's PBox: two sockets with 14 cores and five interfaces each.
PAPER = """
[domains.0]
socket = 0
cores = "0-13"
interfaces = ["ib0", "ib1", "ib2", "ib3", "ib4"]

[domains.1]
socket = 1
cores = "14-27"
interfaces = ["ib5", "ib6", "ib7", "ib8", "ib9"]
"""
LINKS = [f"ib{index}" for index in range(10)]


@pytest.fixture
def paper(tmp_path: Path) -> Topology:
    path = tmp_path / "machine.toml"
    path.write_text(PAPER)
    return from_file(path)


def domain_of(topology: Topology, cpu: int) -> int:
    return next(core.domain for core in topology.cores if core.cpu == cpu)


def check(topology: Topology, cores: int, interfaces: Sequence[str]) -> list[list[int]]:
    """What every assignment is: so many cores, none twice, each of its interface's domain."""
    found = assign(topology, cores, interfaces)
    cpus = [cpu for group in found for cpu in group]
    assert len(cpus) == len(set(cpus)) == cores
    for index, (name, group) in enumerate(zip(interfaces, found, strict=True)):
        assert len(group) == len(cores_of(index, len(interfaces), cores))
        domain = topology.interface(name).domain
        assert domain is None or {domain_of(topology, cpu) for cpu in group} == {domain}
    return found


class TestThePapersMachine:
    def test_as_described(self, paper: Topology) -> None:
        assert [core.cpu for core in paper.cores] == list(range(28))
        assert [core.socket for core in paper.cores] == [2 * cpu // 28 for cpu in range(28)]
        assert [one.domain for one in paper.interfaces] == [0] * 5 + [1] * 5

    def test_all_its_cores(self, paper: Topology) -> None:
        found = check(paper, 28, LINKS)
        assert [len(group) for group in found] == [2, 3, 3, 3, 3] * 2
        assert sum(found, []) == list(range(28))

    def test_one_core_for_each_interface(self, paper: Topology) -> None:
        assert check(paper, 10, LINKS) == [[0], [1], [2], [3], [4], [14], [15], [16], [17], [18]]

    def test_every_number_of_cores_and_of_interfaces(self, paper: Topology) -> None:
        for cores in range(10, 29):
            check(paper, cores, LINKS)
        assert check(paper, 3, ["ib9", "ib0"]) == [[14], [0, 1]]
        assert check(paper, 14, ["ib7"]) == [list(range(14, 28))]

    def test_a_chunk_is_aggregated_where_its_interface_is(self, paper: Topology) -> None:
        placed = place(model_keys("ResNet50"), cores=28, interfaces=10)
        cpus = np.array(sum(assign(paper, 28, LINKS), []))
        there = np.array([domain_of(paper, cpu) for cpu in cpus[placed.core]])
        assert np.array_equal(there, placed.interface // 5)

    @pytest.mark.parametrize(
        ("cores", "interfaces", "message"),
        [
            (15, ["ib0"], "expected 15 cores in domain 0 for ib0, got 14; at most 14 cores in all"),
            (28, ["ib0", "ib9", "ib8"], "19 cores in domain 1 for ib9, ib8, got 14; at most 21 "),
            (9, LINKS, "at least one interface, and a core for each; at most 28 cores in all"),
            (29, LINKS, "at most 28 cores, which may be used; at most 28 cores in all"),
            (4, [], "at least one interface, and a core for each; serve others"),
            (4, ["eth0"], "expected an interface among ib0, ib1, .*, ib9, got 'eth0'"),
        ],
    )
    def test_what_cannot_be(
        self, cores: int, interfaces: list[str], message: str, paper: Topology
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            assign(paper, cores, interfaces)


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    """Up to three domains; interfaces of any of them, of a domain without cores, or of none."""
    domains = draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
    near = draw(st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=1, max_size=5))
    cores = tuple(Core(10 + index, domain, domain) for index, domain in enumerate(domains))
    return Topology(cores, tuple(Interface(f"i{n}", domain) for n, domain in enumerate(near)))


@given(topology=machines(), cores=st.integers(1, 13))
def test_any_machine_is_served_or_it_cannot_be(topology: Topology, cores: int) -> None:
    names = [one.name for one in topology.interfaces]
    try:
        check(topology, cores, names)
    except ConfigError:
        wanted = [len(cores_of(index, len(names), cores)) for index in range(len(names))]
        lacking = [
            domain
            for domain in range(4)
            if sum(w for w, one in zip(wanted, topology.interfaces, strict=True)
                   if one.domain == domain) > sum(core.domain == domain for core in topology.cores)
        ]  # fmt: skip
        assert lacking or cores < len(names) or cores > len(topology.cores)


def test_interfaces_without_a_domain_take_what_is_left() -> None:
    """Though they stand first."""
    cores = tuple(Core(cpu, cpu // 2, cpu // 2) for cpu in range(4))
    topology = Topology(cores, (Interface("lo", None, "127.0.0.1"), Interface("eth0", 0)))
    assert assign(topology, 4, ["127.0.0.1", "eth0"]) == [[2, 3], [0, 1]]


class TestKernel:
    @staticmethod
    def write(root: Path, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")

    @pytest.fixture
    def sysfs(self, tmp_path: Path) -> Path:
        """The paper's machine with two hardware threads in each core, numbered as Linux does."""
        files = {
            "devices/system/node/node0/cpulist": "0-13,28-41",
            "devices/system/node/node1/cpulist": "14-27,42-55",
            "devices/system/node/node2/cpulist": "",  # memory only
            "devices/system/node/online": "0-2",
            "class/net/bonding_masters": "",
            "class/net/lo/mtu": "65536",
        }
        for cpu in range(56):
            folder = f"devices/system/cpu/cpu{cpu}/topology"
            files[f"{folder}/physical_package_id"] = str(cpu % 28 // 14)
            files[f"{folder}/thread_siblings_list"] = f"{cpu % 28},{cpu % 28 + 28}"
        for index in range(10):
            files[f"class/net/ib{index}/device/numa_node"] = str(index // 5)
        files["class/net/virtio0/device/numa_node"] = "-1"
        self.write(tmp_path, files)
        return tmp_path

    def test_the_papers_machine(self, sysfs: Path, paper: Topology) -> None:
        addresses = {"lo": "127.0.0.1", "ib3": "10.0.3.1"}
        topology = from_kernel(sysfs, range(56), addresses)
        assert topology.cores == paper.cores  # one hardware thread of each core
        domains = {one.name: one.domain for one in topology.interfaces}
        expected = {one.name: one.domain for one in paper.interfaces}
        assert domains == {**expected, "lo": None, "virtio0": None}
        assert topology.interface("10.0.3.1").name == "ib3"
        assert assign(topology, 28, LINKS) == assign(paper, 28, LINKS)

    def test_only_what_this_process_may_use(self, sysfs: Path) -> None:
        """Of core 1 that is its second thread."""
        topology = from_kernel(sysfs, {0, 28, 29, 14}, {})
        assert topology.cores == (Core(0, 0, 0), Core(14, 1, 1), Core(29, 0, 0))

    def test_a_kernel_that_says_nothing(self, tmp_path: Path) -> None:
        topology = from_kernel(tmp_path, {3, 5}, {})
        assert topology == Topology((Core(3, 0, 0), Core(5, 0, 0)), ())

    def test_this_machine(self) -> None:
        topology = from_kernel()
        usable = os.sched_getaffinity(0)
        assert 1 <= len(topology.cores) <= len(usable)
        assert {core.cpu for core in topology.cores} <= usable
        if not any(one.address == "127.0.0.1" for one in topology.interfaces):
            pytest.skip("no sysfs here that shows the loopback interface")
        ((cpu,),) = assign(topology, 1, ["127.0.0.1"])
        assert cpu in usable


class TestFile:
    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ('"14-27"', '"13-27"', "expected CPU 13 once, got it 2 times"),
            ('"ib9"', '"ib0"', "expected interface ib0 once, got it 2 times"),
            ('"14-27"', '"27-14"', r'domains.1.cores: expected a list of CPUs such as "0-3,8"'),
            ('"14-27"', '""', "domains.1.cores: expected a list of CPUs"),
            ('"14-27"', "14", "domains.1.cores: expected a list of CPUs"),
            ('"ib9"', "9", "domains.1.interfaces: expected a list of names or addresses, got"),
            ("socket = 1", "", "missing key domains.1.socket: expected a whole number"),
            ("[domains.1]", "[domains.one]", "domains.one: expected a number, got 'one'"),
        ],
    )
    def test_a_wrong_file_is_told_by_the_key(
        self, old: str, new: str, message: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "machine.toml"
        path.write_text(PAPER.replace(old, new))
        with pytest.raises(ConfigError, match=message):
            from_file(path)


def test_lists_of_cpus() -> None:
    assert parse_cpus("0-3,8,10-10") == [0, 1, 2, 3, 8, 10]
    assert parse_cpus("") == []
    for wrong in ("a", "1-", "3-1", "1,,2", "1 2", "-1"):
        with pytest.raises(ValueError, match="is no list of CPUs"):
            parse_cpus(wrong)
