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
from typing import Any

from phub_collective.errors import AuthError, PeerLost, PhubError, ProtocolError, from_code, to_code

MAX_MESSAGE = 64 << 20  # bytes; a key table of some 100,000 keys
MAX_DESCRIPTORS = 8
TOKEN_BYTES = 16

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
    return isinstance(given, str) and hmac.compare_digest(given, proof(token, nonce, *claims))


def send(sock: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Send one message, with file descriptors where the socket is a Unix socket."""
    body = json.dumps(message, separators=(",", ":")).encode()
    data = struct.pack("<I", len(body)) + body
    sent = socket.send_fds(sock, [data], list(descriptors)) if descriptors else 0
    sock.sendall(data[sent:])


def receive(sock: socket.socket) -> tuple[Message, list[int]]:
    """Receive one message and the descriptors that came with it.

    Raises:
        PeerLost: the connection ended.
        ProtocolError: what came is no message.
    """
    head, descriptors = _receive_head(sock)
    (length,) = struct.unpack("<I", head)
    if length > MAX_MESSAGE:
        raise ProtocolError(
            f"[control] a message of {length} bytes; at most {MAX_MESSAGE} are taken"
        )
    try:
        message = json.loads(_receive_exactly(sock, length))
    except ValueError:
        raise ProtocolError("[control] expected a JSON message, got other bytes") from None
    if not isinstance(message, dict):
        raise ProtocolError("[control] expected a JSON object")
    return message, descriptors


def _receive_head(sock: socket.socket) -> tuple[bytes, list[int]]:
    descriptors: list[int] = []
    if sock.family == socket.AF_UNIX:
        head, descriptors, _, _ = socket.recv_fds(sock, 4, MAX_DESCRIPTORS)
    else:
        head = sock.recv(4)
    if not head:
        raise PeerLost("[control] the other end closed the connection")
    return head + _receive_exactly(sock, 4 - len(head)), descriptors


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise PeerLost("[control] the connection ended inside a message")
        data += piece
    return bytes(data)


def error_message(error: BaseException) -> Message:
    """An exception as a message; a foreign one becomes an internal error with its text."""
    text = str(error) if isinstance(error, PhubError) else f"[pbox] {error!r}"
    return {"error": to_code(error), "text": text, "rank": getattr(error, "rank", -1)}


def raise_error(message: Message) -> None:
    """Raise what `error_message` packed; nothing when the message is no error."""
    if "error" in message:
        raise from_code(int(message["error"]), str(message["text"]), int(message.get("rank", -1)))


def answer_challenge(sock: socket.socket, token: str, *claims: object) -> Message:
    """The client's half of a handshake: receive the nonce, prove the token, receive the welcome."""
    message, _ = receive(sock)
    raise_error(message)
    nonce = message.get("nonce")
    if not isinstance(nonce, str):
        raise ProtocolError("[control] expected a challenge from the server")
    send(sock, {"proof": proof(token, nonce, *claims)})
    welcome, descriptors = receive(sock)
    raise_error(welcome)
    welcome["descriptors"] = descriptors
    return welcome


def challenge(sock: socket.socket, token: str, *claims: object) -> None:
    """The server's half: AuthError unless the other end proves that it knows `token`."""
    nonce = secrets.token_hex(TOKEN_BYTES)
    send(sock, {"nonce": nonce})
    reply, descriptors = receive(sock)
    close_all(descriptors)
    if not check_proof(reply.get("proof"), token, nonce, *claims):
        raise AuthError(
            "[pbox] wrong token for this job, or the job has ended; "
            "take the token that CreateService returned for it"
        )


def close_all(descriptors: list[int]) -> None:
    """Close descriptors that nobody asked for."""
    for descriptor in descriptors:
        socket.close(descriptor)
