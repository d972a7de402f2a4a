"""Typed errors: every failure a user can meet, one class each.

Two kinds: recoverable ones (a peer is gone, a setting is wrong), which a caller may catch, and
`InternalError`, a broken invariant of this library. Messages start with ``[component]`` and say
what was expected, what came, on which rank, and what to do.
"""

from __future__ import annotations


class PhubError(RuntimeError):
    """Base of all errors raised by phub_collective."""


class ConfigError(PhubError, ValueError):
    """A setting, flag or argument is wrong; nothing was started."""


class BackendUnavailable(PhubError):
    """A backend, an extra or the native core is missing here; the message says how to get it."""


class MismatchError(PhubError, ValueError):
    """Ranks disagree about a name, shape, dtype, operation or setting; both sides are named."""


class DuplicateName(MismatchError):
    """Two tensors of one job, or two operations in flight, have the same name."""


class PeerLost(PhubError):
    """A rank or a PBox died or closed its connection.

    Attributes:
        rank: the rank that was lost; below 0 a server: -1 the PBox, or -2 - s, shard s of several.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class PeerTimeout(PhubError, TimeoutError):
    """Nothing arrived within the timeout; the message names who was waited for.

    Attributes:
        ranks: the ranks that were waited for (empty when unknown).
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class AuthError(PhubError):
    """A job token is wrong or its job has ended."""


class ProtocolError(PhubError):
    """A frame contradicts the job's key table (unknown chunk, wrong length, wrong step)."""


class InternalError(PhubError):
    """A broken invariant of this library; please report it."""


# The native core reports (code, message, rank); the codes are `ErrorCode` in native/error.h, and
# one of errors that arise in Python only.
CODES: dict[int, type[PhubError]] = {
    1: ConfigError,
    2: MismatchError,
    3: DuplicateName,
    4: PeerLost,
    5: PeerTimeout,
    6: AuthError,
    7: ProtocolError,
    8: InternalError,
    9: BackendUnavailable,
}


def from_code(code: int, message: str, rank: int = -1, ranks: tuple[int, ...] = ()) -> PhubError:
    """The exception for a native or wire error code (unknown codes become InternalError).
    `ranks`: those of a PeerTimeout, where more than `rank` is known."""
    kind = CODES.get(code, InternalError)
    if kind is PeerLost:
        return PeerLost(message, rank)
    if kind is PeerTimeout:
        return PeerTimeout(message, ranks or (() if rank < 0 else (rank,)))
    return kind(message)


def to_code(error: BaseException) -> int:
    """The code of an exception, for sending it to another rank (8 when it is not ours)."""
    for code, kind in CODES.items():
        if type(error) is kind:
            return code
    return 8


def rank_of(error: BaseException) -> int:
    """The one rank that an error is about, for sending it with its code; -1 when there is none."""
    if isinstance(error, PeerTimeout) and len(error.ranks) == 1:
        return error.ranks[0]
    return error.rank if isinstance(error, PeerLost) else -1
