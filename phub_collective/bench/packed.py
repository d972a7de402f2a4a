"""The exchange of packed gradients, checked against NumPy twins of what every rank sends."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from phub_collective.backends.base import Backend
from phub_collective.backends.compression import Compression
from phub_collective.bench import pattern
from phub_collective.bench.plan import Workload
from phub_collective.bench.subjects import ExchangeSubject
from phub_collective.kernels.packed_reference import Sender

# Gradients are multiples of this between -1 and 1, so that their sums, and those of what a
# threshold of 1/2 or another power of two leaves of them, are exact.
UNIT = np.float32(2**-8)
# Of a sum of scales, which are any numbers, in the order in which they have come.
ROUNDING = 1e-5


class PackedAllreduce(ExchangeSubject):
    """As allreduce-arena, with gradients that are packed on their way to the server; or cast to 16
    bits, both ways, where a collective reduces them."""

    mode = "allreduce-packed"

    def __init__(
        self,
        backend: Backend,
        work: Workload,
        numbers: pattern.Pattern,
        bucket_bytes: int,
        compression: Compression,
    ) -> None:
        super().__init__(backend, work, numbers, bucket_bytes)
        self.compression = compression

    def open(self) -> None:
        """The twins of packings that treat each element by itself need one period of the pattern;
        the others keep a residual of the whole model for each rank."""
        super().open()
        chunk = self.backend.context.config.chunk_bytes // self.work.dtype.itemsize
        counts = [key.count for key in self.work.keys]
        if self.compression.is_elementwise:
            counts = [self._row(0).size]
        self._senders = [
            [Sender(self.compression, count, chunk) for count in counts]
            for _ in range(self.numbers.ranks)
        ]

    def _row(self, rank: int) -> np.ndarray:
        """One period of this iteration's gradient."""
        row = self.numbers.row(rank, self.iteration) - self.numbers.values // 2
        return row.astype(np.float32) * UNIT

    def _keys(self, memory: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Each key's elements, and the number of the first of them in the pattern."""
        flat = memory.view(np.float32)
        for begin, key in zip(self._begins(), self.work.keys, strict=True):
            yield begin, flat[begin : begin + key.count]

    def _fill(self) -> None:
        row = self._row(self.rank)
        for begin, elements in self._keys(self.exchange.arena):
            pattern.fill(elements, row, begin)

    def check(self) -> int:
        rows = [self._row(rank) for rank in range(self.numbers.ranks)]
        results = list(self._keys(self.exchange.result))
        if self.compression.is_elementwise:
            total = self._total(0, rows)
            return sum(pattern.wrong(got, total, begin) for begin, got in results)
        return sum(self._wrong(index, *one, rows) for index, one in enumerate(results))

    def _wrong(self, index: int, begin: int, got: np.ndarray, rows: list[np.ndarray]) -> int:
        """Wrong elements of a key."""
        gradients = [np.empty_like(got) for _ in rows]
        for gradient, row in zip(gradients, rows, strict=True):
            pattern.fill(gradient, row, begin)
        close = np.abs(got - self._total(index, gradients)) <= ROUNDING
        return int(np.count_nonzero(~close))

    def _total(self, index: int, gradients: list[np.ndarray]) -> np.ndarray:
        """The sum of what arrives of the ranks' gradients."""
        pairs = zip(self._senders, gradients, strict=True)
        arrived = [senders[index].arrives(gradient) for senders, gradient in pairs]
        return np.asarray(np.add.reduce(arrived))

    def arrays(self) -> list[np.ndarray]:
        residuals = [sender.residual for senders in self._senders for sender in senders]
        return [*super().arrays(), *residuals]

    def server_nbytes(self) -> int:
        return 2 * self.work.nbytes  # packed gradients are summed in accumulators on any lane

    def close(self) -> None:
        super().close()
        self._senders.clear()
