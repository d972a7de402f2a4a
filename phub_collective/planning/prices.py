"""What the parts of a rack cost and how fast its workers are: the input of the cost model.

A TOML file with the tables [network.baseline], [network.pbox], [pbox] and one [workers.NAME] for
each kind of worker; the keys are the fields below. `prices.toml` beside this file is an example.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Annotated

from phub_collective import tomlfile
from phub_collective.tomlfile import Rule, is_number

Dollars = Annotated[float, Rule("dollars, at least 0", lambda v: is_number(v) and 0 <= v < inf)]
Price = Annotated[float, Rule("dollars, above 0", lambda v: is_number(v) and 0 < v < inf)]
Rate = Annotated[float, Rule("samples/s, above 0", lambda v: is_number(v) and 0 < v < inf)]
Share = Annotated[float, Rule("a share from 0 to below 1", lambda v: is_number(v) and 0 <= v < 1)]
Count = Annotated[int, Rule("a whole number, at least 0", lambda v: is_number(v, True) and v >= 0)]
Ports = Annotated[int, Rule("a whole number, above 0", lambda v: is_number(v, True) and v > 0)]


@dataclass(frozen=True)
class Link:
    """The network at one rate.

    Attributes:
        card: of a worker.
        cable: from a card to a switch, or between two switches.
        switch: a whole one.
        switch_ports: how many it has at this rate.
    """

    card: Dollars
    cable: Dollars
    switch: Dollars
    switch_ports: Ports

    @property
    def port(self) -> float:
        """Dollars for one port of a switch."""
        return self.switch / self.switch_ports


@dataclass(frozen=True)
class Networks:
    """What connects the machines in each of the two designs that are compared.

    Attributes:
        baseline: parameter servers sharded over the workers, at full bisection bandwidth.
        pbox: a PBox for each rack.
    """

    baseline: Link
    pbox: Link


@dataclass(frozen=True)
class PBox:
    """The server of a rack.

    Attributes:
        machine: without network cards.
        ports: by which it is connected to its rack's switch.
        port_card: a port's share of a network card.
        overhead: share of throughput that is lost to the reduction between racks.
    """

    machine: Dollars
    ports: Ports
    port_card: Dollars
    overhead: Share


@dataclass(frozen=True)
class Worker:
    """A kind of worker machine.

    Attributes:
        machine: without processors, GPUs and network card.
        processors, gpus: how many it has; `processor` and `gpu`: dollars for each.
        baseline_samples_per_s, pbox_samples_per_s: what one worker trains in each of the two
            designs; with a PBox, within a rack.
    """

    machine: Price
    processors: Count
    processor: Dollars
    gpus: Count
    gpu: Dollars
    baseline_samples_per_s: Rate
    pbox_samples_per_s: Rate

    @property
    def price(self) -> float:
        return self.machine + self.processors * self.processor + self.gpus * self.gpu


@dataclass(frozen=True)
class Prices:
    """All of it."""

    network: Networks
    pbox: PBox
    workers: dict[str, Worker]

    @staticmethod
    def load(path: Path) -> Prices:
        """Raises ConfigError, which names the key, when a value is missing, unknown or wrong."""
        return tomlfile.load(path, Prices, "plan")

    @staticmethod
    def example() -> Prices:
        """Those of `example_text`."""
        return tomlfile.parse(example_text(), Prices, "[plan] the example")


def example_text() -> str:
    """A file to start from. Its values are this project's, not the paper's."""
    return files(__package__).joinpath("prices.toml").read_text(encoding="utf-8")
