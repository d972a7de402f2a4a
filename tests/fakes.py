"""Backends with known costs, for tests of what chooses between backends."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType

import numpy as np
import pytest

from phub_collective import backends
from phub_collective.backends.base import Backend, Context, DType, Operation, Work
from phub_collective.errors import BackendUnavailable
from phub_collective.selection import probe


class FakeBackend(Backend):
    """Sleeps as long as it says, and moves nothing but the sizes that sessions compare."""

    def __init__(self, name: str, context: Context, latency: float, bandwidth: float) -> None:
        self.name, self.context = name, context
        self.latency, self.bandwidth = latency, bandwidth
        self.submitted: list[str] = []
        self.closed = False

    def submit(self, operation: Operation) -> Work:
        buffer = operation.buffer
        if buffer is not None and buffer.dtype is DType.INT64:
            mine = buffer.bytes.tobytes()
            everyone = self.context.rendezvous.all_gather(f"fake/{operation.name}", mine)
            buffer.array()[:] = sum(np.frombuffer(one, np.int64) for one in everyone)
            return Sleep(0.0)
        self.submitted.append(operation.name)
        nbytes = 0 if buffer is None else buffer.bytes.size
        return Sleep(self.latency + nbytes / self.bandwidth)

    def close(self) -> None:
        self.closed = True


class Sleep:
    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def done(self) -> bool:
        return time.monotonic() >= self._until

    def wait(self, timeout: float | None = None) -> None:
        time.sleep(max(0.0, self._until - time.monotonic()))


class FakeModule(ModuleType):
    """A backend's module, as far as the table needs one.

    Attributes:
        made: the backends it has created, on all ranks.
        reason: why it is unavailable.
        broken_on: the rank on which `create` fails.
        entered, gate: `create` sets the former and waits for the latter.
    """

    def __init__(self, name: str, latency: float, bandwidth: float) -> None:
        super().__init__(f"fake_{name}")
        self.short_name, self.latency, self.bandwidth = name, latency, bandwidth
        self.RUNS_OPTIMIZER = self.FOLDS_PACKED = name == "pbox"
        self.made: list[FakeBackend] = []
        self.reason: str | None = None
        self.broken_on = -1
        self.entered, self.gate = threading.Event(), threading.Event()
        self.gate.set()

    def is_available(self) -> str | None:
        return self.reason

    def create(self, context: Context) -> Backend:
        if context.rank == self.broken_on:
            raise BackendUnavailable(f"[{self.short_name}] broken on rank {context.rank}")
        self.entered.set()
        assert self.gate.wait(60)
        backend = FakeBackend(self.short_name, context, self.latency, self.bandwidth)
        self.made.append(backend)
        return backend

    @property
    def used(self) -> int:
        """Operations that were submitted to all backends of this module."""
        return sum(len(backend.submitted) for backend in self.made)


def install(monkeypatch: pytest.MonkeyPatch, *modules: FakeModule) -> None:
    """Make these the only backends, and their measurement quick."""
    monkeypatch.setattr(probe, "TURNS", 1)
    monkeypatch.setattr(probe, "SLOW_TURNS", 1)
    table = {}
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        table[module.short_name] = module.__name__
    monkeypatch.setattr(backends, "TABLE", table)


def some_bytes(count: int) -> np.ndarray:
    return np.zeros(count, np.uint8)
