"""One rank's part in a job: its backends, and the choice between them.

Several sessions may live in one process, also as ranks of one job; nothing is process-wide.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
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
from phub_collective.errors import ConfigError, PeerTimeout, PhubError
from phub_collective.logs import set_level
from phub_collective.mappings import pages_of
from phub_collective.rendezvous import topology
from phub_collective.selection.firstuse import FirstUse, size_of
from phub_collective.selection.rules import AUTO
from phub_collective.selection.selector import Selector
from phub_collective.sizes import size_text

log = logging.getLogger(__name__)


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
        self._connecting = threading.RLock()  # held while backends are connected: see _collective
        self._lock = threading.Lock()  # never held while anything waits for other ranks
        # guarded by _lock
        self._backends: dict[str, Backend] = {}
        self._of_name: dict[str, Backend] = {}  # only where there is a choice
        self._chosen: list[str] = []  # what may be chosen; empty: not prepared
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
        set_level(config.log_level)
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
        found = self._opened(name)
        if found is not None:
            return found
        with self._collective(f"connects {name}"):
            found = self._opened(name)  # by the thread that was here before
            if found is not None:
                return found
            begin = time.monotonic()
            made = backends.create(name, self.context)
            elapsed = time.monotonic() - begin
            log.info("[session] rank %d: connected %s in %.2f s", self.rank, name, elapsed)
            with self._lock:
                closed = self._closed
                if not closed:
                    self._backends[name] = made
            if closed:
                made.close()
                self._check_open()
            return made

    def prepare(self, fresh: bool = False) -> None:
        """Connect what may be chosen, after a measurement where that is needed. Collective, and
        done by the first `choose`, `submit` or `open_exchange`.

        Args:
            fresh: measure, whatever is cached.
        """
        if self._is_prepared():
            return
        with self._collective("prepares the choice of backends"):
            if self._is_prepared():
                return
            with self._lock:
                before = set(self._backends)
            chosen = self.selector.prepare(self.backend, fresh)
            for name in chosen:
                self.backend(name)
            with self._lock:
                extra = self._backends.keys() - before - set(chosen)
                closing = [self._backends.pop(name) for name in extra]
                self._chosen = chosen
            for backend in closing:
                backend.close()

    def choose(self, nbytes: int, server_optimizer: bool = False) -> Backend:
        """The backend for so many bytes by PHUB_BACKEND; equal on all ranks for equal arguments.

        Args:
            server_optimizer: it must be able to run the optimizer, whatever it costs.

        Raises:
            ConfigError: none of those that PHUB_BACKEND allows can run the optimizer.
        """
        if server_optimizer:
            name = self._name_with(backends.runs_optimizer, "runs the optimizer on the server")
            return self.backend(name)
        self.prepare()
        return self.backend(self.selector.choose(nbytes))

    def submit(self, operation: Operation) -> Work:
        """Start an operation on the backend for its size. A name stays with the backend of its
        first use, so that its uses meet in one place.

        The work raises MismatchError when the ranks' sizes are for different backends.
        """
        known = self._known(operation.name)
        if known is None:
            self.prepare()
            known = self._known(operation.name)
        if known is not None:
            return known.submit(operation)
        backend = self.choose(size_of(operation))
        with self._lock:
            self._of_name[operation.name] = backend
        meeting = self.backend(self._chosen[0])
        return FirstUse(self.context, operation, self.selector.choose, backend, meeting)

    def open_exchange(self, spec: ExchangeSpec, backend: str | None = None) -> Exchange:
        """Register a model with `backend`, or with the one for its size. Collective."""
        if backend is not None and backend != AUTO:
            chosen = self.backend(backend)
        elif spec.compression.has_residual:
            what = f"adds up gradients packed as {spec.compression}"
            chosen = self.backend(self._name_with(backends.folds_packed, what))
        else:
            nbytes = sum(key.nbytes for key in spec.keys)
            chosen = self.choose(nbytes, spec.place == "server")
        exchange = chosen.open_exchange(spec)
        if log.isEnabledFor(logging.INFO):
            what = f"{spec.name}: {len(spec.keys)} keys, {size_text(exchange.arena.nbytes)}"
            pages = pages_of(exchange.arena)
            log.info("[session] rank %d: %s by %s in %s", self.rank, what, chosen.name, pages)
        return exchange

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

    @contextlib.contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        """One thread at a time connects backends, since all ranks must do so in one order.

        Raises:
            PeerTimeout: another thread did not come to an end with it.
        """
        limit = self.config.stall_timeout
        if not self._connecting.acquire(timeout=limit):
            raise PeerTimeout(
                f"[session] rank {self.rank} {what}, but has waited {limit:g} s for another thread "
                "that connects backends; has every rank come to it?"
            )
        try:
            yield
        finally:
            self._connecting.release()

    def _opened(self, name: str) -> Backend | None:
        with self._lock:
            self._check_open()
            return self._backends.get(name)

    def _known(self, name: str) -> Backend | None:
        """The backend of a name; None where that is still open."""
        with self._lock:
            self._check_open()
            if len(self._chosen) == 1:
                return self._backends.get(self._chosen[0])
            return self._of_name.get(name)

    def _is_prepared(self) -> bool:
        with self._lock:
            self._check_open()
            return bool(self._chosen)

    def _name_with(self, ability: Callable[[str], bool], what: str) -> str:
        """The backend that has an ability, told without connecting any."""
        rules = self.selector.rules
        names = dict.fromkeys([*rules.forced, *(rules.candidates if rules.uses_auto else ())])
        for name in names:
            if ability(name):
                return name
        raise ConfigError(
            f"[session] no backend allowed by PHUB_BACKEND={rules.text!r} {what}; allow pbox, or "
            "do without"
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
