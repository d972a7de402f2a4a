"""One rank's part in a job: its backends, and the choice between them.

Several sessions may live in one process, also as ranks of one job; nothing is process-wide.
"""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType
from typing import Any

from phub_collective import backends
from phub_collective.backends.base import (
    Backend,
    Context,
    Exchange,
    ExchangeSpec,
    Operation,
    Work,
)
from phub_collective.config import Config
from phub_collective.errors import ConfigError, PhubError
from phub_collective.rendezvous import topology
from phub_collective.selection.rules import AUTO
from phub_collective.selection.selector import Selector


class Session:
    """Thread-safe, but what is said to be collective must come in one order on all ranks.

    Attributes:
        context, config: what the backends are given.
        selector: the rules and, once something was chosen, the decision table.
    """

    def __init__(self, context: Context) -> None:
        self.context, self.config = context, context.config
        self.rank, self.size = context.rank, context.size
        self.local_rank, self.local_size = context.local_rank, context.local_size
        self.selector = Selector(context)
        self._lock = threading.RLock()
        # guarded by _lock
        self._backends: dict[str, Backend] = {}
        self._of_name: dict[str, Backend] = {}  # only where there is a choice
        self._only: Backend | None = None  # the one that every choice ends with
        self._prepared = False
        self._closed = False

    @staticmethod
    def open(config: Config | None = None, **overrides: Any) -> Session:
        """Meet the other ranks. Collective.

        Args:
            config: None: from the environment, where `overrides` win.

        Raises:
            ConfigError, BackendUnavailable, AuthError, PeerLost, PeerTimeout: see
            `topology.connect`.
        """
        config = Config.from_environment(**overrides) if config is None else config
        identity, rendezvous = topology.connect(config)
        try:
            return Session(
                Context(
                    identity.rank,
                    identity.size,
                    identity.local_rank,
                    identity.local_size,
                    rendezvous,
                    config,
                )
            )
        except BaseException:
            rendezvous.close()
            raise

    def backend(self, name: str) -> Backend:
        """The backend of this name, connected at its first use, which is collective.

        Raises:
            ConfigError: there is no such backend.
            BackendUnavailable: it cannot be used here.
        """
        with self._lock:
            self._check_open()
            if name not in self._backends:
                self._backends[name] = backends.create(name, self.context)
            return self._backends[name]

    def prepare(self, fresh: bool = False) -> None:
        """Connect what may be chosen, after a measurement where that is needed. Collective, and
        done by the first `choose`, `submit` or `open_exchange`.

        Args:
            fresh: measure, whatever is cached.
        """
        with self._lock:
            self._check_open()
            if self._prepared:
                return
            before = set(self._backends)
            chosen = self.selector.prepare(self.backend, fresh)
            for name in chosen:
                self.backend(name)
            for name in [n for n in self._backends if n not in before and n not in chosen]:
                self._backends.pop(name).close()
            self._only = self.backend(chosen[0]) if len(chosen) == 1 else None
            self._prepared = True

    def choose(self, nbytes: int, server_optimizer: bool = False) -> Backend:
        """The backend for so many bytes by PHUB_BACKEND; equal on all ranks for equal arguments.

        Args:
            server_optimizer: it must be able to run the optimizer, whatever it costs.

        Raises:
            ConfigError: none of those that PHUB_BACKEND allows can run the optimizer.
        """
        if server_optimizer:
            return self._with_optimizer()
        with self._lock:
            self.prepare()
            return self._only or self.backend(self.selector.choose(nbytes))

    def submit(self, operation: Operation) -> Work:
        """Start an operation on the backend for its size. A name stays with the backend of its
        first use, so that its uses meet in one place."""
        with self._lock:
            self.prepare()
            backend = self._only or self._of_name.get(operation.name)
            if backend is None:
                nbytes = 0 if operation.buffer is None else int(operation.buffer.bytes.size)
                backend = self._of_name[operation.name] = self.choose(nbytes)
        return backend.submit(operation)

    def open_exchange(self, spec: ExchangeSpec, backend: str | None = None) -> Exchange:
        """Register a model with `backend`, or with the one for its size. Collective."""
        if backend is not None and backend != AUTO:
            return self.backend(backend).open_exchange(spec)
        nbytes = sum(key.nbytes for key in spec.keys)
        return self.choose(nbytes, spec.place == "server").open_exchange(spec)

    def close(self) -> None:
        """Close all backends and leave the job; idempotent. Collective in the sense that the
        others can do no more without this rank."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            opened = list(self._backends.values())
        with contextlib.ExitStack() as stack:  # all of it, also when one fails
            stack.callback(self.context.rendezvous.close)
            for backend in opened:
                stack.callback(backend.close)

    def _with_optimizer(self) -> Backend:
        rules = self.selector.rules
        names = dict.fromkeys([*rules.forced, *(rules.candidates if rules.uses_auto else ())])
        for name in names:
            with contextlib.suppress(PhubError):
                backend = self.backend(name)
                if backend.server_optimizer:
                    return backend
        raise ConfigError(
            f"[session] no backend allowed by PHUB_BACKEND={rules.text!r} runs the optimizer on "
            "the server; allow pbox, or let the worker run it"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise PhubError(f"[session] rank {self.rank} uses its session after close()")

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
