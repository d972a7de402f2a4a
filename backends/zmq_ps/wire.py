"""The messages between a worker and a server.

    message := header payload?          (a ROUTER socket puts the sender's identity before it)

The header is a fixed struct, little-endian. The payload of PUSH and ANSWER is a piece of a key as
it stands in memory, of HYPER one `HYPER` struct, of MISSING ranks as uint32, of ERROR JSON. Nothing
is ever unpickled.
"""

from __future__ import annotations

import enum
import json
import struct
from typing import Any, NamedTuple

from phub_collective.backends.base import SGD
from phub_collective.backends.pbox.protocol import error_message, raise_error
from phub_collective.errors import PhubError, ProtocolError

HEADER = struct.Struct("<BBBBHIIIIdd")
HYPER = struct.Struct("<dddd??")

Payload = Any  # a buffer of bytes: uint8 array, bytes, zmq.Frame; None: there is none


class MessageKind(enum.IntEnum):
    """What a message is."""

    PUSH = 1  # worker: its part of a piece; answered when all workers have pushed
    ANSWER = 2  # server: the sum, or the new weights
    CREDIT = 3  # either: so many bytes of the other end's messages were taken in (see flow.py)
    HYPER = 4  # worker: hyperparameters of a parameter group, from its next push on
    DROP = 5  # worker: it is done with a table
    MISSING = 6  # worker: who has not pushed this piece? server: those ranks
    ERROR = 7  # server: why a push is not answered
    BYE = 8  # worker: its last message


class Flag(enum.IntFlag):
    """How a PUSH is meant; all but EMPTY are equal on all ranks."""

    EMPTY = 1  # no payload: this rank contributes nothing
    ADOPT = 2  # the one payload that comes is everybody's result, and a server's weights
    OPTIMIZE = 4  # the server keeps weights and steps
    ONCE = 8  # the table has this one use


class Header(NamedTuple):
    """See the fields of a message at the top; what a kind does not need is 0.

    Attributes:
        group: parameter group.
        table, piece: what is exchanged (see pieces.py).
        step: how many exchanges of this piece came before.
        nbytes: of the whole piece, also where the payload is empty; of CREDIT the bytes.
    """

    kind: int
    dtype: int = 0
    op: int = 0
    flags: int = 0
    group: int = 0
    table: int = 0
    piece: int = 0
    step: int = 0
    nbytes: int = 0
    prescale: float = 1.0
    postscale: float = 1.0

    def pack(self) -> bytes:
        return HEADER.pack(*self)

    @staticmethod
    def unpack(data: bytes) -> Header:
        """Raises ProtocolError when `data` is no header."""
        if len(data) != HEADER.size:
            raise ProtocolError(
                f"[zmq_ps] expected a header of {HEADER.size} bytes, got {len(data)}"
            )
        return Header._make(HEADER.unpack(data))

    def recipe(self) -> Header:
        """What must be equal on all ranks that push a piece."""
        return self._replace(flags=self.flags & ~Flag.EMPTY)


class Message(NamedTuple):
    """A header and its payload."""

    header: Header
    payload: Payload = None

    @property
    def nbytes(self) -> int:
        """Bytes of the message, as both ends count them."""
        return HEADER.size + (0 if self.payload is None else len(self.payload))


def pack_hyper(hyper: SGD) -> bytes:
    return HYPER.pack(
        hyper.lr,
        hyper.momentum,
        hyper.dampening,
        hyper.weight_decay,
        hyper.nesterov,
        hyper.maximize,
    )


def unpack_hyper(data: bytes) -> SGD:
    """Raises ProtocolError when `data` is not what `pack_hyper` makes."""
    if len(data) != HYPER.size:
        raise ProtocolError(f"[zmq_ps] hyperparameters of {len(data)} bytes, not {HYPER.size}")
    return SGD(*HYPER.unpack(data))


def pack_error(error: PhubError) -> bytes:
    return json.dumps(error_message(error)).encode()


def unpack_error(data: bytes) -> PhubError:
    """The error that `pack_error` packed, or the ProtocolError that it is none."""
    try:
        raise_error(json.loads(data))
    except PhubError as error:
        return error
    except ValueError:
        pass
    return ProtocolError(f"[zmq_ps] a malformed error: {data!r:.200}")
