"""File descriptors that come over a Unix socket."""

from __future__ import annotations

import array
import socket


def recv_fds(sock: socket.socket, size: int, limit: int) -> tuple[bytes, list[int]]:
    """Up to `size` bytes and up to `limit` descriptors that came with them.

    Child processes do not inherit the descriptors. (`socket.recv_fds` does not pass on the flag
    that is needed for it.)
    """
    found = array.array("i")
    room = socket.CMSG_LEN(limit * found.itemsize)
    data, ancillary, _, _ = sock.recvmsg(size, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) // found.itemsize * found.itemsize])
    return data, list(found)
