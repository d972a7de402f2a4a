"""The optimizer's part of a piece: weights and momentum on the server, and the rule."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from phub_collective.backends.base import SGD, DType
from phub_collective.backends.native import load
from phub_collective.backends.zmq_ps.threads import Threads
from phub_collective.errors import MismatchError


class Weights:
    """16-bit weights have a master in single precision.

    Attributes:
        answer: the weights as bytes of the piece's type. They change when all workers have pushed
            again, so all have received them before.
    """

    def __init__(self, dtype: DType, count: int, threads: Threads) -> None:
        self._kernels = load().kernels
        self._dtype, self._count, self._threads = dtype, count, threads
        self._itemsize = max(4, dtype.itemsize)
        self._master = np.empty(count * self._itemsize, np.uint8)
        self._momentum: np.ndarray | None = None
        has_own_type = self._itemsize == dtype.itemsize
        self.answer = self._master if has_own_type else np.empty(count * 2, np.uint8)

    def adopt(self, values: np.ndarray) -> np.ndarray:
        """Take `values`, in the master's type, as the weights; the momentum stays."""
        self._master[:] = values
        if self.answer is not self._master:
            self._kernels.finish(self._dtype, 0, self.answer, self._master)
        return self.answer

    def step(self, gradient: np.ndarray, hyper: SGD, scale: float) -> np.ndarray:
        """One step of SGD by all threads, with ``scale * gradient`` (of the master's type)."""
        params = self._kernels.SgdParams(**vars(hyper))
        first = self._momentum is None
        if first and hyper.momentum != 0.0:
            self._momentum = np.empty_like(self._master)
        state = [] if self._momentum is None or hyper.momentum == 0.0 else [self._momentum]
        factor = self._kernels.Scale(post=scale)
        wide, size = self._itemsize, self._dtype.itemsize

        def work(begin: int, end: int) -> None:
            part = slice(begin * wide, end * wide)
            weights = self._master[part]
            copies = [] if size == wide else [self.answer[begin * size : end * size]]
            self._kernels.step(
                self._dtype,
                params,
                weights,
                weights,
                [array[part] for array in state],
                copies,
                gradient[part],
                factor,
                0 if first else 1,
            )

        self._threads.run(self._count, wide, work)
        return self.answer


def agreed(hypers: Mapping[int, SGD], workers: int) -> SGD:
    """The hyperparameters that all ranks have set; MismatchError, naming both sides, if not."""
    for rank in range(workers):
        if hypers.get(rank) != hypers.get(0):
            raise MismatchError(
                f"[zmq_ps] hyperparameters differ: {_said(hypers, 0)}, {_said(hypers, rank)}; set "
                "the same on all ranks before a step's first push"
            )
    if 0 not in hypers:
        raise MismatchError(f"[zmq_ps] {_said(hypers, 0)}, nor has any other rank")
    return hypers[0]


def _said(hypers: Mapping[int, SGD], rank: int) -> str:
    if rank not in hypers:
        return f"rank {rank} has not set hyperparameters"
    values = " ".join(f"{name} {value}" for name, value in vars(hypers[rank]).items())
    return f"rank {rank} has {values}"
