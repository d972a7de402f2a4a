"""Does reducing in two levels pay: first in each rack at its PBox, then around a ring of the
PBoxes, then back to the rack's workers? Pure arithmetic.

The formulas are our own derivation. The paper (section 3.4) says what is compared, the time of the
transfers across racks with what two levels add, but its formula is not known to us. For M bytes,
r racks, W workers in all and N in a rack, and bytes per second each way of a worker's link b_w, of
a PBox b_P and of a rack's link to the others b_u:

    flat      2 N M (W - N) / (W b_u)
        A server sharded over all machines. The part (W - N) / W of a rack's N gradients goes to
        shards outside, and the rack's shards, N / W of the model, answer W - N workers outside.
        With equal racks this is 2 N M (r - 1) / (r b_u).
    inside    max(M / b_w, N M / b_P)
        Push and answer use the two directions of a link at the same time.
    ring      2 M (r - 1) / (r min(b_u, b_P)) + 2 (r - 1) latency
        As the allreduce `ring` with a PBox of each rack for a rank.

With equal racks flat moves N times as many bytes across racks as the ring does.
"""

from __future__ import annotations

from dataclasses import dataclass

from phub_collective.errors import ConfigError


@dataclass(frozen=True)
class Racks:
    """What the estimate depends on, beside the size.

    Attributes:
        workers: of each rack.
        worker_link: bytes per second, each way, of the slowest worker.
        pbox_link: bytes per second, each way, that a PBox receives and sums up at most.
        uplink: bytes per second, each way, between a rack and all others.
        latency: seconds of a message between racks.
    """

    workers: tuple[int, ...]
    worker_link: float
    pbox_link: float
    uplink: float
    latency: float

    def __post_init__(self) -> None:
        """
        Raises:
            ConfigError: a number is not positive, or the latency negative.
        """
        if not self.workers or min(self.workers) < 1:
            raise ConfigError(f"[hierarchy] expected racks with workers, got {self.workers}")
        for name in ("worker_link", "pbox_link", "uplink"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"[hierarchy] expected {name} > 0, got {getattr(self, name)}")
        if not self.latency >= 0:
            raise ConfigError(f"[hierarchy] expected a latency >= 0, got {self.latency}")


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of an exchange.

    Attributes:
        flat: across racks, without two levels.
        inside: within a rack, with two levels.
        ring: between the racks' PBoxes.
    """

    flat: float
    inside: float
    ring: float

    @property
    def in_turn(self) -> float:
        """Two levels, the second when the first is done with everything: the worst case."""
        return self.inside + self.ring

    @property
    def pipelined(self) -> float:
        """Two levels at work on different chunks at the same time."""
        return max(self.inside, self.ring)

    @property
    def pays(self) -> bool:
        """Two levels are faster, even one after the other."""
        return self.flat > self.in_turn

    @property
    def pays_pipelined(self) -> bool:
        return self.flat > self.pipelined


def estimate(nbytes: int, racks: Racks) -> Estimate:
    """The predicted times for a model of `nbytes`."""
    across = min(racks.uplink, racks.pbox_link)
    waits = 2 * (len(racks.workers) - 1) * racks.latency
    return Estimate(
        flat_bytes(nbytes, racks.workers) / racks.uplink,
        max(nbytes / racks.worker_link, max(racks.workers) * nbytes / racks.pbox_link),
        ring_bytes(nbytes, len(racks.workers)) / across + waits,
    )


def flat_bytes(nbytes: int, workers: tuple[int, ...]) -> float:
    """Bytes that leave the rack that sends most, without two levels."""
    total = sum(workers)
    return max(2 * own * nbytes * (total - own) / total for own in workers)


def ring_bytes(nbytes: int, racks: int) -> float:
    """Bytes that leave each rack, with two levels."""
    return 2 * nbytes * (racks - 1) / racks
