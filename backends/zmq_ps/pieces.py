"""Which server has which bytes: keys cut into pieces, pieces given to servers. Pure.

MXNet spreads small keys by a hash of their number and cuts big ones evenly over all servers. Here
no piece is larger than the bound, and bytes are balanced by longest processing time, which no hash
does better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phub_collective.backends.base import Key
from phub_collective.backends.pbox.placement import place

ONCE = 1 << 31  # tables: operations that are announced, each has its own
MODELS = 1 << 30  # exchanges; below them, a channel's number is its table


class Piece(NamedTuple):
    """A slice of a buffer, and where it is summed.

    Attributes:
        number: in its table.
        begin, end: bytes.
    """

    server: int
    number: int
    begin: int
    end: int


def of_model(keys: Sequence[Key], limit: int, servers: int) -> list[list[Piece]]:
    """For each key its pieces of at most `limit` bytes, in the arena; none for an empty key."""
    placed = place(keys, limit, shards=servers)
    pieces: list[list[Piece]] = [[] for _ in keys]
    for number, (chunk, server) in enumerate(
        zip(placed.chunks, placed.shard.tolist(), strict=True)
    ):
        pieces[chunk.key].append(Piece(server, number, chunk.offset, chunk.offset + chunk.nbytes))
    return pieces


def of_buffer(nbytes: int, limit: int, servers: int, table: int) -> list[Piece]:
    """The pieces of a buffer; one empty piece when it has no bytes. Tables begin at different
    servers, so that small ones are spread."""
    starts = range(0, max(nbytes, 1), limit)
    return [
        Piece((table + number) % servers, number, begin, min(begin + limit, nbytes))
        for number, begin in enumerate(starts)
    ]
