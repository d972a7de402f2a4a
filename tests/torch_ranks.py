"""Ranks of the torch face: processes that stay, forked from one that has imported torch, which is
the slow part."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from phub_collective.rendezvous.identity import LAUNCH_VARIABLES
from phub_collective.rendezvous.store import StoreServer

START_S = 60.0
END_S = 20.0


class TorchRanks:
    """A job of `size` processes, each of which has called ``hvd.init(**settings)``."""

    def __init__(self, size: int, **settings: Any) -> None:
        fork = multiprocessing.get_context("forkserver")
        fork.set_forkserver_preload(["torch._dynamo", "phub_collective.torch"])
        self.size = size
        self._store = StoreServer()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = fork.Pipe()
            values = (f"127.0.0.1:{self._store.port}", self._store.secret.hex(), rank, size)
            environ = dict(zip(LAUNCH_VARIABLES, map(str, (*values, rank, size)), strict=True))
            process = fork.Process(
                target=_serve, args=(theirs, environ, settings), name=f"rank{rank}", daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._collect(START_S, ())

    def run(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, dying: Collection[int] = ()
    ) -> list[Any]:
        """The results of ``fn(*args)`` by rank.

        Args:
            fn: a function of a module that a new process can import.
            dying: ranks that are expected to die; their result is None.

        Raises:
            RuntimeError: a rank failed (its traceback is in the text) or died.
            TimeoutError: some ranks, which are named, did not return in time.
        """
        for pipe in self._pipes:
            pipe.send((fn, args))
        return self._collect(timeout, dying)

    def _collect(self, timeout: float, dying: Collection[int]) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[str] = []
        deadline = time.monotonic() + timeout
        while len(results) < self.size:
            pending = [pipe for rank, pipe in enumerate(self._pipes) if rank not in results]
            for pipe in wait(pending, max(0.0, deadline - time.monotonic())):
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                try:
                    results[rank], failure = pipe.recv()
                except EOFError:
                    results[rank], failure = None, None if rank in dying else "it died"
                if failure is not None:
                    failures.append(f"rank {rank} of {self.size} failed: {failure}")
            if time.monotonic() > deadline:
                missing = sorted(set(range(self.size)) - results.keys())
                failures.append(f"ranks {missing} did not return within {timeout:g} s")
                raise TimeoutError("\n".join(failures))
        if failures:
            raise RuntimeError("\n".join(failures))
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # which ends them
        for process in self._processes:
            process.join(END_S)
            process.kill()
            process.join()
        self._store.close()

    def __enter__(self) -> TorchRanks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _serve(pipe: Connection, environ: dict[str, str], settings: dict[str, Any]) -> None:
    """What a rank's process does: answer calls until the pipe is closed."""
    os.environ.update(environ)
    import torch

    import phub_collective.torch as hvd

    torch.set_num_threads(1)

    def init() -> None:
        hvd.init(**settings)

    task: tuple[Callable[..., Any], tuple[Any, ...]] = (init, ())
    while True:
        fn, args = task
        try:
            pipe.send((fn(*args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))
        try:
            task = pipe.recv()
        except EOFError:
            break
    hvd.shutdown()
