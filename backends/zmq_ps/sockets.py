"""How both ends set their ZMQ sockets up, and how they put messages on them.

A connection is authenticated by ZMQ's PLAIN mechanism with the job's token before it can say
anything, so a stray client never reaches the server's queue. Heartbeats are ZMQ's own: its I/O
threads answer them also while Python computes.
"""

from __future__ import annotations

import zmq

from phub_collective.backends.zmq_ps.flow import HIGH_WATER
from phub_collective.backends.zmq_ps.limits import PIECE_BYTES
from phub_collective.backends.zmq_ps.wire import Message
from phub_collective.errors import ProtocolError

USER = "worker"  # whose password is the job's token
LINGER_MS = 2000  # what was said last may leave for so long when a socket is closed
SLACK_BYTES = 64 << 10  # beyond a piece: errors are the only other payload of any size
RETRY_MS = 1  # until a full queue of ZMQ is tried again
IDLE_MS = 1000  # how long a thread sleeps when nothing happens

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


def tune(socket: Socket, timeout: float) -> None:
    """What both ends need; `timeout`: seconds of silence until the other end counts as lost."""
    milliseconds = max(1, int(timeout * 1000))
    for option, value in (
        (zmq.SNDHWM, HIGH_WATER),
        (zmq.RCVHWM, HIGH_WATER),
        (zmq.MAXMSGSIZE, PIECE_BYTES + SLACK_BYTES),
        (zmq.HEARTBEAT_IVL, max(1, milliseconds // 3)),
        (zmq.HEARTBEAT_TIMEOUT, milliseconds),
        (zmq.LINGER, LINGER_MS),
    ):
        socket.setsockopt(option, value)


def identity(rank: int) -> bytes:
    """What a worker's socket is called at the server."""
    return b"rank %d" % rank


def rank_of(name: bytes, workers: int) -> int:
    """The rank of an `identity`; ProtocolError when it is none."""
    digits = name.removeprefix(b"rank ")
    if not digits.isdigit() or int(digits) >= workers:
        raise ProtocolError(f"[zmq_ps] expected rank 0..{workers - 1}, got {name!r}")
    return int(digits)


def put(socket: Socket, message: Message, to: bytes | None = None) -> bool:
    """Give a message to ZMQ, without a copy where it is large; `to`: the identity of the other
    end of a ROUTER. False: ZMQ's queue is full."""
    header, payload = message
    try:
        if to is not None:
            socket.send(to, zmq.NOBLOCK | zmq.SNDMORE)
        more = 0 if payload is None else zmq.SNDMORE
        socket.send(header.pack(), zmq.NOBLOCK | more)
        if payload is not None:
            socket.send(payload, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    return True


def get(socket: Socket) -> list[zmq.Frame]:
    """The frames of the next message, without a copy; none when there is no message."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return []
