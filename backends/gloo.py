"""Allreduce, broadcast and barrier of Gloo, as torch.distributed has it: a reference backend.

Process groups of our own, connected through the job's rendezvous; torch's default process group is
neither used nor needed.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any

from phub_collective.backends.base import Backend, Context, Kind
from phub_collective.backends.channels import Channel, ChannelBackend, Handle
from phub_collective.backends.transfer import Transfer
from phub_collective.errors import BackendUnavailable, PeerTimeout, PhubError
from phub_collective.machine import own_addresses

GRACE_S = 5.0  # Gloo's own timeout, whose error says more, comes first
MAX_CHANNELS = 16  # each has a socket for every peer, and a thread


def is_available() -> str | None:
    """None, or why not."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: pip install 'phub-collective[torch]'"
    return None


def create(context: Context) -> Backend:
    """Connect all ranks. Collective.

    Raises:
        BackendUnavailable: this torch was built without Gloo.
        PeerTimeout, PeerLost: not all ranks came.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        raise BackendUnavailable("[gloo] this torch was built without torch.distributed or Gloo")
    return GlooBackend(context)


class GlooBackend(ChannelBackend):
    """See `ChannelBackend`; a channel is a process group."""

    name = "gloo"
    max_channels = MAX_CHANNELS

    def __init__(self, context: Context) -> None:
        self._device = _device(context)
        super().__init__(context)

    def open_channel(self, number: int) -> Channel:
        context = self.context
        key = f"{self.label}/{number}/connected/{context.rank}"
        made: Future[GlooChannel] = Future()

        def connect() -> None:
            try:
                made.set_result(self._connect(number))
            except Exception as error:
                made.set_exception(error)
            with suppress(PhubError):  # nobody waits for it any more
                context.rendezvous.put(key, b"")

        # Torch knows nothing of ranks that die meanwhile, but the rendezvous does. So a rank that
        # is only late has the time of a stall, and one that is lost is an error at once.
        threading.Thread(target=connect, name=f"phub-gloo-{number}", daemon=True).start()
        context.rendezvous.get(key, context.config.stall_timeout + GRACE_S)
        context.rendezvous.discard(key)
        return made.result()

    def _connect(self, number: int) -> GlooChannel:
        from torch.distributed import ProcessGroupGloo

        context = self.context
        stall = timedelta(seconds=context.config.stall_timeout)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._threads = 1  # on the shared channel too: its operations have one order anyway
        options._timeout = stall
        try:
            store = _store(context, f"{self.label}/{number}/")
            group = ProcessGroupGloo(store, context.rank, context.size, options)
        except PhubError:
            raise
        except RuntimeError as error:
            raise PeerTimeout(
                f"[gloo] rank {context.rank} could not connect to the other {context.size - 1} "
                f"ranks: {error}"
            ) from error
        return GlooChannel(group, store)

    def disconnect(self, orderly: bool) -> None:
        """Process groups close their sockets when the last reference goes."""


class GlooChannel:
    """See `Channel`."""

    def __init__(self, group: Any, store: Any) -> None:
        self._group = group
        self._store = store  # the group holds its C++ half only, which can do nothing by itself

    def start(self, transfer: Transfer | None, ended: Callable[[], None]) -> Handle:
        return GlooWork(self._work(transfer), ended)

    def _work(self, transfer: Transfer | None) -> Any:
        import torch
        import torch.distributed as dist

        if transfer is None:
            return self._group.barrier(dist.BarrierOptions())
        tensors = [torch.from_numpy(transfer.array)]
        if transfer.kind is Kind.BROADCAST:
            broadcast = dist.BroadcastOptions()
            broadcast.rootRank, broadcast.rootTensor = transfer.root, 0
            return self._group.broadcast(tensors, broadcast)
        allreduce = dist.AllreduceOptions()
        allreduce.reduceOp = getattr(dist.ReduceOp, transfer.op.name)  # the same names as ours
        return self._group.allreduce(tensors, allreduce)


class GlooWork:
    """See `Handle`."""

    def __init__(self, work: Any, ended: Callable[[], None]) -> None:
        self._over = threading.Event()
        self._work, self._future = work, work.get_future()

        def on_done(_: Any) -> None:
            self._over.set()
            ended()

        self._future.add_done_callback(on_done)

    def wait(self, seconds: float) -> bool:
        return self._over.wait(seconds) if seconds > 0 else self._over.is_set()

    def check(self) -> None:
        self._future.value()


def _device(context: Context) -> Any:
    """Loopback when all ranks share a host; else torch's GLOO_SOCKET_IFNAME, or the first address
    of this host that others can reach."""
    from torch.distributed import ProcessGroupGloo

    if context.local_size == context.size:
        return ProcessGroupGloo.create_device(hostname="127.0.0.1")
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    reachable = [host for host in own_addresses() if not host.startswith("127.")]
    return ProcessGroupGloo.create_device(hostname=[*reachable, "127.0.0.1"][0])


def _store(context: Context, prefix: str) -> Any:
    """The job's rendezvous as a torch Store, as far as Gloo uses one."""
    import torch.distributed as dist

    rendezvous = context.rendezvous

    class RendezvousStore(dist.Store):  # type: ignore[name-defined, misc]
        def set(self, key: str, value: str | bytes) -> None:
            data = value.encode() if isinstance(value, str) else bytes(value)
            rendezvous.put(prefix + key, data)

        def get(self, key: str) -> bytes:
            return rendezvous.get(prefix + key, context.config.stall_timeout)

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            seconds = context.config.stall_timeout if timeout is None else timeout.total_seconds()
            for key in keys:
                rendezvous.get(prefix + key, seconds)

    return RendezvousStore()
