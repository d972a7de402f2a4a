"""How long an exchange must take at least, given its links. Pure arithmetic.

A link carries TCP payload at MTU_SHARE of its rate, both ways at once.
"""

from __future__ import annotations

from lab.topology import MTU_SHARE, Shape

from phub_collective.backends import schedule

COUNT = 1 << 20  # elements of a plan whose shares are taken


def moved(system: str, nbytes: int, workers: int) -> float:
    """Bytes that the busiest worker's link moves at least, each way."""
    if workers == 1:
        return float(nbytes if system in ("pbox", "auto") else 0)
    if system == "pbox":
        return float(nbytes)
    if system == "pshard":
        # To the other shards what is theirs, and from its own shard as much to each other worker.
        return 2 * (workers - 1) / workers * nbytes
    if system == "auto":
        return min(moved(one, nbytes, workers) for one in ("pbox", "ring"))
    return nbytes * _share("halving_doubling" if system == "halving_doubling" else "ring", workers)


def least_moved(system: str, nbytes: int, workers: int) -> int:
    """Bytes that every worker's link moves at least, each way, whatever the algorithm: what its
    own gradients, or the sums of the others, take in any case."""
    return nbytes if system == "pbox" else nbytes * (workers - 1) // workers


def exchange(system: str, nbytes: int, shape: Shape, jobs: int = 1) -> float:
    """Seconds of the played rack. `jobs`: that exchange as much at once, on as many workers each.

    A worker's link carries what `moved` says; those of a PBox carry all workers' models. Without
    links of its own it stands on a worker's host, whose link carries those of the others."""
    payload = shape.link * MTU_SHARE / 8
    worker = moved(system, nbytes, shape.workers // jobs) / payload
    if system != "pbox":
        return worker
    if not shape.pbox_links:
        return (shape.workers - 1) * nbytes / payload
    return max(worker, shape.workers * nbytes / (payload * shape.pbox_links))


def step(exchange_s: float, batch_s: float, backward: float) -> float:
    """Seconds of a step that ends with the exchange: `backward` is its share of the batch, during
    which gradients leave."""
    return batch_s * (1 - backward) + max(batch_s * backward, exchange_s)


def _share(algorithm: str, workers: int) -> float:
    """Of a buffer, what the busiest rank sends or receives."""
    most = 0
    for rank in range(workers):
        steps = getattr(schedule, algorithm)(rank, workers, COUNT)
        most = max(
            most,
            sum(one.send[1] - one.send[0] for one in steps),
            sum(one.recv[1] - one.recv[0] for one in steps),
        )
    return most / COUNT
