"""The bandwidth that parameter servers need so that workers never wait for them: the formulas of
the paper's authors, whose values for 8 workers are the paper's Table 2.

A model has M bytes, a batch takes T seconds on each of N workers. In each batch a worker sends M
bytes of gradients and gets M bytes of weights; what stays on one machine needs no network. It is
taken that computing hides all communication and that serving costs nothing: this is a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from phub_collective.errors import ConfigError


@dataclass(frozen=True)
class Deployment:
    """Where the parameter servers stand.

    Attributes:
        servers: in words.
        formula: what a machine with a server needs, as the paper writes it.
        models: the same in M / T, for N workers: how many models pass the machine's network
            interface in a batch, both directions together (each has half).
    """

    servers: str
    formula: str
    models: Callable[[int], float]


DEPLOYMENTS = {
    "CC": Deployment("one, on a worker's machine", "2 M (N-1) / T", lambda n: 2 * (n - 1)),
    # The interface carries its server's share for the other workers, and its worker's for the
    # other servers: two times 2 M (N-1) / N.
    "CS": Deployment(
        "one on every worker's machine", "4 M (N-1) / (N T)", lambda n: 4 * (n - 1) / n
    ),
    "NCC": Deployment("one, on its own machine (PBox)", "2 M N / T", lambda n: 2 * n),
    "NCS": Deployment("N, each on its own machine", "2 M / T", lambda n: 2),
}


def need(deployment: str, model_bytes: float, workers: int, batch_s: float) -> float:
    """Bytes per second at the network interface of a machine with a server, both directions
    together.

    Args:
        deployment: a key of DEPLOYMENTS.
        batch_s: seconds that a worker computes for a batch.

    Raises:
        ConfigError: there is no model, no worker or no time.
    """
    if model_bytes <= 0 or workers < 1 or not 0 < batch_s < inf:  # no NaN either
        raise ConfigError(
            f"[plan] expected a model's bytes, workers and seconds of a batch above 0, got "
            f"{model_bytes:g} bytes, {workers} workers and {batch_s:g} s"
        )
    return DEPLOYMENTS[deployment].models(workers) * model_bytes / batch_s


def gbit(bytes_per_s: float) -> float:
    """Gb/s as the paper counts them: 2^30 bits, as a MiB is 2^20 bytes."""
    return bytes_per_s * 8 / 2**30
