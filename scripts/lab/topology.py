"""Which hosts, switches and links a lab has: pure, nothing is made here.

Each rack is a switch with its workers and its own PBox; more racks hang on a core switch. There is
one subnet for each link of a PBox, and a worker has an address in every one of them on its single
link, so that a worker's traffic to the PBox's i-th address arrives on the PBox's i-th link. `head`
is where the launcher runs: a host on the (first) switch whose link is not shaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MTU_SHARE = 1448 / 1514  # TCP payload in what tc counts of a full frame
PBOX, WORKER, HEAD = 200, 10, 254  # last numbers of the addresses; of a rack's, a rank's first
MAX_WORKERS, MAX_LINKS = 150, 32


@dataclass(frozen=True)
class Shape:
    """What was asked for; rates in bits per second, as the played rack has them.

    Attributes:
        workers: in all racks together, spread evenly.
        core: rate between racks; 0: as `link`.
        dilation: rates are divided by it, and times multiplied.
        pairs: rates between workers (rank, rank) where they differ from `link`, each way.
    """

    workers: int
    racks: int = 1
    link: float = 10e9
    pbox_links: int = 1
    core: float = 0.0
    dilation: float = 1.0
    pairs: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ValueError for what no lab can be."""
        if not 1 <= self.workers <= MAX_WORKERS or self.workers % self.racks or self.racks < 1:
            raise ValueError(
                f"{self.workers} workers in {self.racks} racks: expected 1 to {MAX_WORKERS}, the "
                "same number in each rack"
            )
        if not 0 <= self.pbox_links <= MAX_LINKS:
            raise ValueError(f"{self.pbox_links} PBox links: expected 0 to {MAX_LINKS}")
        if self.link <= 0 or self.core < 0 or self.dilation < 1:
            raise ValueError("expected positive rates and a dilation of at least 1")
        strange = [pair for pair in self.pairs if not all(0 <= r < self.workers for r in pair)]
        if strange:
            raise ValueError(f"pair {strange[0]}: expected ranks of 0..{self.workers - 1}")

    @property
    def subnets(self) -> int:
        return max(1, self.pbox_links)

    def rack_of(self, rank: int) -> int:
        return rank * self.racks // self.workers

    def shaped(self, rate: float) -> float:
        """What is given to tc, in bits per second."""
        return rate / self.dilation


@dataclass(frozen=True)
class Link:
    """A cable from a host's device to a port of a switch; `rate` 0: not shaped."""

    device: str
    switch: str
    port: str
    addresses: tuple[str, ...]
    rate: float


@dataclass(frozen=True)
class Host:
    """A network namespace with links.

    Attributes:
        pairs: for a worker, (address of another worker, rate) where pairs have rates of their own.
    """

    name: str
    links: tuple[Link, ...]
    pairs: tuple[tuple[str, float], ...] = ()

    @property
    def addresses(self) -> list[str]:
        return [address for link in self.links for address in link.addresses]


@dataclass(frozen=True)
class Network:
    """Everything that is to be made. `trunks`: (switch, switch, rate)."""

    hosts: tuple[Host, ...]
    switches: tuple[str, ...]
    trunks: tuple[tuple[str, str, float], ...]

    @property
    def workers(self) -> list[Host]:
        return [host for host in self.hosts if host.name.startswith("w")]

    @property
    def pboxes(self) -> list[Host]:
        return [host for host in self.hosts if host.name.startswith("pbox")]

    @property
    def head(self) -> Host:
        return next(host for host in self.hosts if host.name == "head")


def address(subnet: int, last: int) -> str:
    return f"10.77.{subnet}.{last}"


def network_of(shape: Shape) -> Network:
    """The network of a shape, with the rates that tc is given.

    Raises:
        ValueError: see `Shape.check`.
    """
    shape.check()
    racks = range(shape.racks)
    hosts = [
        Host("head", (Link("eth0", "sw0", "head", (address(0, HEAD),), 0.0),)),
        *(_pbox(shape, rack) for rack in racks if shape.pbox_links),
        *(_worker(shape, rank) for rank in range(shape.workers)),
    ]
    trunks = [
        (f"sw{rack}", "core", shape.shaped(shape.core or shape.link))
        for rack in racks
        if shape.racks > 1
    ]
    switches = [f"sw{rack}" for rack in racks] + (["core"] if trunks else [])
    return Network(tuple(hosts), tuple(switches), tuple(trunks))


def _pbox(shape: Shape, rack: int) -> Host:
    rate = shape.shaped(shape.link)
    links = (
        Link(f"eth{i}", f"sw{rack}", f"pbox.{i}", (address(i, PBOX + rack),), rate)
        for i in range(shape.pbox_links)
    )
    return Host(f"pbox{rack}", tuple(links))


def _worker(shape: Shape, rank: int) -> Host:
    own = tuple(address(i, WORKER + rank) for i in range(shape.subnets))
    link = Link("eth0", f"sw{shape.rack_of(rank)}", f"w{rank}", own, shape.shaped(shape.link))
    pairs = tuple(
        (address(i, WORKER + other), shape.shaped(rate))
        for (mine, other), rate in sorted(shape.pairs.items())
        if mine == rank
        for i in range(shape.subnets)
    )
    return Host(f"w{rank}", (link,), pairs)
