"""Gradient exchange for data-parallel training: a central parameter server (PBox) and collectives.

Training scripts import a face: `import phub_collective.torch as hvd`. This package itself imports
no framework, opens no socket and reads no environment variable.
"""

import importlib
from typing import TYPE_CHECKING, Any

from phub_collective.config import Config
from phub_collective.errors import (
    AuthError,
    BackendUnavailable,
    ConfigError,
    DuplicateName,
    InternalError,
    MismatchError,
    PeerLost,
    PeerTimeout,
    PhubError,
    ProtocolError,
)

if TYPE_CHECKING:
    from phub_collective.backends.base import SGD, Adam
    from phub_collective.backends.pbox.service import connect_service, create_service

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adam",
    "AuthError",
    "BackendUnavailable",
    "Config",
    "ConfigError",
    "DuplicateName",
    "InternalError",
    "MismatchError",
    "PeerLost",
    "PeerTimeout",
    "PhubError",
    "ProtocolError",
    "__version__",
    "connect_service",
    "create_service",
]

# The PBox from NumPy. These need NumPy, which takes longer to import than all the rest.
_LAZY = {
    "SGD": "phub_collective.backends.base",
    "Adam": "phub_collective.backends.base",
    "connect_service": "phub_collective.backends.pbox.service",
    "create_service": "phub_collective.backends.pbox.service",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'phub_collective' has no attribute {name!r}")
