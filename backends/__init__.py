"""The one table of backends, and how to get one by its name. Importing this starts nothing."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from phub_collective.backends.base import Backend, Context
from phub_collective.errors import BackendUnavailable, ConfigError

# name -> module with is_available(), create(context) and perhaps RUNS_OPTIMIZER, FOLDS_PACKED; see
# base.py.
TABLE: dict[str, str] = {
    "pbox": "phub_collective.backends.pbox",
    "pshard": "phub_collective.backends.pshard",
    "ring": "phub_collective.backends.ring",
    "halving_doubling": "phub_collective.backends.halving_doubling",
    "mpi": "phub_collective.backends.mpi",
    "gloo": "phub_collective.backends.gloo",
    "zmq_ps": "phub_collective.backends.zmq_ps",
}

# Here to be compared with: `auto` never chooses them.
BASELINES = ("zmq_ps",)

ENTRY_POINT_GROUP = "phub_collective.backends"  # others add a backend by an entry point


def names() -> list[str]:
    """All backends, those of this package first, in the order of the table."""
    return [*TABLE, *sorted(_foreign().keys() - TABLE.keys())]


def available() -> dict[str, str | None]:
    """For each backend None when it can be used here, else the reason why not."""
    return {name: unavailable_reason(name) for name in names()}


def unavailable_reason(name: str) -> str | None:
    """None when backend `name` can be used here, else why not.

    Raises:
        ConfigError: there is no such backend.
    """
    _check_known(name)
    try:
        reason: str | None = _module(name).is_available()
    except Exception as error:  # somebody else's module may raise anything, which harms it alone
        return f"it cannot be loaded: {error!r}"
    return reason


def runs_optimizer(name: str) -> bool:
    """Whether exchanges of backend `name` can run the optimizer; False where it cannot be loaded.

    Raises:
        ConfigError: there is no such backend.
    """
    return _declares(name, "RUNS_OPTIMIZER")


def folds_packed(name: str) -> bool:
    """Whether exchanges of backend `name` take compressions with a residual (two_bit, one_bit,
    topk); False where it cannot be loaded.

    Raises:
        ConfigError: there is no such backend.
    """
    return _declares(name, "FOLDS_PACKED")


def create(name: str, context: Context) -> Backend:
    """Connect backend `name`. Collective: every rank of the job creates it.

    Raises:
        ConfigError: there is no such backend.
        BackendUnavailable: it cannot be used here; the message says why.
    """
    reason = unavailable_reason(name)
    if reason is not None:
        raise BackendUnavailable(f"[{name}] is not available on rank {context.rank}: {reason}")
    backend: Backend = _module(name).create(context)
    return backend


def _declares(name: str, ability: str) -> bool:
    _check_known(name)
    try:
        return bool(getattr(_module(name), ability, False))
    except Exception:  # as in unavailable_reason
        return False


def _check_known(name: str) -> None:
    if name not in TABLE and name not in _foreign():
        known = ", ".join(names())
        raise ConfigError(f"[backends] unknown backend {name!r}; expected one of {known}")


def _module(name: str) -> ModuleType:
    if name in TABLE:
        return importlib.import_module(TABLE[name])
    module: ModuleType = _foreign()[name].load()
    return module


def _foreign() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
