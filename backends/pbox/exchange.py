"""The exchange of a model through a PBox: gradients in an arena, chunks to their cores and back."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from phub_collective.backends.base import (
    SGD,
    Counters,
    Exchange,
    ExchangeSpec,
    Hyper,
    KeyState,
    ReduceOp,
    layout,
)
from phub_collective.backends.native import load
from phub_collective.backends.operations import check_compression
from phub_collective.backends.pbox.connection import Connection, RegisteredTable
from phub_collective.backends.pbox.handshake import HANDSHAKE_SECONDS
from phub_collective.backends.pbox.keytable import TableSpec
from phub_collective.backends.pbox.protocol import close_all
from phub_collective.errors import ConfigError, PhubError


class PboxExchange(Exchange):
    """See `Exchange`. On the PBox's host, over shm lanes, the arena is the server's memory: a core
    reads gradients where they stand and writes the answer in the same place. With a compression,
    packed gradients travel through the lanes, on any host; the worker keeps the residuals, which
    begin with zeros."""

    def __init__(
        self, connection: Connection, spec: ExchangeSpec, chunk_bytes: int, backend: str = "pbox"
    ) -> None:
        self._connection, self._spec, self.backend = connection, spec, backend
        self._core = load()
        self._check_staleness()
        self._table = TableSpec(
            spec.name,
            tuple(spec.keys),
            spec.op,
            spec.prescale,
            spec.postscale,
            chunk_bytes,
            model=True,
            server=spec.place == "server",
            shared=spec.shared_model,
            states=spec.state_arrays if spec.place == "server" else 0,
            deterministic=spec.deterministic,
            staleness=None if math.isinf(spec.staleness) else int(spec.staleness),
            first_keys_first=spec.first_keys_first,
            compression=spec.compression,
        )
        self._check()
        registered = self._register()
        self._ids, self._in_place = registered.ids, registered.arena
        self.offsets, size = layout(spec.keys)
        try:
            self._map(registered, size)
        except BaseException:
            close_all(registered.descriptors)
            connection.close_table(spec.name, self._ids)  # the others shall not wait for this rank
            raise
        self._views = [
            self.arena[o : o + key.nbytes] for o, key in zip(self.offsets, spec.keys, strict=True)
        ]
        self._steps = 0
        self._pushed: set[int] = set()
        self._pushed_bytes = 0
        self._sent_before = connection.client.counters().bytes_sent
        self._groups: list[Hyper] = []
        self._groups_with_keys = {key.group for key in spec.keys}
        self._closed = False

    def _check(self) -> None:
        spec = self._spec
        if spec.op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
            raise ConfigError(f"[pbox] gradients are summed or averaged, not {spec.op.name}")
        if spec.place not in ("worker", "server"):
            raise ConfigError(f"[pbox] place={spec.place!r}; expected 'worker' or 'server'")
        if spec.shared_model and spec.place != "server":
            raise ConfigError("[pbox] shared_model=True needs the optimizer on the server")
        if spec.shared_model and self._connection.shards > 1:
            raise ConfigError(
                f"[pbox] shared_model=True needs one PBox, this job has {self._connection.shards} "
                "shards, each with a part of the weights; leave it out, or use backend pbox"
            )
        check_compression(spec, "pbox")
        if spec.place == "server":
            for key in spec.keys:
                if not key.dtype.is_floating:
                    raise ConfigError(
                        f"[pbox] no optimizer for {key.name!r} of {key.dtype.name.lower()}"
                    )

    def _check_staleness(self) -> None:
        spec = self._spec
        if not spec.staleness >= 0:  # catches NaN too
            raise ConfigError(f"[pbox] staleness={spec.staleness}; expected steps, or math.inf")
        if spec.staleness > 0 and (spec.place != "server" or spec.shared_model):
            raise ConfigError(
                "[pbox] staleness > 0 needs the optimizer on the server, and a model that is not "
                "shared"
            )
        if spec.staleness > 0 and spec.deterministic:
            raise ConfigError(
                "[pbox] deterministic=True with staleness > 0, where steps come as ranks make them"
            )

    def _register(self) -> RegisteredTable:
        answered = threading.Event()
        result: list[RegisteredTable | PhubError] = []

        def on_registered(table: RegisteredTable | None, error: PhubError | None) -> None:
            answer = table if error is None else error
            assert answer is not None
            result.append(answer)
            answered.set()

        connection, name = self._connection, self._spec.name
        connection.register(self._table, on_registered)
        try:
            connection.wait(answered.wait, f"all ranks to register {name!r}")
        except BaseException:
            if not connection.give_up(name) and answered.wait(HANDSHAKE_SECONDS):
                close_all(getattr(result[0], "descriptors", []))
            raise
        if isinstance(result[0], PhubError):
            raise result[0]
        return result[0]

    def _map(self, registered: RegisteredTable, size: int) -> None:
        memory, access = self._core.Memory, self._core.Access
        descriptors = registered.descriptors  # `attach` closes one, whatever becomes of it
        if registered.arena:
            self._arena_memory = memory.attach(descriptors.pop(0), size, access.READ_WRITE)
        else:
            self._arena_memory = memory.anonymous(size)
        self._connection.hold(self._ids, self._arena_memory)
        self.arena = np.frombuffer(self._arena_memory, np.uint8)
        self._weight_memories = []
        while descriptors:
            weights = memory.attach(descriptors.pop(0), size, access.COPY_ON_WRITE)
            self._weight_memories.append(weights)
        self._weights = [np.frombuffer(m, np.uint8) for m in self._weight_memories]
        self.result = self._weights[0] if self._weights else self.arena

    @property
    def counters(self) -> Counters:  # type: ignore[override]
        """Over lanes, `pushed` counts what has left, headers included."""
        sent = self._connection.client.counters().bytes_sent - self._sent_before
        return Counters(self._pushed_bytes if self._in_place else sent, self._steps)

    def initialize(self, root: int = 0, state: Sequence[KeyState] | None = None) -> None:
        if not 0 <= root < self._connection.workers:
            raise ConfigError(f"[pbox] root {root} is no rank of 0..{self._connection.workers - 1}")
        is_root = self._connection.rank == root
        if is_root and state is not None:
            self._write_state(state)
        flags = self._core.INIT | (0 if is_root else self._core.NO_GRAD)
        for key in range(len(self._views)):
            self._start(key, flags)
        self.wait()
        if is_root and state is not None and self._spec.staleness == 0:
            self._write_weights(state)
        for memory in self._weight_memories:
            memory.revert()  # weights loaded into a worker's own pages are now everybody's

    def _write_state(self, state: Sequence[KeyState]) -> None:
        """On each lane it goes before this rank's initial weights, for which all ranks wait."""
        for key, one in enumerate(state):
            arrays = one.arrays or self._state_like(key)
            for index, array in enumerate(arrays):
                self._write_array(key, 1 + index, one.taken, array)

    def _write_weights(self, state: Sequence[KeyState]) -> None:
        """Weights in float32, instead of those that were widened from 16 bits. On each lane they go
        before this rank's next push, without which no step is made."""
        for key, one in enumerate(state):
            if one.weights is not None and self._is_narrow(key):
                self._write_array(key, 0, one.taken, one.weights)

    def _write_array(self, key: int, index: int, taken: int, array: np.ndarray) -> None:
        expected = self._wide(key)
        if array.dtype != expected.dtype or array.size != expected.size:
            raise ConfigError(
                f"[pbox] state of {self._spec.keys[key].name!r}: expected {expected.size} elements "
                f"of {expected.dtype}, got {array.size} of {array.dtype}"
            )
        memory = np.array(array).reshape(-1).view(np.uint8)  # writable and contiguous
        self._connection.client.write_state(self._ids.id, key, index, taken, memory)

    def _is_narrow(self, key: int) -> bool:
        return self._spec.keys[key].dtype.itemsize == 2

    def _wide(self, key: int) -> np.ndarray:
        """Zeros of the key's size, in the accumulator's type."""
        spec = self._spec.keys[key]
        return np.zeros(spec.count, np.float32 if self._is_narrow(key) else spec.dtype.stored)

    def _state_like(self, key: int) -> list[np.ndarray]:
        return [self._wide(key) for _ in range(self._spec.state_arrays)]

    def read_state(self, timeout: float | None = None) -> list[KeyState]:
        if self._spec.place != "server":
            return super().read_state(timeout)
        if self._pushed:
            raise ConfigError("[pbox] read_state() between a step's first push and its wait()")
        client, table, keys = self._connection.client, self._ids.id, range(len(self._views))
        found = [KeyState(0, self._state_like(key)) for key in keys]
        for index in range(self._spec.state_arrays):
            for key in keys:
                client.read_state(table, key, 1 + index, found[key].arrays[index].view(np.uint8))
            self._wait_all("the optimizer's state", timeout)
        for key in filter(self._is_narrow, keys):
            weights = found[key].weights = self._wide(key)
            client.read_state(table, key, 0, weights.view(np.uint8))
        self._wait_all("the weights", timeout)
        for key in keys:
            found[key].taken = client.taken(table, key)
        return found

    def _wait_all(self, what: str, timeout: float | None) -> None:
        client, table = self._connection.client, self._ids.id
        every = self._core.ALL_KEYS
        what = f"{what} of {self._spec.name!r}"
        self._connection.wait(lambda s: bool(client.wait(table, every, s)), what, timeout)

    def push(self, key: int, no_grad: bool = False) -> None:
        self._start(key, self._core.NO_GRAD if no_grad else 0)
        if not no_grad:
            self._pushed_bytes += self._spec.keys[key].nbytes

    def _start(self, key: int, flags: int) -> None:
        if key in self._pushed:
            name = self._spec.keys[key].name
            raise ConfigError(f"[pbox] key {name!r} was pushed twice in one step")
        self._connection.client.push(self._ids.id, key, flags, self._views[key])
        self._pushed.add(key)

    def pull(self, key: int, timeout: float | None = None) -> None:
        """Make the current weights of `key` stand in the arena, without a push (server optimizer).
        `timeout`: as of `wait`."""
        if self._in_place and self._spec.staleness == 0:
            return  # the answer to the last push is there: no step goes on without this rank
        client, table, view = self._connection.client, self._ids.id, self._views[key]
        client.pull(table, key, view)
        what = f"the weights of {self._spec.keys[key].name!r}"
        self._connection.wait(lambda s: bool(client.wait(table, key, s)), what, timeout)

    def wait(self, timeout: float | None = None) -> None:
        missing = [k.name for i, k in enumerate(self._spec.keys) if i not in self._pushed]
        if missing:
            raise ConfigError(f"[pbox] wait() before these keys were pushed: {missing[:3]}")
        self._wait_all(f"the answer to step {self._steps}", timeout)
        self._pushed.clear()
        self._steps += 1
        if self._weights:
            self.result = self._weights[self._steps % 2]

    def wait_key(self, key: int, timeout: float | None = None) -> None:
        client, table = self._connection.client, self._ids.id
        name = self._spec.keys[key].name
        self._connection.wait(lambda s: bool(client.wait(table, key, s)), f"key {name!r}", timeout)

    def finish_key(self, key: int) -> None:
        """Let an answered key be pushed again before the others are (a step of its own)."""
        self._pushed.discard(key)

    def set_hyper(self, groups: Sequence[Hyper]) -> None:
        if self._spec.place != "server":
            return super().set_hyper(groups)
        if len(groups) != self._table.groups:
            raise ConfigError(
                f"[pbox] expected {self._table.groups} parameter groups, got {len(groups)}"
            )
        if self._pushed:
            raise ConfigError(
                "[pbox] hyperparameters are read at a step's first push; set them before it"
            )
        for index, hyper in enumerate(groups):
            known = index < len(self._groups) and self._groups[index] == hyper
            if known or index not in self._groups_with_keys:
                continue
            self._connection.client.set_hyper(self._ids.id, index, self._native_hyper(hyper))
        self._groups = [dataclasses.replace(hyper) for hyper in groups]
        return None

    def _native_hyper(self, hyper: Hyper) -> Any:
        if hyper.state_arrays > self._spec.state_arrays:
            raise ConfigError(
                f"[pbox] {hyper} keeps {hyper.state_arrays} arrays of state; the exchange was "
                f"opened with state_arrays={self._spec.state_arrays}"
            )
        if isinstance(hyper, SGD):
            return self._core.Hyper.sgd(**vars(hyper))
        return self._core.Hyper.adam(
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            amsgrad=hyper.amsgrad,
            decoupled=hyper.decoupled_weight_decay,
            maximize=hyper.maximize,
        )

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._connection.close_table(self._spec.name, self._ids, in_flight=bool(self._pushed))
