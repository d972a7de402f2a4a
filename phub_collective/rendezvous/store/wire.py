"""What travels between the store's server and its clients. Nothing that arrives is unpickled or
evaluated.

    message  := length:u32 field*            (length of all that follows; little-endian)
    field    := length:u32 byte{length}
    challenge (server)  nonce{32}
    hello     (client)  nonce{32} rank generation mac      mac = HMAC-SHA256(secret, all before)
    welcome   (server)  generation mac
    request   (client)  "put" key value | "discard" key     answered by an empty message
                      | "get" timeout key                  answered when there, or timed out
                      | "gather" timeout key size value    sets the rank's slot, then as "get"
                      | "bye"                              not answered
    answer    (server)  to "get", "gather": gone value*     "" = absent, "=..." = value

Ranks, generations, sizes and timeouts are decimal text; `gone` is a JSON list of ranks.
"""

from __future__ import annotations

import hmac
import socket
import struct

NONCE_BYTES = 32
HANDSHAKE_S = 10.0  # who has not proved to know the secret by then is given up
MAX_HELLO = 512  # bytes taken from somebody who has not proved to know the secret
MAX_MESSAGE = 1 << 30  # bytes
LENGTH = struct.Struct("<I")


def pack(*fields: bytes) -> bytes:
    """A message of these fields."""
    body = b"".join(LENGTH.pack(len(one)) + one for one in fields)
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> list[bytes]:
    """The fields of a message's body; ValueError when it is not made of fields."""
    fields, at = [], 0
    while at < len(body):
        if at + LENGTH.size > len(body):
            raise ValueError("a field's length is cut off")
        (length,) = LENGTH.unpack_from(body, at)
        at += LENGTH.size
        if at + length > len(body):
            raise ValueError("a field is cut off")
        fields.append(body[at : at + length])
        at += length
    return fields


def mac(secret: bytes, *parts: bytes) -> bytes:
    """The proof that whoever sends `parts` knows the secret."""
    return hmac.digest(secret, pack(*parts), "sha256")


def keep_alive(sock: socket.socket) -> None:
    """Make a silently unreachable host an error after 30 s, and small answers leave at once."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def receive(sock: socket.socket, limit: int) -> bytes:
    """The body of the next message; ConnectionError at the end of the stream."""
    (length,) = LENGTH.unpack(_receive_exactly(sock, LENGTH.size))
    if length > limit:
        raise ValueError(f"expected at most {limit} bytes, got a message of {length}")
    return _receive_exactly(sock, length)


def _receive_exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(min(1 << 20, count - len(data)))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return bytes(data)
