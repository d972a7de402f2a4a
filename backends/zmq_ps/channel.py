"""Operations that are not registered, on the servers: what channels.py asks of a library."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from phub_collective.backends.base import DType, Kind, ReduceOp
from phub_collective.backends.channels import Handle
from phub_collective.backends.transfer import Transfer
from phub_collective.backends.zmq_ps.client import Client
from phub_collective.backends.zmq_ps.latch import Latch
from phub_collective.backends.zmq_ps.pieces import ONCE, of_buffer
from phub_collective.backends.zmq_ps.wire import Flag, Header, MessageKind

SHARED = 1  # the number of the channel on which all announced operations are started


class ZmqChannel:
    """See `Channel`. A channel is a table on the servers; on the shared one, where several
    operations may be under way, each of them is."""

    def __init__(self, client: Client, rank: int, number: int, piece_bytes: int) -> None:
        self._client, self._rank, self._number = client, rank, number
        self._piece_bytes = piece_bytes
        self._uses = itertools.count()

    def start(self, transfer: Transfer | None, ended: Callable[[], None]) -> Handle:
        header = self._header(transfer)
        memory = None if transfer is None else transfer.array.view("uint8")
        nbytes = 0 if memory is None else memory.size
        pieces = of_buffer(nbytes, self._piece_bytes, self._client.servers, header.table)
        latch = Latch(len(pieces), ended)
        for piece in pieces:
            part = None if memory is None else memory[piece.begin : piece.end]
            self._client.push(
                piece.server,
                header._replace(piece=piece.number, nbytes=piece.end - piece.begin),
                None if header.flags & Flag.EMPTY else part,
                part,
                latch,
            )
        return latch

    def _header(self, transfer: Transfer | None) -> Header:
        use, flags = next(self._uses), Flag(0)
        table, step = self._number, use
        if self._number == SHARED:
            table, step, flags = ONCE + use % ONCE, 0, Flag.ONCE
        if transfer is None:
            return Header(MessageKind.PUSH, DType.UINT8, 0, flags | Flag.EMPTY, 0, table, 0, step)
        op = transfer.op
        if transfer.kind is Kind.BROADCAST:
            flags |= Flag.ADOPT if transfer.root == self._rank else Flag.ADOPT | Flag.EMPTY
            op = ReduceOp.SUM
        dtype = DType[transfer.array.dtype.name.upper()]
        return Header(MessageKind.PUSH, dtype, op, flags, 0, table, 0, step)
