"""Allreduce, broadcast and barrier of the MPI that started this job (mpi4py): a reference backend.

Nonblocking MPI collectives, tested for completion by whoever waits, so that a wait has a timeout;
measured, they cost up to 12 % more than blocking ones at 32 KiB and nothing at 1 MiB and above.
Most MPIs move data only inside MPI calls: while nobody waits, a thread makes such calls.

When a process dies, mpirun ends the whole job, as MPI's default error handler does; so where the
other backends raise PeerLost on the survivors, here there are none.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from phub_collective.backends.base import Backend, Context, Kind, ReduceOp
from phub_collective.backends.channels import Channel, ChannelBackend, Handle
from phub_collective.backends.transfer import Transfer
from phub_collective.errors import BackendUnavailable, ConfigError, PeerTimeout
from phub_collective.machine import usable_cpus

# Set for each process by the launchers of MPICH and its relatives, and of Open MPI.
LAUNCH_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
MAX_CHANNELS = 256  # MPICH has about 2000 communicators
YIELD_S = 0.003  # how long a crowded waiter only yields, between two looks
NAP_S = 20e-6  # and how it then naps
PUMP_S = 0.0002  # while an operation is under way and nobody waits
REST_S = 0.002  # after this time without operations the pump sleeps until it is called
POLL_S = 0.001  # while communicators are made
CLOSE_S = 5.0  # for the pump's last look


def is_available() -> str | None:
    """None, or why not."""
    if not any(variable in os.environ for variable in LAUNCH_VARIABLES):
        return "not started by mpirun"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'phub-collective[mpi]'"
    return None


def create(context: Context) -> Backend:
    """Connect through MPI.COMM_WORLD. Collective.

    Raises:
        ConfigError: MPI and the job disagree about who is which rank.
        BackendUnavailable: this MPI cannot be called from several threads.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    mine = [world.rank, world.size, MPI.Query_thread() >= MPI.THREAD_MULTIPLE]
    facts = context.rendezvous.all_gather(
        "mpi", json.dumps(mine).encode(), context.config.start_timeout
    )
    for rank, (mpi_rank, mpi_size, threads) in enumerate(map(json.loads, facts)):
        if (mpi_rank, mpi_size) != (rank, context.size):
            raise ConfigError(
                f"[mpi] rank {rank} of {context.size} is rank {mpi_rank} of {mpi_size} in MPI; "
                "start every rank of the job with one mpirun, and with the MPI that mpi4py uses"
            )
        if not threads:
            raise BackendUnavailable(f"[mpi] rank {rank}: this MPI lacks MPI_THREAD_MULTIPLE")
    return MpiBackend(context, MPI)


class MpiBackend(ChannelBackend):
    """See `ChannelBackend`; a channel is a communicator."""

    name = "mpi"
    max_channels = MAX_CHANNELS

    def __init__(self, context: Context, mpi: Any) -> None:
        self._mpi = mpi
        self._pump = Pump(crowded=context.local_size > usable_cpus())
        self._communicators: list[Any] = []
        super().__init__(context)

    def open_channel(self, number: int) -> Channel:
        timeout = self.context.config.stall_timeout
        communicator, request = self._mpi.COMM_WORLD.Idup()
        deadline = time.monotonic() + timeout
        while not request.Test():
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"[mpi] rank {self.context.rank} waited {timeout:g} s for the other ranks to "
                    f"make communicator {number}"
                )
            time.sleep(POLL_S)
        self._communicators.append(communicator)
        return MpiChannel(self._mpi, communicator, self._pump)

    def disconnect(self, orderly: bool) -> None:
        self._pump.close()
        if orderly:
            for communicator in self._communicators:
                communicator.Free()


class MpiChannel:
    """See `Channel`."""

    def __init__(self, mpi: Any, communicator: Any, pump: Pump) -> None:
        self._mpi, self._communicator, self._pump = mpi, communicator, pump
        self._ops = {
            ReduceOp.SUM: mpi.SUM,
            ReduceOp.MIN: mpi.MIN,
            ReduceOp.MAX: mpi.MAX,
            ReduceOp.PRODUCT: mpi.PROD,
        }

    def start(self, transfer: Transfer | None, ended: Callable[[], None]) -> Handle:
        request = MpiRequest(self._request(transfer), self._pump)
        self._pump.watch(request, ended)
        return request

    def _request(self, transfer: Transfer | None) -> Any:
        if transfer is None:
            return self._communicator.Ibarrier()
        if transfer.kind is Kind.BROADCAST:
            return self._communicator.Ibcast(transfer.array, transfer.root)
        return self._communicator.Iallreduce(
            self._mpi.IN_PLACE, transfer.array, self._ops[transfer.op]
        )


class MpiRequest:
    """See `Handle`."""

    def __init__(self, request: Any, pump: Pump) -> None:
        self._request, self._pump = request, pump
        self._lock = threading.Lock()  # a request must not be tested by two threads at once
        self._done = False
        self._error: RuntimeError | None = None

    def test(self) -> bool:
        with self._lock:
            if not self._done:
                try:
                    self._done = self._request.Test()
                except RuntimeError as error:  # mpi4py has MPI's errors returned, if MPI survives
                    self._done, self._error = True, error
            return self._done

    def wait(self, seconds: float) -> bool:
        if seconds <= 0 or self._done:
            return self.test()
        begin = time.monotonic()
        with self._pump.paused():
            while not self.test():
                waited = time.monotonic() - begin
                if waited > seconds:
                    return False
                self._pump.give_way(waited)
        return True

    def check(self) -> None:
        if self._error is not None:
            raise self._error


class Pump:
    """A thread that calls MPI while operations are under way and nobody waits for one."""

    def __init__(self, crowded: bool) -> None:
        """`crowded`: this host has fewer CPUs than ranks, so whoever spins holds up others."""
        self._crowded = crowded
        self._changed = threading.Condition()
        # guarded by _changed
        self._watched: list[tuple[MpiRequest, Callable[[], None]]] = []
        self._waiting = 0  # threads that call MPI themselves
        self._resting = True
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="phub-mpi-pump", daemon=True)
        self._thread.start()

    def watch(self, request: MpiRequest, ended: Callable[[], None]) -> None:
        with self._changed:
            self._watched.append((request, ended))
            if self._resting:  # else it will see it soon: waking it costs more than a small message
                self._changed.notify()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The pump leaves MPI to the thread that is in the block."""
        with self._changed:
            self._waiting += 1
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                if self._resting and self._watched:
                    self._changed.notify()

    def give_way(self, waited: float) -> None:
        """Between two looks of a thread that has waited so many seconds: let the peer run that it
        waits for.

        Yields are quick, but since Linux 6.18 each gives up a whole slice: who has yielded many
        thousand times while it was alone then waits for seconds. Who naps begins anew.
        """
        if self._crowded:
            if waited < YIELD_S:
                os.sched_yield()
            else:
                time.sleep(NAP_S)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        last_used = 0.0
        while True:
            with self._changed:
                idle = not self._watched and time.monotonic() - last_used > REST_S
                if idle or self._waiting:
                    self._resting = True
                    self._changed.wait_for(self._has_work)
                    self._resting = False
                if self._closed:
                    return
                watched, self._watched = self._watched, []
            if watched:
                last_used = time.monotonic()
            left = [one for one in watched if not self._move(*one)]
            with self._changed:
                self._watched += left
            time.sleep(PUMP_S)

    def _has_work(self) -> bool:
        return self._closed or bool(self._watched and not self._waiting)

    @staticmethod
    def _move(request: MpiRequest, ended: Callable[[], None]) -> bool:
        if not request.test():
            return False
        ended()
        return True
