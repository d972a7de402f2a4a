"""One job on one server: what its workers pushed, and what they are answered. Knows no socket."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from phub_collective.backends.base import SGD
from phub_collective.backends.zmq_ps.slot import Slot
from phub_collective.backends.zmq_ps.threads import Threads
from phub_collective.backends.zmq_ps.wire import (
    Flag,
    Header,
    MessageKind,
    Payload,
    pack_error,
    unpack_hyper,
)
from phub_collective.errors import InternalError, PeerLost, PhubError, ProtocolError


class Reply(NamedTuple):
    """One message to several ranks."""

    ranks: list[int]
    header: Header
    payload: Payload = None


@dataclass
class Table:
    """What belongs to one exchange, or to one channel of operations."""

    slots: dict[int, Slot] = field(default_factory=dict)  # by piece
    hypers: defaultdict[int, dict[int, SGD]] = field(  # by group and rank
        default_factory=lambda: defaultdict(dict)
    )
    dropped: set[int] = field(default_factory=set)


class Job:
    """See the module. One thread takes message after message: MXNet's dispatcher."""

    def __init__(self, workers: int, threads: Threads) -> None:
        self._workers, self._threads = workers, threads
        self._tables: defaultdict[int, Table] = defaultdict(Table)
        self._left: dict[int, str] = {}  # rank -> how

    def take(self, rank: int, header: Header, payload: np.ndarray | None) -> list[Reply]:
        """Do what a rank says; `payload` is not used after it."""
        if header.kind == MessageKind.PUSH:
            return self._push(rank, header, payload)
        if header.kind == MessageKind.HYPER:
            data = b"" if payload is None else payload.tobytes()
            self._tables[header.table].hypers[header.group][rank] = unpack_hyper(data)
            return []
        if header.kind == MessageKind.MISSING:
            return [self._missing(rank, header)]
        if header.kind == MessageKind.DROP:
            return self._drop(rank, header)
        if header.kind == MessageKind.BYE:
            how = "closed its backend; close it on all ranks after the last use"
            return self.leave(rank, how)
        raise ProtocolError(f"[zmq_ps] rank {rank} sent a message of kind {header.kind}")

    def _push(self, rank: int, header: Header, payload: np.ndarray | None) -> list[Reply]:
        table = self._tables[header.table]
        slot = table.slots.get(header.piece)
        if slot is None:
            slot = table.slots[header.piece] = Slot(self._workers, self._threads)
        gone = (self._left.keys() | table.dropped) - slot.arrived
        if gone:
            return [_error([rank], header, self._farewell(min(gone)))]
        everyone = list(range(self._workers))
        try:
            if not slot.add(rank, header, payload):
                return []
            answer = slot.finish(table.hypers[header.group])
        except PhubError as error:
            return [_error(everyone, header, error)]
        except Exception as error:  # of the arithmetic: the job must hear of it
            wrong = InternalError(f"[zmq_ps] table {header.table}: {error!r}")
            return [_error(everyone, header, wrong)]
        if header.flags & Flag.ONCE:
            self._forget(header)
        reply = Header(MessageKind.ANSWER, table=header.table, piece=header.piece)
        if header.flags & Flag.ADOPT:  # its root has it already
            everyone.remove(slot.giver)
            return [Reply([slot.giver], reply), Reply(everyone, reply, answer)]
        return [Reply(everyone, reply, answer)]

    def _forget(self, header: Header) -> None:
        """A piece of a table with one use is answered."""
        slots = self._tables[header.table].slots
        del slots[header.piece]
        if not slots:
            del self._tables[header.table]

    def _missing(self, rank: int, header: Header) -> Reply:
        table = self._tables.get(header.table, Table())
        slot = table.slots.get(header.piece)
        arrived = set() if slot is None else slot.arrived
        missing = sorted(set(range(self._workers)) - arrived)
        return Reply([rank], header, np.array(missing, np.uint32).view(np.uint8))

    def _drop(self, rank: int, header: Header) -> list[Reply]:
        """A rank is done with a table; those who still wait in it wait in vain."""
        table = self._tables[header.table]
        table.dropped.add(rank)
        if len(table.dropped | self._left.keys()) == self._workers:
            del self._tables[header.table]
            return []
        return self._give_up(rank, header.table)

    def leave(self, rank: int, how: str) -> list[Reply]:
        """A rank is gone; if in good order, then after all that it had begun."""
        if rank in self._left:
            return []
        self._left[rank] = how
        return [reply for number in self._tables for reply in self._give_up(rank, number)]

    def _give_up(self, rank: int, number: int) -> list[Reply]:
        """Tell those who wait for `rank` in a table that it does not come."""
        return [
            _error(sorted(slot.arrived), Header(0, table=number, piece=piece), self._farewell(rank))
            for piece, slot in self._tables[number].slots.items()
            if slot.arrived and rank not in slot.arrived
        ]

    def _farewell(self, rank: int) -> PeerLost:
        """The error for whoever needs a rank that is done."""
        how = self._left.get(rank, "has closed what others exchange")
        return PeerLost(f"[zmq_ps] rank {rank} {how}", rank)


def _error(ranks: list[int], about: Header, error: PhubError) -> Reply:
    header = Header(MessageKind.ERROR, table=about.table, piece=about.piece)
    return Reply(ranks, header, pack_error(error))
