"""The control protocol of a PBox: JSON messages over a stream socket, before and beside the lanes.

    message := length:u32 (little-endian) json{length}     (+ file descriptors, on a Unix socket)

A connection first says which job and rank it is and proves that it knows the job's token by an
HMAC over the server's nonce; then it is either the rank's control connection, or it becomes one
lane and speaks frames (native/wire.h). Nothing is ever unpickled, no token travels.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
import time
from array import array
from typing import Any

from phub_collective.backends.descriptors import recv_fds
from phub_collective.errors import (
    AuthError,
    PeerLost,
    PhubError,
    ProtocolError,
    from_code,
    rank_of,
    to_code,
)

MAX_MESSAGE = 64 << 20  # bytes; a key table of some 100,000 keys
MAX_GREETING = 64 << 10  # bytes of a message from someone who has proved nothing yet
MAX_DESCRIPTORS = 8
TOKEN_BYTES = 16
NO_BELL = -1  # instead of an eventfd: a lane's ends wake each other over its Unix socket
HEAD = struct.Struct("<I")

Message = dict[str, Any]


def new_token() -> str:
    """A 128-bit token in hexadecimal."""
    return secrets.token_hex(TOKEN_BYTES)


def proof(token: str, nonce: str, *claims: object) -> str:
    """What shows that the sender knows `token`, for one nonce and one set of claims only."""
    text = "|".join([nonce, *map(str, claims)])
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def check_proof(given: object, token: str, nonce: str, *claims: object) -> bool:
    """Constant-time comparison with the expected `proof`."""
    expected = proof(token, nonce, *claims).encode()
    return isinstance(given, str) and hmac.compare_digest(given.encode(), expected)


def _pack(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return HEAD.pack(len(body)) + body


def send(sock: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Send one message, with file descriptors where the socket is a Unix socket."""
    data = _pack(message)
    sent = socket.send_fds(sock, [data], list(descriptors)) if descriptors else 0
    sock.sendall(data[sent:])


def send_now(sock: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> bool:
    """`send` on a blocking socket, without ever waiting. False: the other end does not read, and
    the connection is of no use any more."""
    data = _pack(message)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
    try:
        sent = sock.sendmsg([data], rights if descriptors else [], socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return sent == len(data)


def receive(sock: socket.socket, limit: int = MAX_MESSAGE) -> Message:
    """Receive one message of at most `limit` bytes. Descriptors that come along are dropped.

    Raises:
        PeerLost: the connection ended.
        ProtocolError: what came is no message.
        TimeoutError: it was not complete within the socket's timeout.
    """
    return _receive_body(sock, _receive_exactly(sock, HEAD.size), limit)


def receive_with_descriptors(sock: socket.socket) -> tuple[Message, list[int]]:
    """`receive` on a Unix socket, and the descriptors that came with the message."""
    head, descriptors = recv_fds(sock, HEAD.size, MAX_DESCRIPTORS)
    try:
        if not head:
            raise PeerLost("[control] the other end closed the connection")
        head += _receive_exactly(sock, HEAD.size - len(head))
        return _receive_body(sock, head, MAX_MESSAGE), descriptors
    except BaseException:
        close_all(descriptors)
        raise


def _receive_body(sock: socket.socket, head: bytes, limit: int) -> Message:
    (length,) = HEAD.unpack(head)
    if length > limit:
        raise ProtocolError(f"[control] a message of {length} bytes; at most {limit} are taken")
    try:
        message = json.loads(_receive_exactly(sock, length))
    except (ValueError, RecursionError):
        raise ProtocolError("[control] expected a JSON message, got other bytes") from None
    if not isinstance(message, dict):
        raise ProtocolError("[control] expected a JSON object")
    return message


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    """`count` bytes; the socket's timeout is for all of them, so a sender cannot drag it out."""
    timeout = sock.gettimeout()
    deadline = None if timeout is None else time.monotonic() + timeout
    data = bytearray()
    try:
        while len(data) < count:
            piece = sock.recv(min(count - len(data), 1 << 20))
            if not piece:
                where = "inside a message" if data else "by the other end"
                raise PeerLost(f"[control] the connection was closed {where}")
            data += piece
            if deadline is not None:
                sock.settimeout(max(1e-3, deadline - time.monotonic()))
    finally:
        sock.settimeout(timeout)
    return bytes(data)


def keep_alive(sock: socket.socket, seconds: int, unread_s: int) -> None:
    """Find out within about so many seconds that the other host cannot be reached any more; while
    something is on its way, in `unread_s`: the other end's process may be stopped, too."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // 3))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 6))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * unread_s)


def limit_sending(sock: socket.socket, seconds: float) -> None:
    """Make `send` on a blocking socket raise BlockingIOError after about so long without progress.
    The kernel gets half of it: a call that has sent a part ends without an error first."""
    microseconds = max(1, int(seconds / 2 * 1e6))
    limit = struct.pack("@ll", *divmod(microseconds, 1_000_000))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def error_message(error: PhubError) -> Message:
    """An error as a message."""
    ranks = list(getattr(error, "ranks", ()))  # of a PeerTimeout
    return {
        "error": to_code(error),
        "text": str(error),
        "rank": rank_of(error),
        "ranks": ranks,
    }


def raise_error(message: Message) -> None:
    """Raise what `error_message` packed; nothing when the message is no error."""
    if "error" not in message:
        return
    try:
        ranks = tuple(int(rank) for rank in message.get("ranks", ()))
        error = from_code(int(message["error"]), str(message["text"]), int(message["rank"]), ranks)
    except (KeyError, TypeError, ValueError):
        raise ProtocolError(f"[control] a malformed error: {message!r:.200}") from None
    raise error


def lane_unsent(cores: int) -> int:
    """Bytes that wait unsent in the socket of a tcp lane, beside `cores - 1` others to the same
    place: they have a place in the order of sending already."""
    return max(32 << 10, (512 << 10) // cores)


def lane_payload(chunk_bytes: int) -> int:
    """Largest payload of a lane, in bytes: a chunk, or an error's text."""
    return max(chunk_bytes, 16 << 10)


def challenge(sock: socket.socket, token: str, *claims: object) -> None:
    """The server's half: AuthError unless the other end proves that it knows `token`."""
    nonce = secrets.token_hex(TOKEN_BYTES)
    send(sock, {"nonce": nonce})
    reply = receive(sock, MAX_GREETING)
    if not check_proof(reply.get("proof"), token, nonce, *claims):
        raise AuthError(
            "[pbox] wrong token for this job, or the job has ended; "
            "take the token that CreateService returned for it"
        )


def close_all(descriptors: list[int]) -> None:
    """Close descriptors that nobody asked for."""
    for descriptor in descriptors:
        socket.close(descriptor)
