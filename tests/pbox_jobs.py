"""Jobs on a PBox in this process, for tests: real sockets and lanes, ranks as threads."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from typing import Any, TypeVar, cast

import numpy as np

from phub_collective.backends.base import (
    SGD,
    Buffer,
    Context,
    DType,
    ExchangeSpec,
    Key,
    Kind,
    Operation,
    ReduceOp,
)
from phub_collective.backends.pbox.backend import PboxBackend
from phub_collective.backends.pbox.connection import Connection
from phub_collective.backends.pbox.exchange import PboxExchange
from phub_collective.backends.pbox.handshake import invitations
from phub_collective.backends.pbox.server import PBoxServer, ServerOptions
from phub_collective.backends.pbox.service import Service, create_service
from phub_collective.config import Config
from phub_collective.errors import PhubError

T = TypeVar("T")
SOON = 30.0  # seconds, for what must happen
LANES = ("shm", "tcp")


def together(size: int, act: Callable[[int], T], seconds: float = 60.0) -> list[T]:
    """``act(rank)`` on `size` threads at once; the results in rank order.

    Raises:
        Exception: the first one of the lowest rank that failed.
        TimeoutError: some ranks, which are named, did not return in time.
    """
    pool = ThreadPoolExecutor(size)
    deadline = time.monotonic() + seconds
    running = [pool.submit(act, rank) for rank in range(size)]
    try:
        for one in running:
            with contextlib.suppress(Exception):
                one.result(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, one in enumerate(running) if not one.done()]
        if late:
            raise TimeoutError(f"ranks {late} of {size} did not return within {seconds:g} s")
        return [one.result() for one in running]
    finally:
        pool.shutdown(wait=False)


def outcomes(size: int, act: Callable[[int], object], seconds: float = 60.0) -> list[PhubError]:
    """The typed error that `act` raises on each rank; fails when a rank raises none."""

    def error_of(rank: int) -> PhubError:
        try:
            act(rank)
        except PhubError as error:
            return error
        raise AssertionError(f"rank {rank} raised no error")

    return together(size, error_of, seconds)


def until(condition: Callable[[], bool], what: str, seconds: float = SOON) -> None:
    """Wait for something that nobody signals."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.005)


class Box:
    """A PBox in this process."""

    def __init__(self, **options: Any) -> None:
        self.server = PBoxServer(ServerOptions(**{"cores": 2, **options}))
        host, port = self.server.addresses[0]
        self.address = f"{host}:{port}"
        self._jobs = 0

    def job(self, size: int, lane: str = "auto", chunk_bytes: int = 32 << 10, **config: Any) -> Job:
        """A new job; nobody is connected yet."""
        return sharded_job([self], size, lane, chunk_bytes, **config)

    def new_name(self) -> str:
        """Of a job."""
        self._jobs += 1
        return f"job{self._jobs}"

    def wait_until_idle(self) -> None:
        """All jobs are over."""
        until(lambda: not self.server.jobs(), "jobs did not end")


@contextlib.contextmanager
def box(**options: Any) -> Iterator[Box]:
    """A PBox, closed at the end."""
    made = Box(**options)
    try:
        yield made
    finally:
        made.server.close()


def sharded_job(
    boxes: Sequence[Box],
    size: int,
    lane: str = "auto",
    chunk_bytes: int = 32 << 10,
    **config: Any,
) -> Job:
    """A new job whose chunks these PBoxes share; nobody is connected yet."""
    address, name = ",".join(box.address for box in boxes), boxes[0].new_name()
    token = create_service(address, name, size, chunk_bytes)
    return Job(address, name, token, size, Config(lane=lane, **config))


def hang_up(connection: Connection) -> None:
    """Break a rank's control connection to its (first) PBox."""
    connection._controls[0]._sock.shutdown(socket.SHUT_RDWR)


@dataclasses.dataclass
class Job:
    """What is needed to join a job."""

    address: str
    name: str
    token: str
    size: int
    config: Config

    def connect(self, rank: int) -> Connection:
        return Connection(invitations(self.address, self.name, self.token), rank, self.config)

    def service(self, rank: int) -> Service:
        return Service(self.connect(rank))

    def services(self) -> list[Service]:
        """All ranks, connected."""
        return together(self.size, self.service)

    def backend(self, rank: int) -> PboxBackend:
        """A rank's backend, without the rendezvous through which ranks find the PBox."""
        context = Context(rank, self.size, rank, self.size, cast(Any, None), self.config)
        return PboxBackend("pbox", context, self.connect(rank), None)

    def exchange(self, rank: int, spec: ExchangeSpec) -> Model:
        return Model(self.connect(rank), spec)


class Model:
    """One rank's exchange of a model, with NumPy views of its keys."""

    def __init__(self, connection: Connection, spec: ExchangeSpec) -> None:
        self.connection, self.spec = connection, spec
        try:
            self.exchange = PboxExchange(connection, spec, connection.chunk_bytes)
        except BaseException:
            connection.close()
            raise

    def view(self, key: int, result: bool = False) -> np.ndarray:
        """A key in the arena, or in the result; bfloat16 as uint16."""
        spec, begin = self.spec.keys[key], self.exchange.offsets[key]
        memory = self.exchange.result if result else self.exchange.arena
        dtype = np.uint16 if spec.dtype is DType.BFLOAT16 else np.dtype(spec.dtype.name.lower())
        return memory[begin : begin + spec.nbytes].view(dtype).reshape(spec.shape)

    def results(self) -> list[np.ndarray]:
        """Copies of all keys of the result."""
        return [self.view(key, result=True).copy() for key in range(len(self.spec.keys))]

    def initialize(self, weights: list[np.ndarray], root: int = 0) -> list[np.ndarray]:
        for key, weight in enumerate(weights):
            self.view(key)[...] = weight
        self.exchange.initialize(root)
        return self.results()

    def step(self, gradients: list[np.ndarray | None]) -> list[np.ndarray]:
        """Push all keys (None: no gradient) and wait."""
        for key, gradient in enumerate(gradients):
            if gradient is not None:
                self.view(key)[...] = gradient
            self.exchange.push(key, no_grad=gradient is None)
        self.exchange.wait(SOON)
        return self.results()

    def close(self) -> None:
        self.exchange.close()
        self.connection.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def spec_of(
    shapes: list[tuple[int, ...]],
    dtype: DType = DType.FLOAT32,
    groups: list[int] | None = None,
    name: str = "model",
    **fields: Any,
) -> ExchangeSpec:
    """The exchange of a model with these shapes."""
    keys = [
        Key(f"p{index}", shape, dtype, group=groups[index] if groups else 0)
        for index, shape in enumerate(shapes)
    ]
    return ExchangeSpec(name, keys, **{"op": ReduceOp.AVERAGE, **fields})


def allreduce(name: str, *values: float) -> Operation:
    """The sum of a few numbers."""
    return Operation(Kind.ALLREDUCE, name, Buffer.of(np.array(values, np.float32)))


class Bystander:
    """A job of two ranks that trains while something else happens, and checks every weight."""

    SHAPE = (300, 40)

    def __init__(self, box: Box, lane: str = "tcp") -> None:
        job = box.job(2, lane)
        self._services = job.services()
        self._stop = threading.Event()
        self.steps = 0
        optimizer = SGD(lr=0.5)
        zeros = {"w": np.zeros(self.SHAPE, np.float32)}
        together(2, lambda rank: self._services[rank].init(zeros, optimizer))
        self._pool = ThreadPoolExecutor(1)
        self._training = self._pool.submit(self._train)

    def _train(self) -> None:
        weights = np.zeros(self.SHAPE, np.float32)
        while not self._stop.is_set():
            gradients = [np.full(self.SHAPE, self.steps % 7 + rank, np.float32) for rank in (0, 1)]
            for service, gradient in zip(self._services, gradients, strict=True):
                service.push("w", gradient)
            weights -= np.float32(0.5) * (gradients[0] + gradients[1]) * np.float32(0.5)
            for service in self._services:
                np.testing.assert_array_equal(service.pull("w", SOON), weights)
            self.steps += 1
            self._stop.wait(0.002)  # leaves the processors to the test

    def finish(self) -> None:
        """Stop; raises what went wrong."""
        before = self.steps
        until(lambda: self.steps > before or self._training.done(), "the bystander stands still")
        self._stop.set()
        try:
            self._training.result(SOON)
        except Late:
            raise TimeoutError("the bystander did not finish") from None
        for service in self._services:
            service.close()
        self._pool.shutdown()


@contextlib.contextmanager
def bystander(box: Box, lane: str = "tcp") -> Iterator[Bystander]:
    """See `Bystander`; checked at the end."""
    made = Bystander(box, lane)
    yield made
    made.finish()
