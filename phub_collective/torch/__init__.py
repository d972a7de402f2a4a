"""The face for PyTorch, shaped as `horovod.torch`.

import phub_collective.torch as hvd
"""

from typing import TYPE_CHECKING, NoReturn

from phub_collective.errors import PhubError as HorovodInternalError
from phub_collective.torch.absent import absence
from phub_collective.torch.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    mpi_built,
    nccl_built,
    rocm_built,
)
from phub_collective.torch.compression import Compression
from phub_collective.torch.context import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from phub_collective.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from phub_collective.torch.handles import Handle, poll, synchronize
from phub_collective.torch.ops import (
    Average,
    Max,
    Min,
    Product,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from phub_collective.torch.optimizer import DistributedOptimizer
from phub_collective.torch.options import ExchangeCounters

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "ExchangeCounters",
    "Handle",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "nccl_built",
    "poll",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
    "synchronize",
]


if not TYPE_CHECKING:  # for type checkers too, what is missing is missing

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(absence(name))
