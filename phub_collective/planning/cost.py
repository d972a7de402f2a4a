"""Throughput for a dollar: parameter servers sharded over the workers against a PBox for each rack
(paper, section 4.9). Capital cost only.

A machine's share of the network, with N a card, S a port of a switch, C a cable:

    A = (N + S + C) + F (4 S + 2 C)

its own end, and of what leads to the core two cables and four ports: the uplink of its rack's
switch, two of an aggregation switch, one of the core. F = 1 / o is how much of full bisection
bandwidth there is with an oversubscription of o:1, which happens at the racks' switches only. With
a PBox, a worker also pays for a Kth of it and of its p ports and cables, where K workers share it:
those that its rack's switch connects. (A, and what is counted, are the paper's; K and the rest
follow from them.)
"""

from __future__ import annotations

from dataclasses import dataclass

from phub_collective.errors import ConfigError
from phub_collective.planning.prices import Link, Prices

OVERSUBSCRIPTION = (1, 2, 3)  # o:1, of racks with a PBox; the baseline has full bisection


@dataclass(frozen=True)
class Cost:
    """One worker, with its share of all that serves it.

    Attributes:
        dollars: what that costs.
        samples_per_s: what it trains.
    """

    dollars: float
    samples_per_s: float

    @property
    def per_1000_dollars(self) -> float:
        """Samples per second for 1000 dollars."""
        return 1000 * self.samples_per_s / self.dollars


def network(link: Link, oversubscription: int) -> float:
    """Dollars of a machine's share of the network (A above)."""
    own = link.card + link.port + link.cable
    return own + (4 * link.port + 2 * link.cable) / oversubscription


def workers_per_pbox(prices: Prices, oversubscription: int) -> int:
    """Workers that share a PBox: the ports of one switch, less those to the core and the PBox's.

    d ports to machines need d / o to the core, so d = ports o / (1 + o).

    Raises:
        ConfigError: the switch has no port left for a worker.
    """
    ports = prices.network.pbox.switch_ports
    to_machines = ports * oversubscription // (1 + oversubscription)
    workers = to_machines - prices.pbox.ports
    if workers < 1:
        raise ConfigError(
            f"[plan] network.pbox.switch_ports={ports}, of which {to_machines} lead to machines at "
            f"{oversubscription}:1: expected more than pbox.ports={prices.pbox.ports}"
        )
    return workers


def baseline(prices: Prices, worker: str) -> Cost:
    """A worker of that kind in a cluster without PBoxes."""
    kind = prices.workers[worker]
    return Cost(kind.price + network(prices.network.baseline, 1), kind.baseline_samples_per_s)


def with_pbox(prices: Prices, worker: str, oversubscription: int) -> Cost:
    """A worker of that kind in a rack with a PBox.

    Raises:
        ConfigError: see `workers_per_pbox`.
    """
    kind, link, pbox = prices.workers[worker], prices.network.pbox, prices.pbox
    server = pbox.machine + pbox.ports * (pbox.port_card + link.port + link.cable)
    share = server / workers_per_pbox(prices, oversubscription)
    return Cost(
        kind.price + network(link, oversubscription) + share,
        kind.pbox_samples_per_s * (1 - pbox.overhead),
    )


def gain(prices: Prices, worker: str, oversubscription: int) -> float:
    """Throughput for a dollar with a PBox over that without, less 1."""
    ours = with_pbox(prices, worker, oversubscription)
    return ours.per_1000_dollars / baseline(prices, worker).per_1000_dollars - 1
