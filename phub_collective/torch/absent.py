"""What of `horovod.torch` is not here yet, and what to do without it."""

from __future__ import annotations

_GATHER = "use allgather_object for small values; of tensors, sum ones padded with zeros"
_SETS = "all ranks take part in every operation; start a job of the ranks you want"
_QUESTION = "phubrun --check-build and phub explain answer such questions"
_TIMELINE = (
    "ExchangeCounters of an optimizer (its exchange_counters) tell the bytes that overlapped"
)

# name -> what to do instead
ABSENT = {
    "Adasum": "use op=Average or op=Sum",
    "ProcessSet": _SETS,
    "SyncBatchNorm": "average the statistics with allreduce, or use GroupNorm",
    "add_process_set": _SETS,
    "allgather": _GATHER,
    "allgather_async": _GATHER,
    "alltoall": "use torch.distributed beside this package",
    "alltoall_async": "use torch.distributed beside this package",
    "elastic": "save checkpoints, and start the job again when a rank is lost",
    "global_process_set": _SETS,
    "gloo_enabled": _QUESTION,
    "grouped_allgather": _GATHER,
    "grouped_allgather_async": _GATHER,
    "grouped_reducescatter": "use grouped_allreduce and keep your part",
    "grouped_reducescatter_async": "use grouped_allreduce_async and keep your part",
    "join": "give every rank the same number of batches (drop_last, or repeat some)",
    "mpi_enabled": _QUESTION,
    "mpi_threads_supported": _QUESTION,
    "reducescatter": "use allreduce and keep your part",
    "reducescatter_async": "use allreduce_async and keep your part",
    "remove_process_set": _SETS,
    "sparse_allreduce_async": "use allreduce of to_dense(), or sparse_as_dense=True",
    "start_timeline": _TIMELINE,
    "stop_timeline": _TIMELINE,
}


def absence(name: str) -> str:
    """The sentence for an attribute that `phub_collective.torch` does not have."""
    if name in ABSENT:
        return f"Horovod's {name} is not in phub_collective.torch yet; {ABSENT[name]}"
    return f"module 'phub_collective.torch' has no attribute {name!r}"
