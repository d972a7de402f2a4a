"""What is timed: one backend exchanging one workload in one mode, with numbers that are checked.

Each class says in its docstring what lies between the start and the end of a timing.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from phub_collective.backends.base import (
    SGD,
    Backend,
    Buffer,
    DType,
    Exchange,
    ExchangeSpec,
    Kind,
    Operation,
    ReduceOp,
    layout,
)
from phub_collective.backends.compression import NO_COMPRESSION
from phub_collective.bench import pattern
from phub_collective.bench.header import lane_of
from phub_collective.bench.plan import Workload
from phub_collective.errors import BackendUnavailable

# Both are exact on integers; a momentum below 1 would need more and more fractional bits.
HYPER = SGD(lr=1.0, momentum=1.0)


def typed(memory: np.ndarray, dtype: DType) -> np.ndarray:
    """1-D uint8 memory as elements of `dtype` (bfloat16 as uint16)."""
    return Buffer(memory, dtype).array()


class Subject(abc.ABC):
    """Life: open, then per iteration prepare, run (the timed part), check, at last close."""

    mode: str

    def __init__(self, backend: Backend, work: Workload, numbers: pattern.Pattern) -> None:
        self.backend, self.work, self.numbers = backend, work, numbers
        self.rank = backend.context.rank
        self.iteration = -1

    @abc.abstractmethod
    def open(self) -> None: ...

    def prepare(self) -> None:
        """Write this rank's numbers of the next iteration where the exchange takes them."""
        self.iteration += 1
        self._fill()

    @abc.abstractmethod
    def _fill(self) -> None: ...

    @abc.abstractmethod
    def run(self) -> None: ...

    @abc.abstractmethod
    def check(self) -> int:
        """Number of wrong elements of this iteration's result on this rank; all are compared."""

    def arrays(self) -> list[np.ndarray]:
        """The model's own arrays in this process that opening made."""
        return []

    def job_nbytes(self, ranks: int, shared: int) -> int:
        """Bytes of all ranks' `arrays` in shared memory, each counted once; `shared`: of one
        rank."""
        return ranks * shared

    def server_nbytes(self) -> int:
        """Bytes of the model's own arrays that only a server keeps in this mode: the optimizer's,
        and accumulators where gradients arrive over a network. In shared memory those of an
        arena are summed where they stand, unless several servers share the work. Where the sum
        itself is the answer there are two accumulators: one is sent while the next step is summed
        in the other."""
        return 0 if self._over_shm() else 2 * self.work.nbytes

    def _over_shm(self) -> bool:
        servers = getattr(self.backend, "server_pids", ())
        lane = lane_of(self.backend.name, self.backend.context.config.lane)
        return lane != "tcp" and len(servers) < 2

    def close(self) -> None:
        return None


class FlatAllreduce(Subject):
    """From a private tensor to the sum in that same tensor: submit, wait. One operation for the
    whole workload, or one per key, all in flight together."""

    mode = "allreduce"

    def __init__(
        self,
        backend: Backend,
        work: Workload,
        numbers: pattern.Pattern,
        tensor: np.ndarray,
        per_key: bool,
    ) -> None:
        super().__init__(backend, work, numbers)
        self._tensor, self._per_key = tensor, per_key

    def open(self) -> None:
        lengths = [k.nbytes for k in self.work.keys] if self._per_key else [self.work.nbytes]
        ends = np.cumsum(lengths)
        self._operations = [
            Operation(
                Kind.ALLREDUCE,
                f"bench/flat.{index}",
                Buffer(self._tensor[end - length : end], self.work.dtype),
                ReduceOp.SUM,
            )
            for index, (length, end) in enumerate(zip(lengths, ends, strict=True))
        ]

    def server_nbytes(self) -> int:
        return 2 * self.work.nbytes  # a private tensor is summed in accumulators on any lane

    def _fill(self) -> None:
        row = self.numbers.row(self.rank, self.iteration)
        pattern.fill(typed(self._tensor, self.work.dtype), self.numbers.encode(row))

    def run(self) -> None:
        works = [self.backend.submit(operation) for operation in self._operations]
        for work in works:
            work.wait()

    def check(self) -> int:
        expected = self.numbers.encode(self.numbers.total(self.iteration))
        return pattern.wrong(typed(self._tensor, self.work.dtype), expected)


class ExchangeSubject(Subject):
    """What the subjects over `Backend.open_exchange` share: the arena and its keys."""

    exchange: Exchange
    place = "worker"
    shared_model = False
    compression = NO_COMPRESSION

    def __init__(
        self, backend: Backend, work: Workload, numbers: pattern.Pattern, bucket_bytes: int
    ) -> None:
        super().__init__(backend, work, numbers)
        self._bucket_bytes = bucket_bytes
        self._order = list(reversed(range(len(work.keys))))  # as backward makes gradients

    def open(self) -> None:
        spec = ExchangeSpec(
            f"bench/{self.mode}",
            self.work.keys,
            ReduceOp.SUM,
            self.place,
            self.shared_model,
            self._bucket_bytes,
            compression=self.compression,
        )
        self.exchange = self.backend.open_exchange(spec)
        self._results = {_address(self.exchange.result): self.exchange.result}

    def _fill_keys(self, memory: np.ndarray, row: np.ndarray) -> None:
        encoded, flat = self.numbers.encode(row), typed(memory, self.work.dtype)
        for begin, key in zip(self._begins(), self.work.keys, strict=True):
            pattern.fill(flat[begin : begin + key.count], encoded, begin)

    def _wrong_keys(self, memory: np.ndarray, row: np.ndarray) -> int:
        encoded, flat = self.numbers.encode(row), typed(memory, self.work.dtype)
        return sum(
            pattern.wrong(flat[begin : begin + key.count], encoded, begin)
            for begin, key in zip(self._begins(), self.work.keys, strict=True)
        )

    def _begins(self) -> list[int]:
        return [offset // self.work.dtype.itemsize for offset in self.exchange.offsets]

    def run(self) -> None:
        for key in self._order:
            self.exchange.push(key)
        self.exchange.wait()

    def arrays(self) -> list[np.ndarray]:
        self._results[_address(self.exchange.result)] = self.exchange.result
        return list({_address(self.exchange.arena): self.exchange.arena, **self._results}.values())

    def close(self) -> None:
        self.exchange.close()
        del self.exchange
        self._results.clear()


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


class ArenaAllreduce(ExchangeSubject):
    """Gradients stand in the registered arena: push every key, wait; the sums stand there too."""

    mode = "allreduce-arena"

    def _fill(self) -> None:
        self._fill_keys(self.exchange.arena, self.numbers.row(self.rank, self.iteration))

    def check(self) -> int:
        return self._wrong_keys(self.exchange.result, self.numbers.total(self.iteration))


class Reference:
    """The exact weights of SGD (HYPER) over the pattern, as int64 rows."""

    # Gradients change sign with this period, so that weights stay small: momentum 1 adds up.
    SIGNS = (1, -1, -1, 1)

    def __init__(self, numbers: pattern.Pattern) -> None:
        self._numbers = numbers
        self.weights = self.initial(0)
        self.momentum = np.zeros_like(self.weights)

    def initial(self, rank: int) -> np.ndarray:
        """What a rank holds before the weights of rank 0 are distributed."""
        return self._numbers.row(rank, -1)

    def gradient(self, rank: int, iteration: int) -> np.ndarray:
        return self.SIGNS[iteration % 4] * self._numbers.row(rank, iteration)

    def step(self, iteration: int) -> None:
        self.momentum = self.momentum + self.SIGNS[iteration % 4] * self._numbers.total(iteration)
        self.weights = self.weights - self.momentum


class ServerOptimizer(ExchangeSubject):
    """Push every key's gradient from the arena, wait; the server steps and the new weights stand
    in the arena."""

    mode = "server-optimizer"
    place = "server"

    def open(self) -> None:
        super().open()
        self._reference = Reference(self.numbers)
        self._fill_keys(self.exchange.arena, self._reference.initial(self.rank))
        self.exchange.initialize(0)
        self.exchange.set_hyper([HYPER])

    def _fill(self) -> None:
        gradient = self._reference.gradient(self.rank, self.iteration)
        self._fill_keys(self.exchange.arena, gradient)

    def check(self) -> int:
        self._reference.step(self.iteration)
        self.arrays()  # notes where this step's weights stand
        return self._wrong_keys(self.exchange.result, self._reference.weights)

    def server_nbytes(self) -> int:
        return (2 if self._over_shm() else 3) * self.work.nbytes  # weights, momentum, accumulators


class SharedModel(ServerOptimizer):
    """As server-optimizer, but the workers read the new weights where the core wrote them."""

    mode = "shared-model"
    shared_model = True

    def job_nbytes(self, ranks: int, shared: int) -> int:
        arena = int(self.exchange.arena.nbytes)
        return ranks * arena + (shared - arena)  # all ranks see the same weights

    def server_nbytes(self) -> int:
        return self.work.nbytes  # momentum; the weights are among `arrays`


class WorkerSgd:
    """One worker's weights, momentum and torch's fused SGD, over the whole arena as one tensor.
    All subjects of a worker use the same one in turn and set its state before each step."""

    def __init__(self, work: Workload) -> None:
        try:
            import torch
        except ImportError:
            raise BackendUnavailable(
                "[bench] these modes step with torch's fused SGD where a backend runs no "
                "optimizer; pip install 'phub-collective[torch]'"
            ) from None
        _, size = layout(work.keys)
        self.weights, self.momentum = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
        for memory in (self.weights, self.momentum):
            memory.fill(0)  # touches it: its memory is not the exchange's
        self._tensor: Any = lambda memory: torch.from_numpy(memory.view(np.float32))
        self._parameter = torch.nn.Parameter(self._tensor(self.weights))
        self._optimizer = torch.optim.SGD(
            [self._parameter], lr=HYPER.lr, momentum=HYPER.momentum, fused=True
        )
        state = self._optimizer.state[self._parameter]
        state["momentum_buffer"] = self._tensor(self.momentum)

    def step(self, gradient: np.ndarray) -> None:
        """`gradient`: uint8 memory of the arena's size."""
        self._parameter.grad = self._tensor(gradient)
        self._optimizer.step()


class WorkerOptimizer(ExchangeSubject):
    """The like of server-optimizer for a backend that only reduces: push every key, wait, then
    this worker's fused SGD steps over the whole model."""

    mode = "server-optimizer"

    def __init__(
        self,
        backend: Backend,
        work: Workload,
        numbers: pattern.Pattern,
        bucket_bytes: int,
        sgd: WorkerSgd,
    ) -> None:
        super().__init__(backend, work, numbers, bucket_bytes)
        self._sgd, self._reference = sgd, Reference(numbers)

    def _fill(self) -> None:
        self._fill_keys(self._sgd.weights, self._reference.weights)
        self._fill_keys(self._sgd.momentum, self._reference.momentum)
        gradient = self._reference.gradient(self.rank, self.iteration)
        self._fill_keys(self.exchange.arena, gradient)

    def run(self) -> None:
        super().run()
        self._sgd.step(self.exchange.result)

    def check(self) -> int:
        self._reference.step(self.iteration)
        return self._wrong_keys(self._sgd.weights, self._reference.weights)
