"""The process's place in the job: `init`, `shutdown`, `rank` and their kin.

Everything else in this package asks `face()` for the session; nothing but this module holds state
for the process. (`Session.open` sets the level of Python's loggers, which are the process's.)
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary

from phub_collective.errors import ConfigError
from phub_collective.torch.names import OperationNames, UnnamedWork

if TYPE_CHECKING:
    from phub_collective.backends.base import Operation, Work
    from phub_collective.session import Session
    from phub_collective.torch.reducer import Reducer


class Face:
    """What lives from `init` to `shutdown`.

    Attributes:
        session: the connection to the other ranks.
        parameter_of_copy: for each living entry of a state_dict() that is a copy, the shared
            parameter it was made of: a broadcast into the copy is meant for the parameter.
        unsettled: optimizers whose last step's results were not all waited for.
        process: the process that called `init`; a forked child must not say farewell for it.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.process = os.getpid()
        self.parameter_of_copy = WeakIdKeyDictionary()
        self.unsettled: weakref.WeakSet[Reducer] = weakref.WeakSet()
        self._names = OperationNames()
        self._exchanges = 0
        self._cross: tuple[int, int] | None = None

    def submit(self, operation: Operation) -> Work:
        """Start an operation; one whose name is empty is given a name."""
        if operation.name:
            return self.session.submit(operation)
        return UnnamedWork(self._names, self.session, operation)

    def exchange_name(self) -> str:
        """A name for the next optimizer's exchange: ranks open them in the same order."""
        self._exchanges += 1
        return f"optimizer.{self._exchanges - 1}"

    def cross(self) -> tuple[int, int]:
        """(index of this host among those that have our local rank, number of those hosts).
        Collective when first called, on a job of several hosts."""
        if self._cross is None:
            session, alike = self.session, [self.session.rank]
            if session.local_size < session.size:
                mine = str(session.local_rank).encode()
                found = session.context.rendezvous.all_gather("torch.local_rank", mine)
                alike = [rank for rank, theirs in enumerate(found) if theirs == mine]
            self._cross = alike.index(session.rank), len(alike)
        return self._cross


_face: Face | None = None


def init(
    comm: object = None, process_sets: Sequence[object] | None = None, **settings: Any
) -> None:
    """Join the job that this process was started in (phubrun, mpirun, torchrun, srun), or make a
    job of one. Collective; does nothing when already initialised.

    Args:
        comm: None: all ranks of the job. Other communicators are not available.
        process_sets: None or empty; process sets are not available.
        settings: fields of `phub_collective.Config`; they win over PHUB_* variables.

    Raises:
        ConfigError: a setting is wrong.
        BackendUnavailable, PeerLost, PeerTimeout, AuthError: the others could not be met.
    """
    global _face
    if comm is not None or process_sets:
        raise ConfigError(
            f"[torch] init(comm={comm!r}, process_sets={process_sets!r}): expected neither, since "
            "jobs of a part of the ranks are not available; start the ranks you want"
        )
    if _face is not None:
        return
    from phub_collective.session import Session

    made = Face(Session.open(**settings))
    try:
        made.cross()
    except BaseException:
        made.session.close()
        raise
    _face = made
    atexit.register(shutdown)


def shutdown() -> None:
    """Leave the job; idempotent, and called at exit. Waits for the results of a last step that did
    not (others still need this rank for theirs), unless an error ends the process. Does not wait
    for ranks that were lost."""
    global _face
    closing, _face = _face, None
    atexit.unregister(shutdown)
    if closing is None or closing.process != os.getpid():
        return
    try:
        if getattr(sys, "last_value", None) is None:
            for reducer in list(closing.unsettled):
                reducer.settle()
    finally:
        closing.session.close()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return _face is not None


def face() -> Face:
    """The state made by `init`; ConfigError without it."""
    if _face is None:
        raise ConfigError("[torch] not initialised; call hvd.init() first")
    return _face


def rank() -> int:
    """This process's number in the job, 0 .. size-1."""
    return face().session.rank


def size() -> int:
    """Number of processes in the job."""
    return face().session.size


def local_rank() -> int:
    """This process's number on its host."""
    return face().session.local_rank


def local_size() -> int:
    """Number of the job's processes on this host."""
    return face().session.local_size


def cross_rank() -> int:
    """This host's number among the hosts that have a process of our local rank."""
    return face().cross()[0]


def cross_size() -> int:
    """Number of hosts that have a process of our local rank."""
    return face().cross()[1]
