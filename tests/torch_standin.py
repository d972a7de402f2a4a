"""A session of one rank without any transport: what it was told to do can be looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from phub_collective.backends.base import (
    SGD,
    Counters,
    Exchange,
    ExchangeSpec,
    Hyper,
    Key,
    KeyState,
    Operation,
    Work,
    layout,
)
from phub_collective.config import Config
from phub_collective.errors import PhubError


class DoneWork:
    """An operation of one rank, which leaves its buffer as it is."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        pass


class StandInExchange(Exchange):
    """The exchange of one rank. The result is the gradient (worker), or torch's own step.

    Attributes:
        pushes: per finished or current step: (key name, no_grad) in the order of pushes.
        on_wait: called by `wait` with the exchange, to play the other ranks.
    """

    backend = "stand-in"

    def __init__(self, spec: ExchangeSpec) -> None:
        self.spec = spec
        self.offsets, size = layout(spec.keys)
        self.arena = self.result = np.zeros(size, np.uint8)
        self.counters = Counters()
        self.pushes: list[list[tuple[str, bool]]] = [[]]
        self.on_wait: Callable[[StandInExchange], None] = lambda exchange: None
        self.hypers: list[list[Hyper]] = []
        self.initialized = 0
        self.waited_for: list[str] = []  # keys
        self._answered = False
        self.closed = False
        self._buffers = [np.zeros(size, np.uint8) for _ in range(2)]
        self._weights: list[torch.nn.Parameter] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self.state: list[KeyState] = []
        if spec.shared_model:
            self.result = self._buffers[0]

    def values(self, key: int, memory: np.ndarray | None = None) -> np.ndarray:
        """1-D float32 view of a key in `memory` (None: the arena)."""
        begin = self.offsets[key]
        whole = self.arena if memory is None else memory
        return whole[begin : begin + self.spec.keys[key].nbytes].view(np.float32)

    def initialize(self, root: int = 0, state: Sequence[KeyState] | None = None) -> None:
        self.initialized += 1
        self.state = self.read_state() if state is None else list(state)
        keys = range(len(self.spec.keys))
        self._weights = [torch.nn.Parameter(torch.tensor(self.values(key))) for key in keys]
        self._optimizer = None
        self._publish()

    def read_state(self, timeout: float | None = None) -> list[KeyState]:
        if self._optimizer is None:
            return self.state or [KeyState(0, []) for _ in self.spec.keys]
        found = []
        for weight in self._weights:
            entry = dict(self._optimizer.state.get(weight, {}))
            taken = int(entry.pop("step", 1 if entry.get("momentum_buffer") is not None else 0))
            arrays = [array.numpy().copy() for array in entry.values() if array is not None]
            found.append(KeyState(taken, arrays))
        return found

    def push(self, key: int, no_grad: bool = False) -> None:
        self.pushes[-1].append((self.spec.keys[key].name, no_grad))
        self.counters.pushed += self.spec.keys[key].nbytes
        if no_grad:
            self.values(key)[:] = 0

    def wait_key(self, key: int, timeout: float | None = None) -> None:
        self.waited_for.append(self.spec.keys[key].name)
        self._answer()

    def wait(self, timeout: float | None = None) -> None:
        self._answer()
        self._answered = False
        self.counters.steps += 1
        self.pushes.append([])

    def _answer(self) -> None:
        if self._answered:
            return
        self._answered = True
        pushed = [name for name, _ in self.pushes[-1]]
        assert sorted(pushed) == sorted(key.name for key in self.spec.keys)
        self.on_wait(self)
        if self.spec.place == "server":
            self._optimize()

    def _optimize(self) -> None:
        groups: list[dict[str, object]] = [
            {"params": [], **vars(hyper)} for hyper in self.hypers[-1]
        ]
        without = {name for name, no_grad in self.pushes[-1] if no_grad}
        for index, (key, weight) in enumerate(zip(self.spec.keys, self._weights, strict=True)):
            weight.grad = None if key.name in without else torch.tensor(self.values(index))
            groups[key.group]["params"].append(weight)  # type: ignore[attr-defined]
        is_sgd = isinstance(self.hypers[-1][0], SGD)
        optimizer = torch.optim.SGD(groups) if is_sgd else torch.optim.Adam(groups)
        if self._optimizer is not None:
            optimizer.state = self._optimizer.state
        else:
            self._restore(optimizer)
        self._optimizer = optimizer
        optimizer.step()
        self._publish()

    def _restore(self, optimizer: torch.optim.Optimizer) -> None:
        names = ["momentum_buffer"]
        if isinstance(optimizer, torch.optim.Adam):
            names = ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
        for weight, state in zip(self._weights, self.state, strict=True):
            if state.taken == 0:
                continue
            entry = optimizer.state[weight]
            if isinstance(optimizer, torch.optim.Adam):
                entry["step"] = torch.tensor(float(state.taken))
            for name, array in zip(names, state.arrays, strict=False):
                entry[name] = torch.from_numpy(array.copy())

    def _publish(self) -> None:
        if self.spec.shared_model:
            self.result = self._buffers[self.result is self._buffers[0]]
        for key, weight in enumerate(self._weights):
            self.values(key, self.result)[:] = weight.detach().numpy()

    def set_hyper(self, groups: Sequence[Hyper]) -> None:
        assert not self.pushes[-1]
        self.hypers.append(list(groups))

    def close(self) -> None:
        self.closed = True


class StandInSession:
    """See the module.

    Attributes:
        operations: the names of all operations submitted.
        exchanges: all exchanges opened.
        refusal: raised by the next `open_exchange`.
    """

    rank = local_rank = 0
    size = local_size = 1

    def __init__(self) -> None:
        self.config = Config()
        self.operations: list[str] = []
        self.exchanges: list[StandInExchange] = []
        self.refusal: PhubError | None = None
        self.closed = False

    def submit(self, operation: Operation) -> Work:
        self.operations.append(operation.name)
        return DoneWork()

    def open_exchange(self, spec: ExchangeSpec, backend: str | None = None) -> Exchange:
        if self.refusal is not None:
            raise self.refusal
        self.exchanges.append(StandInExchange(spec))
        return self.exchanges[-1]

    def close(self) -> None:
        self.closed = True


def names(keys: Sequence[Key]) -> list[str]:
    return [key.name for key in keys]
