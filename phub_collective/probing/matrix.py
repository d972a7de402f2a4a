"""What a probe of a job's links found, and its form in a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phub_collective.errors import ConfigError
from phub_collective.probing.groups import Square, bandwidth_between, groups_of


@dataclass(frozen=True)
class Host:
    """A host of the job: its own name for itself, and the ranks on it in rising order."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Matrix:
    """The links between hosts, from each (line) to each (column); None on the diagonal.

    Attributes:
        hosts: by their lowest rank.
        bandwidth: bytes per second of TCP payload over one connection.
        latency: seconds, half of a round trip.
        alone: pairs were measured one at a time, else all of a round at once.
    """

    hosts: tuple[Host, ...]
    bandwidth: Square
    latency: Square
    alone: bool

    @property
    def size(self) -> int:
        """Ranks on all hosts."""
        return sum(len(host.ranks) for host in self.hosts)

    @property
    def groups(self) -> list[list[int]]:
        """Groups of hosts that are near each other; see groups.py."""
        return groups_of(self.bandwidth)

    def host_of(self, rank: int) -> int:
        """The host on which a rank of the job is."""
        return next(i for i, host in enumerate(self.hosts) if rank in host.ranks)

    def to_json(self) -> dict[str, Any]:
        """Everything, and the groups, as a JSON object."""
        return {
            "hosts": [{"name": host.name, "ranks": host.ranks} for host in self.hosts],
            "bandwidth_bytes_per_s": self.bandwidth,
            "latency_s": self.latency,
            "alone": self.alone,
            "groups": self.groups,
        }

    @staticmethod
    def from_json(fields: Any) -> Matrix:
        """
        Raises:
            ConfigError: it is not what `to_json` makes, or a pair is missing.
        """
        try:
            matrix = Matrix(
                tuple(Host(str(one["name"]), tuple(one["ranks"])) for one in fields["hosts"]),
                tuple(tuple(line) for line in fields["bandwidth_bytes_per_s"]),
                tuple(tuple(line) for line in fields["latency_s"]),
                bool(fields["alone"]),
            )
            matrix._check()
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"[probe] expected the JSON of phub probe, got something else ({error!r})"
            ) from None
        return matrix

    @staticmethod
    def load(path: Path) -> Matrix:
        """The matrix in a file that `phub probe --json` wrote.

        Raises:
            ConfigError: the file cannot be read, or holds something else.
        """
        try:
            return Matrix.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:  # a ConfigError is a ValueError
            reason = str(error).removeprefix("[probe] ")
            raise ConfigError(f"[probe] {path}: {reason}") from None

    def _check(self) -> None:
        """Raise ConfigError unless every rank has one host and every pair both measurements."""
        count = len(self.hosts)
        ranks = sorted(rank for host in self.hosts for rank in host.ranks)
        if ranks != list(range(len(ranks))) or not all(host.ranks for host in self.hosts):
            raise ConfigError(f"[probe] expected each rank on one host, got {ranks}")
        for square in (self.bandwidth, self.latency):
            if len(square) != count or any(len(line) != count for line in square):
                raise ConfigError(f"[probe] expected {count} x {count} values for {count} hosts")
            for one in range(count):
                for other in range(one):
                    bandwidth_between(square, one, other)
