"""Where a machine's `Topology` comes from: the kernel, or a file that describes it.

The kernel tells it in sysfs, whose files used here are part of its stable interface; no library is
needed. A described machine, for one that sysfs does not show right, is a TOML file with a table for
each NUMA domain, under the domain's number:

    [domains.0]
    socket = 0
    cores = "0-13"                            # in the kernel's list format: "0-3,8"
    interfaces = ["10.0.0.1", "10.0.1.1"]     # as `phub serve --interfaces` names them
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from phub_collective import tomlfile
from phub_collective.backends.pbox.numa import Core, Interface, Topology
from phub_collective.errors import ConfigError
from phub_collective.machine import interface_addresses
from phub_collective.tomlfile import Rule, is_number


def from_kernel(
    root: Path = Path("/sys"),
    cpus: Collection[int] | None = None,
    addresses: Mapping[str, str] | None = None,
) -> Topology:
    """This machine, as far as this process may use it.

    Where the kernel says nothing (a sandbox without sysfs, a kernel without NUMA), all cores are in
    socket 0 and domain 0, every CPU is a core, and interfaces belong to no domain.

    Args:
        root: where sysfs is.
        cpus: those that may be used; None: all that this process may run on.
        addresses: IPv4 addresses by interface; None: this machine's.
    """
    usable = sorted(os.sched_getaffinity(0) if cpus is None else cpus)
    known = interface_addresses() if addresses is None else addresses
    domains = _domains(root / "devices/system/node")
    cores: list[Core] = []
    taken: set[int] = set()
    for cpu in usable:
        if cpu in taken:  # a hardware thread of a core that is listed
            continue
        folder = root / f"devices/system/cpu/cpu{cpu}/topology"
        taken.update(parse_cpus(_text(folder / "thread_siblings_list")), {cpu})
        cores.append(Core(cpu, _number(folder / "physical_package_id") or 0, domains.get(cpu, 0)))
    folders = sorted(path for path in root.glob("class/net/*") if path.is_dir())
    interfaces = [
        Interface(path.name, _number(path / "device/numa_node"), known.get(path.name, ""))
        for path in folders
    ]
    return Topology(tuple(cores), tuple(interfaces))


def _domains(folder: Path) -> dict[int, int]:
    """The NUMA domain of each CPU."""
    return {
        cpu: int(path.name.removeprefix("node"))
        for path in folder.glob("node[0-9]*")
        for cpu in parse_cpus(_text(path / "cpulist"))
    }


def _text(path: Path) -> str:
    """What a file of the kernel says; nothing where there is none."""
    try:
        return path.read_text().strip()
    except OSError:  # some exist, and cannot be read where they have no meaning
        return ""


def _number(path: Path) -> int | None:
    """A file's number; None where there is none, for which the kernel also writes -1."""
    text = _text(path)
    return int(text) if text.isdecimal() else None


def parse_cpus(text: str) -> list[int]:
    """The CPUs of a list in the kernel's format: "0-3,8"; none of an empty one.

    Raises:
        ValueError: it is no such list.
    """
    cpus: list[int] = []
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError(f"{text!r} is no list of CPUs")
        cpus += range(int(match[1]), int(match[2] or match[1]) + 1)
    return cpus


def _is_cpus(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(parse_cpus(value))
    except ValueError:
        return False


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


_Number = Annotated[int, Rule("a whole number", lambda value: is_number(value, whole=True))]
_Cpus = Annotated[str, Rule('a list of CPUs such as "0-3,8"', _is_cpus)]
_Names = Annotated[list[str], Rule("a list of names or addresses", _is_names)]


@dataclass(frozen=True)
class _Domain:
    """The table of one domain in a file."""

    socket: _Number
    cores: _Cpus
    interfaces: _Names


@dataclass(frozen=True)
class _Machine:
    """A whole file."""

    domains: dict[str, _Domain]


def from_file(path: Path) -> Topology:
    """The machine that a file describes; its order is that of the file.

    Raises:
        ConfigError: the file is wrong, which the message explains by the key, or something stands
            in two domains.
    """
    cores: list[Core] = []
    interfaces: list[Interface] = []
    for name, domain in tomlfile.load(path, _Machine, "numa").domains.items():
        if not name.isdecimal():
            raise ConfigError(f"[numa] {path}: domains.{name}: expected a number, got {name!r}")
        cores += [Core(cpu, domain.socket, int(name)) for cpu in parse_cpus(domain.cores)]
        interfaces += [Interface(one, int(name)) for one in domain.interfaces]
    named = Counter(
        [*(f"CPU {core.cpu}" for core in cores), *(f"interface {one.name}" for one in interfaces)]
    )
    for name, count in named.items():
        if count > 1:
            raise ConfigError(f"[numa] {path}: expected {name} once, got it {count} times")
    return Topology(tuple(cores), tuple(interfaces))
