"""Gradient exchange for data-parallel training: a central parameter server (PBox) and collectives.

Training scripts import a face: `import phub_collective.torch as hvd`. This package itself imports
no framework, opens no socket and reads no environment variable.
"""

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

__version__ = "0.1.0"

__all__ = [
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
]
