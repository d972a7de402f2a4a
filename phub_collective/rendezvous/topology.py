"""The way to the other ranks of the job.

The same script runs under phubrun, torchrun, mpirun, srun, or alone; the launchers differ in the
variables they set (identity.py) and in how the address of the job's store gets to everybody:

    phubrun     serves the store itself and names it in the environment of its workers
    mpirun      rank 0 serves it and broadcasts the address with mpi4py
    torchrun    rank 0 serves it and publishes the address through torch's own store
    srun        as torchrun, at MASTER_ADDR or else on the first host of the step
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

from phub_collective.config import Config
from phub_collective.errors import ConfigError
from phub_collective.rendezvous import LocalRendezvous, Rendezvous, StoreRendezvous
from phub_collective.rendezvous.hosts import ranks_of_this_host
from phub_collective.rendezvous.identity import Identity, identify
from phub_collective.rendezvous.meeting import TorchStore, Waits, through_mpi, through_torch

__all__ = ["Identity", "connect", "identify"]


def connect(
    config: Config, environ: Mapping[str, str] | None = None
) -> tuple[Identity, Rendezvous]:
    """Meet all other ranks. Collective; returns when everybody is there.

    Raises:
        ConfigError: the launcher's variables are wrong.
        BackendUnavailable: the launcher's way to meet needs a package that is missing.
        AuthError, PeerLost, PeerTimeout: the others were not met within `config.start_timeout`.
    """
    environ = os.environ if environ is None else environ
    identity = identify(environ)
    waits = Waits(config.stall_timeout, config.start_timeout)
    if identity.size == 1:
        return dataclasses.replace(identity, local_rank=0, local_size=1), LocalRendezvous(
            timeout=waits.usual
        )
    rendezvous = _meet(identity, environ, waits)
    try:
        rendezvous.barrier("start", waits.start)
        if identity.local_size < 0:
            ranks = ranks_of_this_host(rendezvous)
            identity = dataclasses.replace(
                identity, local_rank=ranks.index(identity.rank), local_size=len(ranks)
            )
    except BaseException:
        rendezvous.close()
        raise
    return identity, rendezvous


def _meet(identity: Identity, environ: Mapping[str, str], waits: Waits) -> Rendezvous:
    rank, size = identity.rank, identity.size
    if identity.launcher == "phubrun":
        addresses = _addresses(environ["PHUB_RENDEZVOUS"])
        secret = bytes.fromhex(environ.get("PHUB_SECRET", ""))
        return StoreRendezvous(addresses, secret, rank, size, waits.usual, waits.start)
    if identity.launcher == "mpirun":
        return through_mpi(rank, size, waits)
    return through_torch(_torch_store(identity, environ), rank, size, waits)


def _addresses(text: str) -> list[tuple[str, int]]:
    pairs = [one.strip().rpartition(":") for one in text.split(",")]
    if not all(host and port.isdecimal() for host, _, port in pairs):
        raise ConfigError(f"[topology] PHUB_RENDEZVOUS={text!r}: expected HOST:PORT,...")
    return [(host, int(port)) for host, _, port in pairs]


def _torch_store(identity: Identity, environ: Mapping[str, str]) -> TorchStore:
    """Where torch's store is or shall be, as torch itself understands the variables."""
    if identity.launcher == "srun":
        environ = {**_slurm_master(environ), **environ}
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"[topology] MASTER_ADDR={host!r} MASTER_PORT={port!r}: expected the host and port of "
            f"rank 0, since this is rank {identity.rank} of {identity.size}"
        )
    run, attempt = (
        environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT")
    )
    return TorchStore(
        host=host,
        port=int(port),
        prefix=f"phub/{run}/{attempt}",
        agent_serves=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        one_host=identity.local_size == identity.size,
    )


def _slurm_master(environ: Mapping[str, str]) -> dict[str, str]:
    """The first host of the step, "n07" of "n[07-09,12],m1", and a port that other jobs on that
    host are unlikely to take."""
    nodes = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_NODELIST", ""))
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    if first is None:
        raise ConfigError(f"[topology] SLURM_STEP_NODELIST={nodes!r}: expected a list of hosts")
    job = int(environ.get("SLURM_JOB_ID", "0")) * 64 + int(environ["SLURM_STEP_ID"]) % 64
    return {"MASTER_ADDR": first[1] + (first[2] or ""), "MASTER_PORT": str(20000 + job % 12000)}
