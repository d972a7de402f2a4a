"""The C++20 core; `load()` gives its module, or the reason why it is not there."""

from __future__ import annotations

import importlib
from types import ModuleType

from phub_collective.errors import BackendUnavailable

__all__ = ["load", "unavailable_reason"]


def unavailable_reason() -> str | None:
    """None when the core is built and loads, else what to do."""
    try:
        importlib.import_module("phub_collective.backends.native._core")
    except ImportError as error:
        return f"the native core does not load ({error}); build it with: pip install -e ."
    return None


def load() -> ModuleType:
    """The extension module `_core` (typed by _core.pyi).

    Raises:
        BackendUnavailable: it was not built, or was built for another Python.
    """
    reason = unavailable_reason()
    if reason:
        raise BackendUnavailable(f"[native] {reason}")
    return importlib.import_module("phub_collective.backends.native._core")
