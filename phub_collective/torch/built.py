"""Which of Horovod's engines there are: its `*_built` questions, answered for this package."""

from __future__ import annotations

from phub_collective.backends import unavailable_reason


def mpi_built() -> bool:
    """Whether the `mpi` backend can be used here."""
    return unavailable_reason("mpi") is None


def gloo_built() -> bool:
    """Whether the `gloo` backend can be used here."""
    return unavailable_reason("gloo") is None


def nccl_built() -> int:
    """NCCL's version number in Horovod; 0: there is no NCCL backend."""
    return 0


def cuda_built() -> bool:
    """False: device tensors are not exchanged yet."""
    return False


def rocm_built() -> bool:
    """False: there is no ROCm support."""
    return False


def ddl_built() -> bool:
    """False: there is no DDL backend."""
    return False


def ccl_built() -> bool:
    """False: there is no oneCCL backend."""
    return False
