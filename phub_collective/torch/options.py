"""How a distributed optimizer exchanges, and what it has exchanged."""

from __future__ import annotations

from dataclasses import dataclass

from phub_collective.backends.base import ReduceOp
from phub_collective.backends.compression import NO_COMPRESSION, Compression


@dataclass(frozen=True)
class Options:
    """How an optimizer exchanges; the arguments of `DistributedOptimizer`, checked.

    Attributes:
        named: (name, position) of every parameter in the order of the key table; positions count
            through the optimizer's groups.
        passes: backward passes per step.
        bucket_bytes: 0: the session's setting.
        on_server, shared_model: where the optimizer runs, where its result stands.
        deterministic, staleness: as in `ExchangeSpec`.
        wait_in_forward: a step does not wait for its results, whoever uses them next does.
        backend: None: the selector's choice.
        compression: of gradients.
    """

    named: tuple[tuple[str, int], ...]
    passes: int = 1
    op: ReduceOp = ReduceOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0
    bucket_bytes: int = 0
    sparse_as_dense: bool = False
    on_server: bool = False
    shared_model: bool = False
    deterministic: bool = False
    staleness: float = 0
    wait_in_forward: bool = False
    backend: str | None = None
    compression: Compression = NO_COMPRESSION


@dataclass(frozen=True)
class ExchangeCounters:
    """What an optimizer exchanged since it was made.

    Attributes:
        bytes_total: bytes pushed.
        bytes_in_backward: those of them that were pushed before backward ended.
        steps: exchanges.
    """

    bytes_total: int = 0
    bytes_in_backward: int = 0
    steps: int = 0
