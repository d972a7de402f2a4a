"""Run a function on every rank of a job: as threads of this process, or as processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from functools import partial
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, TypeVar

from phub_collective.backends.base import Context
from phub_collective.config import Config
from phub_collective.rendezvous import LocalRendezvous, StoreRendezvous
from phub_collective.rendezvous.store import StoreServer

Result = TypeVar("Result")
Answers = queue.SimpleQueue[tuple[int, Any, BaseException | None]]


class ThreadRanks:
    """Ranks that are threads and stay: `run` can be called again and again.

    Attributes:
        contexts: the context of each rank.
    """

    def __init__(self, size: int, **settings: Any) -> None:
        config = Config(**settings)
        self.size = size
        self._rendezvous = LocalRendezvous.group(size, config.timeout)
        self.contexts = [
            Context(rank, size, rank, size, self._rendezvous[rank], config) for rank in range(size)
        ]
        self._tasks: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        for rank in range(size):
            tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            self._tasks.append(tasks)
            threading.Thread(
                target=self._serve, args=(tasks,), name=f"rank{rank}", daemon=True
            ).start()

    @staticmethod
    def _serve(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (task := tasks.get()) is not None:
            task()

    def run(self, fn: Callable[..., Result], *args: Any, limit: float = 90.0) -> list[Result]:
        """The results of ``fn(context, *args)`` by rank.

        Raises:
            Exception: the first one raised by any rank, with a note that names the rank.
            TimeoutError: some ranks, which are named, did not return in time.
        """
        answers: Answers = queue.SimpleQueue()

        def task(rank: int) -> None:
            try:
                answers.put((rank, fn(self.contexts[rank], *args), None))
            except BaseException as error:
                answers.put((rank, None, error))
                self._rendezvous[rank].abandon()  # so that the others do not wait for it

        for rank, tasks in enumerate(self._tasks):
            tasks.put(partial(task, rank))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + limit
        while len(results) < self.size:
            try:
                rank, result, error = answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise _too_late(self.size, results, limit) from None
            if error is not None:
                error.add_note(f"raised on rank {rank} of {self.size}")
                _note_others(answers, error)
                raise error
            results[rank] = result
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        for rendezvous, tasks in zip(self._rendezvous, self._tasks, strict=True):
            tasks.put(None)
            rendezvous.close()

    def __enter__(self) -> ThreadRanks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def run_threads(
    size: int, fn: Callable[..., Result], *args: Any, limit: float = 90.0, **settings: Any
) -> list[Result]:
    """One call of ``fn(context, *args)`` on each of `size` threads; see `ThreadRanks.run`."""
    with ThreadRanks(size, **settings) as ranks:
        return ranks.run(fn, *args, limit=limit)


def run_processes(
    size: int,
    fn: Callable[..., Result],
    *args: Any,
    limit: float = 90.0,
    dying: Collection[int] = (),
    **settings: Any,
) -> list[Result | None]:
    """The results of ``fn(context, *args)`` by rank, each rank a fresh process.

    Args:
        fn: a function of a module that a new process can import.
        limit: seconds for all of it.
        dying: ranks that are expected to die; their result is None.
        settings: of `Config`.

    Raises:
        RuntimeError: a rank failed (its traceback is in the text), died, or did not die.
        TimeoutError: some ranks, which are named, did not return in time.
    """
    spawn = multiprocessing.get_context("spawn")
    server = StoreServer()
    pipes: dict[Connection, int] = {}
    processes = []
    try:
        for rank in range(size):
            ours, theirs = spawn.Pipe(duplex=False)
            arguments = (theirs, server.port, server.secret, rank, size, settings, fn, args)
            process = spawn.Process(target=_child, args=arguments, name=f"rank{rank}", daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes[ours] = rank
        return _gather(pipes, limit, dying)
    finally:
        for process in processes:
            process.kill()
            process.join()
        server.close()


def _gather(pipes: dict[Connection, int], limit: float, dying: Collection[int]) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + limit
    while len(results) < len(pipes):
        pending = [pipe for pipe, rank in pipes.items() if rank not in results]
        ready = wait(pending, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise _too_late(len(pipes), results, limit)
        failures = []  # the cause, and what follows from it, may be there at the same time
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes[pipe]
            try:
                result, failure = pipe.recv()
            except EOFError:
                result, failure = None, "died" if rank not in dying else None
            else:
                failure = "did not die" if rank in dying else failure
            if failure is not None:
                failures.append(f"rank {rank} of {len(pipes)} failed: {failure}")
            results[rank] = result
        if failures:
            raise RuntimeError("\n".join(failures))
    return [results[rank] for rank in range(len(pipes))]


def _child(
    pipe: Connection,
    port: int,
    secret: bytes,
    rank: int,
    size: int,
    settings: dict[str, Any],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """What a rank's process does."""
    config = Config(**settings)
    joined = StoreRendezvous([("127.0.0.1", port)], secret, rank, size, config.timeout)
    try:
        with joined as rendezvous:
            context = Context(rank, size, rank, size, rendezvous, config)
            try:
                pipe.send((fn(context, *args), None))
            except BaseException:
                # Before the others see us leave: theirs would only be what follows from it.
                pipe.send((None, traceback.format_exc()))
                raise
    except BaseException:
        sys.exit(1)


def _note_others(answers: Answers, error: BaseException) -> None:
    """The first error to arrive may be the echo of another rank's."""
    with contextlib.suppress(queue.Empty):
        while True:
            rank, _, other = answers.get(timeout=0.2)
            if other is not None:
                error.add_note(f"and on rank {rank}: {other!r}")


def _too_late(size: int, results: dict[int, Any], limit: float) -> TimeoutError:
    missing = sorted(set(range(size)) - results.keys())
    return TimeoutError(f"ranks {missing} of {size} did not return within {limit:g} s")
