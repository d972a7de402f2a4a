"""A whole backend in one short file, as somebody else would write it: everybody gathers all."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import reduce

import numpy as np

from phub_collective.backends.base import Backend, Context, Kind, Operation, ReduceOp, Work
from phub_collective.backends.operations import check, describe
from phub_collective.backends.transfer import Transfer
from phub_collective.errors import DuplicateName, MismatchError, PeerTimeout

FOLDS = dict(zip(ReduceOp, (np.add, np.add, np.minimum, np.maximum, np.multiply), strict=True))


def is_available() -> str | None:
    return None


def create(context: Context) -> Backend:
    return ToyBackend(context)


class ToyBackend(Backend):
    name = "toy"

    def __init__(self, context: Context) -> None:
        self.context = context
        self._threads = ThreadPoolExecutor(256)  # one for each operation in flight
        self._works: dict[str, ToyWork] = {}

    def submit(self, operation: Operation) -> Work:
        check(operation, self.context.size, self.name)
        if operation.name in self._works and not self._works[operation.name].done():
            raise DuplicateName(f"[toy] {operation.name!r} is in flight")
        work = ToyWork(operation.name, self._threads.submit(self._exchange, operation))
        self._works[operation.name] = work
        return work

    def _exchange(self, operation: Operation) -> None:
        transfer = Transfer(operation, self.context.size) if operation.buffer else None
        mine = (
            describe(operation).encode() + b"\n" + (transfer.array.tobytes() if transfer else b"")
        )
        heard = self.context.rendezvous.all_gather(f"toy/{operation.name}", mine)
        said, data = zip(*(one.split(b"\n", 1) for one in heard), strict=True)
        for rank, words in enumerate(said):
            if words != said[self.context.rank]:
                both = f"{said[self.context.rank].decode()} on rank {self.context.rank}"
                raise MismatchError(
                    f"[toy] {operation.name!r}: {both}, {words.decode()} on rank {rank}"
                )
        if transfer is not None:
            arrays = [np.frombuffer(one, transfer.array.dtype) for one in data]
            is_broadcast = operation.kind is Kind.BROADCAST
            result = arrays[operation.root] if is_broadcast else reduce(FOLDS[transfer.op], arrays)
            transfer.array[:] = result
            transfer.finish()

    def close(self) -> None:
        self._threads.shutdown()


class ToyWork:
    def __init__(self, name: str, future: Future[None]) -> None:
        self._name, self._future = name, future

    def done(self) -> bool:
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        if not wait([self._future], timeout).done:
            raise PeerTimeout(f"[toy] {self._name!r}")
        self._future.result()
