"""How much may be queued, and how large a piece of a key is. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from phub_collective.backends.base import ALIGNMENT
from phub_collective.errors import ConfigError

QUEUE_BYTES = 256 << 20  # queued for and by one server: both directions, all workers together
# A key of more bytes is cut: the 1,048,576 floats of MXNET_KVSTORE_BIGARRAY_BOUND with which the
# paper measured MXNet (its keys are of 4 MiB).
PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Limits:
    """Of one server.

    Attributes:
        window: bytes that may be on their way from one worker to it, and from it to one worker.
        piece: bytes of the largest piece. A window holds two, so that one can be sent while the
            other's credit is on its way.
    """

    window: int
    piece: int

    @staticmethod
    def of(workers: int, queue_bytes: int = QUEUE_BYTES) -> Limits:
        """Raises ConfigError when so many workers cannot share the queue."""
        window = queue_bytes // (2 * workers)
        piece = min(PIECE_BYTES, (window // 2 - ALIGNMENT) // ALIGNMENT * ALIGNMENT)
        if piece < ALIGNMENT:
            raise ConfigError(f"[zmq_ps] {workers} workers do not fit into {queue_bytes} bytes")
        return Limits(window, piece)
