"""How the ranks of a job learn where its store is, when no phubrun has told them.

Rank 0 serves the store; its addresses and its secret go to the others through what their launcher
offers: MPI, or torch's own TCPStore.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from phub_collective.errors import BackendUnavailable, ConfigError, PeerTimeout
from phub_collective.machine import host_hint, own_addresses
from phub_collective.rendezvous import StoreRendezvous
from phub_collective.rendezvous.store import StoreServer

NOTICE_BYTES = 4096  # room for addresses and secret in the MPI broadcast
POLL_S = 0.005


@dataclass(frozen=True)
class Waits:
    """Seconds: of a usual wait in the job, and until all ranks are there."""

    usual: float
    start: float


@dataclass(frozen=True)
class TorchStore:
    """Torch's own store: where it is, and what we may know about the job from its launcher."""

    host: str
    port: int
    prefix: str  # of our keys in it
    agent_serves: bool  # else rank 0 must
    one_host: bool  # all ranks of the job are on it


def serve(one_host: bool) -> tuple[StoreServer, bytes]:
    """A server for the job's store, and the notice that leads the others to it. Beyond this host
    it is reachable only when the job is."""
    server = StoreServer("127.0.0.1" if one_host else "0.0.0.0")
    hosts = ["127.0.0.1"] if one_host else own_addresses()
    notice = {"hosts": hosts, "port": server.port, "secret": server.secret.hex()}
    return server, json.dumps(notice).encode()


def follow(
    notice: bytes, server: StoreServer | None, rank: int, size: int, waits: Waits
) -> StoreRendezvous:
    """Connect to the store that `notice` names; `server` if it is ours."""
    told = json.loads(notice)
    addresses = [(host, told["port"]) for host in told["hosts"]]
    secret = bytes.fromhex(told["secret"])
    try:
        return StoreRendezvous(addresses, secret, rank, size, waits.usual, waits.start, server)
    except BaseException:
        if server is not None:
            server.close()
        raise


def through_mpi(rank: int, size: int, waits: Waits) -> StoreRendezvous:
    """Meet through MPI.COMM_WORLD.

    Raises:
        BackendUnavailable: mpi4py is not installed.
        ConfigError: mpi4py uses another MPI than the mpirun that started us.
        PeerTimeout: some rank did not take part.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise BackendUnavailable(
            f"[rendezvous] started by mpirun, but mpi4py cannot be imported ({error}): "
            "pip install 'phub-collective[mpi]', or start with phubrun or torchrun"
        ) from error
    world = MPI.COMM_WORLD
    if world.size != size:
        raise ConfigError(
            f"[rendezvous] mpirun started {size} ranks, but mpi4py sees {world.size}: it uses "
            f"another MPI ({MPI.Get_library_version().splitlines()[0]}); start with its mpirun"
        )
    mine = hashlib.sha256(host_hint().encode()).digest()
    hints = bytearray(len(mine) * size)
    _finish(world.Iallgather(mine, hints), rank, waits.start)
    server, notice = serve(one_host=hints == mine * size) if rank == 0 else (None, b"")
    buffer = bytearray(notice.ljust(NOTICE_BYTES))
    _finish(world.Ibcast(buffer, 0), rank, waits.start)
    return follow(bytes(buffer), server, rank, size, waits)


def _finish(request: Any, rank: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > deadline:
            raise PeerTimeout(
                f"[rendezvous] rank {rank} waited {timeout:g} s for the other ranks in MPI; "
                "has every rank called init?"
            )
        time.sleep(POLL_S)


def through_torch(torch_store: TorchStore, rank: int, size: int, waits: Waits) -> StoreRendezvous:
    """Meet through torch's TCPStore.

    Raises:
        BackendUnavailable: torch is not installed.
        PeerTimeout: nobody serves it, or rank 0 published nothing.
    """
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__
    except ImportError as error:
        raise BackendUnavailable(
            f"[rendezvous] RANK and WORLD_SIZE are set, but torch cannot be imported ({error}): "
            "pip install 'phub-collective[torch]', or start with phubrun"
        ) from error
    server, notice = serve(torch_store.one_host) if rank == 0 else (None, b"")
    try:
        # multi_tenant: a later init_process_group in this process may serve the same port.
        store = TCPStore(
            torch_store.host,
            torch_store.port,
            is_master=rank == 0 and not torch_store.agent_serves,
            timeout=timedelta(seconds=waits.start),
            wait_for_workers=False,
            multi_tenant=True,
        )
        # The n-th init of one rank meets the n-th of the others.
        arrival = store.add(f"{torch_store.prefix}/arrivals/{rank}", 1)
        key = f"{torch_store.prefix}/notice/{arrival}"
        if rank == 0:
            store.set(key, notice.decode())
        else:
            notice = store.get(key)
    except RuntimeError as error:  # all of torch's store errors
        raise PeerTimeout(
            f"[rendezvous] rank {rank} of {size} could not meet the others through torch's store "
            f"at {torch_store.host}:{torch_store.port} (MASTER_ADDR, MASTER_PORT): {error}"
        ) from error
    rendezvous = follow(notice, server, rank, size, waits)
    rendezvous.barrier("met", waits.start)  # rank 0 keeps `store` until all have read it
    return rendezvous
