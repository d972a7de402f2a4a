"""How many workers one PBox serves until its memory or its network is used up (paper, section 4.7).

What passes through a server grows with its workers, so a need that was measured with a few of them
gives the number at which a limit is reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phub_collective.errors import ConfigError

HAIR = 1e-9  # by which binary fractions miss a whole number: 1.4 x 90 / 6 x 8 is 168


@dataclass(frozen=True)
class Resource:
    """What workers use up of a server.

    Attributes:
        name: "memory" or "network".
        need: GB/s that some number of workers need of it.
        limit: GB/s that there are.
    """

    name: str
    need: float
    limit: float

    def most_workers(self, workers: int) -> int:
        """How many workers it allows when `workers` have the need.

        Raises:
            ConfigError: a number is not above 0.
        """
        if workers < 1 or not (0 < self.need < math.inf and 0 < self.limit < math.inf):
            raise ConfigError(
                f"[plan] expected numbers above 0, got {self.need:g} GB/s of {self.name} at "
                f"{workers} workers, of {self.limit:g} GB/s"
            )
        return math.floor(self.limit / self.need * workers * (1 + HAIR))


def binding(resources: Sequence[Resource], workers: int) -> Resource:
    """The resource that allows the fewest workers; of equal ones the first."""
    return min(resources, key=lambda resource: resource.most_workers(workers))
