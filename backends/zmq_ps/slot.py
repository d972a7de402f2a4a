"""The aggregation of one piece of one key, array by array as they come."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from phub_collective.backends.base import SGD, DType, ReduceOp
from phub_collective.backends.native import load
from phub_collective.backends.zmq_ps.threads import Threads
from phub_collective.backends.zmq_ps.weights import Weights, agreed
from phub_collective.backends.zmq_ps.wire import Flag, Header
from phub_collective.errors import ConfigError, ProtocolError


class Slot:
    """As MXNet does it: the first array is copied, every further one is added, each by all threads
    as soon as it is there; so what waits for a slow worker is one sum, not an array per worker.

    The sum is also what is sent as the answer, so two buffers take turns: a worker may still be
    receiving the answer to one step when others push the next. None is two steps ahead of it, since
    a worker pushes only after its answer, and an answer needs the pushes of all.

    Attributes:
        step: how many answers there were.
        arrived: the ranks that have pushed since the last one.
        giver: the last rank whose push had a payload.
    """

    def __init__(self, workers: int, threads: Threads) -> None:
        self.step = 0
        self.arrived: set[int] = set()
        self.giver = -1
        self._workers, self._threads = workers, threads
        self._kernels = load().kernels
        self._recipe = Header(0)
        self._given = 0  # arrays in the sum
        self._reserved = (DType.UINT8, -1)  # what the buffers are for
        self._answers: list[np.ndarray | None] = [None, None]
        self._wide: np.ndarray | None = None  # a sum that is not sent itself
        self._weights: Weights | None = None

    def add(self, rank: int, header: Header, payload: np.ndarray | None) -> bool:
        """Take a rank's push; `payload` is not used after it. True: it was the last one.

        Raises:
            ProtocolError: it does not fit to what the others pushed.
        """
        self._check(rank, header, payload)
        if not self.arrived:
            self._begin(header)
        elif header.recipe() != self._recipe:
            raise ProtocolError(
                f"[zmq_ps] rank {rank} pushed {header.recipe()}, rank {min(self.arrived)} pushed "
                f"{self._recipe}, as one piece"
            )
        self.arrived.add(rank)
        if payload is not None:
            self.giver = rank
            self._fold(payload)
        return len(self.arrived) == self._workers

    def _check(self, rank: int, header: Header, payload: np.ndarray | None) -> None:
        if rank in self.arrived or header.step != self.step:
            raise ProtocolError(
                f"[zmq_ps] rank {rank} pushed for step {header.step} of table {header.table}, "
                f"expected one push for step {self.step}"
            )
        empty = bool(header.flags & Flag.EMPTY)
        nbytes = 0 if payload is None else payload.size
        if empty != (payload is None) or not (empty or nbytes == header.nbytes):
            raise ProtocolError(
                f"[zmq_ps] rank {rank} pushed {nbytes} bytes as a piece of {header.nbytes} "
                f"(flags {header.flags})"
            )
        if header.flags & Flag.ADOPT and self._given and not empty:
            raise ProtocolError(f"[zmq_ps] rank {rank} is not the only root")

    def _begin(self, header: Header) -> None:
        try:
            dtype, op = DType(header.dtype), ReduceOp(header.op)
        except ValueError as error:
            raise ProtocolError(f"[zmq_ps] a push of no known type: {error}") from None
        self._recipe = header.recipe()
        self._dtype, self._op = dtype, op
        self._optimize = bool(header.flags & Flag.OPTIMIZE)
        self._count = header.nbytes // dtype.itemsize
        if self._reserved != (dtype, header.nbytes):
            self._reserved = (dtype, header.nbytes)
            self._answers, self._wide, self._weights = [None, None], None, None

    @property
    def _itemsize(self) -> int:
        """Of an element of the sum: 16-bit floats are summed in single precision."""
        return max(4, self._dtype.itemsize) if self._dtype.is_floating else self._dtype.itemsize

    @property
    def _answer(self) -> np.ndarray:
        """What this step's answer is sent from."""
        found = self._answers[self.step % 2]
        if found is None:
            found = self._answers[self.step % 2] = np.empty(self._recipe.nbytes, np.uint8)
        return found

    @property
    def _sum(self) -> np.ndarray:
        if not self._optimize and self._itemsize == self._dtype.itemsize:
            return self._answer
        if self._wide is None:
            self._wide = np.empty(self._count * self._itemsize, np.uint8)
        return self._wide

    def _fold(self, payload: np.ndarray) -> None:
        total, first = self._sum, self._given == 0
        self._given += 1
        scale = self._kernels.Scale(pre=self._recipe.prescale)
        wide, size = self._itemsize, self._dtype.itemsize

        def work(begin: int, end: int) -> None:
            self._kernels.fold(
                self._dtype,
                self._op,
                total[begin * wide : end * wide],
                payload[begin * size : end * size],
                first,
                scale,
            )

        self._threads.run(self._count, wide, work)

    def finish(self, hypers: Mapping[int, SGD]) -> np.ndarray:
        """The answer, as bytes of the piece's type; it stands until the answer after the next one
        is begun. The slot is ready for the next step.

        Args:
            hypers: by rank, the hyperparameters of the piece's group.

        Raises:
            ConfigError: there are no weights to optimize.
            ProtocolError: no rank gave what all shall adopt.
            MismatchError: ranks have set different hyperparameters.
        """
        answer = self._step_weights(hypers) if self._optimize else self._reduced()
        self.step += 1
        self.arrived.clear()
        self._given = 0
        return answer

    def _reduced(self) -> np.ndarray:
        total, answer, size, wide = self._sum, self._answer, self._dtype.itemsize, self._itemsize
        if not self._given:
            answer.fill(0)
            return answer
        post, divisor = self._factors()
        if total is answer and (post, divisor) == (1.0, 1):
            return answer
        scale = self._kernels.Scale(post=post, divisor=divisor)

        def work(begin: int, end: int) -> None:
            self._kernels.finish(
                self._dtype,
                self._op,
                answer[begin * size : end * size],
                total[begin * wide : end * wide],
                scale,
            )

        self._threads.run(self._count, wide, work)
        return answer

    def _factors(self) -> tuple[float, int]:
        """What the sum is multiplied with, and (an average of integers) divided by."""
        if self._op is not ReduceOp.AVERAGE:
            return self._recipe.postscale, 1
        return self._recipe.postscale / self._workers, self._workers

    def _step_weights(self, hypers: Mapping[int, SGD]) -> np.ndarray:
        if self._recipe.flags & Flag.ADOPT:
            if not self._given:
                raise ProtocolError("[zmq_ps] no rank was the root of the weights")
            if self._weights is None:
                self._weights = Weights(self._dtype, self._count, self._threads)
            return self._weights.adopt(self._sum)
        if self._weights is None:
            raise ConfigError(
                "[zmq_ps] a gradient came before weights; call initialize() before the first step"
            )
        hyper = agreed(hypers, self._workers)
        if not self._given:
            return self._weights.answer
        return self._weights.step(self._sum, hyper, self._factors()[0])
