"""Which cores of a server's machine serve which of its network interfaces. Pure arithmetic.

Memory near an interface is far from cores of another NUMA domain, so an interface is served only by
cores of its own (paper, section 3.3). A `Topology` comes from the kernel or from a file:
`numa_sources.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from phub_collective.backends.pbox.placement import cores_of
from phub_collective.errors import ConfigError


@dataclass(frozen=True)
class Core:
    """A processor core.

    Attributes:
        cpu: the kernel's number of the one of its hardware threads that is used.
        socket: the package that it is in.
        domain: its NUMA domain; a socket can have several.
    """

    cpu: int
    socket: int
    domain: int


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        name: the kernel's, or whatever a described machine calls it.
        domain: the NUMA domain that it is attached to; None: to none in particular (loopback,
            virtual interfaces), so that all cores are equally near.
        address: its IPv4 address, empty where it is not known.
    """

    name: str
    domain: int | None
    address: str = ""


@dataclass(frozen=True)
class Topology:
    """The cores that may be used, in the order of their use, and the interfaces of a machine."""

    cores: tuple[Core, ...]
    interfaces: tuple[Interface, ...]

    def interface(self, name: str) -> Interface:
        """The interface of that name or address.

        Raises:
            ConfigError: there is none.
        """
        for interface in self.interfaces:
            if name and name in (interface.name, interface.address):
                return interface
        known = ", ".join(f"{one.name} {one.address}".strip() for one in self.interfaces)
        raise ConfigError(f"[numa] expected an interface among {known or 'none'}, got {name!r}")


def assign(topology: Topology, cores: int, interfaces: Sequence[str]) -> list[list[int]]:
    """The CPUs that serve each of `interfaces`, which are names or addresses.

    An interface gets as many as `placement.cores_of` gives it, so core k of a server with so many
    cores and interfaces runs on the kth CPU of the result, and a chunk that `placement.place` sends
    through an interface is aggregated in that interface's domain. No CPU serves two.

    Args:
        cores: in all, at least one for each interface.

    Raises:
        ConfigError: an interface is unknown, or its domain has too few cores.
    """
    found = [topology.interface(name) for name in interfaces]
    lack = _lack(topology, cores, found)
    if lack is not None:
        most = _most_cores(topology, found)
        mend = f"at most {most} cores in all can serve them" if most else "serve others"
        raise ConfigError(f"[numa] {cores} cores, {len(found)} interfaces: {lack}; {mend}")
    free = list(topology.cores)
    chosen: list[list[int]] = [[] for _ in found]
    # Interfaces of a domain choose first: the others take any core that is left.
    for index in sorted(range(len(found)), key=lambda i: found[i].domain is None):
        near = [core for core in free if found[index].domain in (None, core.domain)]
        mine = near[: len(cores_of(index, len(found), cores))]
        free = [core for core in free if core not in mine]
        chosen[index] = [core.cpu for core in mine]
    return chosen


def _lack(topology: Topology, cores: int, interfaces: Sequence[Interface]) -> str | None:
    """What is missing for these interfaces to be served by so many cores; None: nothing."""
    if not 1 <= len(interfaces) <= cores:
        return "expected at least one interface, and a core for each"
    if cores > len(topology.cores):
        return f"expected at most {len(topology.cores)} cores, which may be used"
    needed: Counter[int] = Counter()
    for index, interface in enumerate(interfaces):
        if interface.domain is not None:
            needed[interface.domain] += len(cores_of(index, len(interfaces), cores))
    there = Counter(core.domain for core in topology.cores)
    for domain, count in needed.items():
        if count > there[domain]:
            names = ", ".join(one.name for one in interfaces if one.domain == domain)
            return f"expected {count} cores in domain {domain} for {names}, got {there[domain]}"
    return None


def _most_cores(topology: Topology, interfaces: Sequence[Interface]) -> int:
    """The largest number of cores that can serve these interfaces; 0 where none can."""
    counts = range(len(topology.cores), 0, -1)
    return next((count for count in counts if _lack(topology, count, interfaces) is None), 0)
