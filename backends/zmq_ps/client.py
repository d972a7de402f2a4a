"""A worker's end: one thread that owns the sockets to all servers."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import zmq

from phub_collective.backends.zmq_ps import sockets
from phub_collective.backends.zmq_ps.flow import Flow
from phub_collective.backends.zmq_ps.latch import Latch
from phub_collective.backends.zmq_ps.link import Link
from phub_collective.backends.zmq_ps.wire import (
    Header,
    Message,
    MessageKind,
    Payload,
    unpack_error,
)
from phub_collective.errors import InternalError, PeerLost, PhubError

BATCH = 16  # messages of one server that are taken in before others have their turn


class Pending(NamedTuple):
    """A push whose answer is to come, and where it goes."""

    target: np.ndarray | None
    latch: Latch


class Question(NamedTuple):
    """Who has not pushed a piece? The ranks are put into `ranks`."""

    latch: Latch
    ranks: list[int]


class Client:
    """See the module. Thread-safe: what any thread says is queued for the thread of the sockets,
    which copies answers to where they belong and opens their latches."""

    def __init__(
        self,
        context: sockets.Context,
        links: Sequence[Link],
        rank: int,
        window: int,
        blame: Callable[[PeerLost], PhubError],
    ) -> None:
        """`blame` finds out who is to blame for a lost server; it may take seconds. The client
        closes `context` and `links`."""
        self._context, self._links, self._rank, self._blame = context, links, rank, blame
        self._flows = [Flow(window) for _ in links]
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        # guarded by _lock
        self._news: deque[tuple[int, Message]] = deque()
        self._pending: dict[tuple[int, int], Pending] = {}  # by table and piece
        self._questions: dict[tuple[int, int], Question] = {}
        self._error: PhubError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="phub-zmq", daemon=True)

    def start(self) -> None:
        for link in self._links:  # so that each server knows of this rank
            sockets.put(link.socket, Message(Header(MessageKind.CREDIT)))
        self._thread.start()

    @property
    def servers(self) -> int:
        return len(self._links)

    def push(
        self, server: int, header: Header, payload: Payload, target: np.ndarray | None, latch: Latch
    ) -> None:
        """Push a piece, whose answer goes to `target`; neither may change until `latch` opens.
        Raises what ended the client."""
        with self._lock:
            if self._error is not None:
                raise self._error
            self._pending[header.table, header.piece] = Pending(target, latch)
            self._say(server, Message(header, payload))

    def tell(self, server: int, header: Header, payload: Payload = None) -> None:
        """Send what is not answered; nothing happens when the client has ended."""
        with self._lock:
            if self._error is None:
                self._say(server, Message(header, payload))

    def missing(self, server: int, table: int, piece: int, seconds: float) -> tuple[int, ...]:
        """The ranks that have not pushed a piece; empty when the server does not say it in time."""
        question = Question(Latch(1), [])
        with self._lock:
            if self._error is not None:
                return ()
            self._questions[table, piece] = question
            header = Header(MessageKind.MISSING, table=table, piece=piece)
            self._say(server, Message(header))
        question.latch.wait(seconds)
        return tuple(question.ranks)

    def _say(self, server: int, message: Message) -> None:
        """Held lock."""
        self._news.append((server, message))
        if len(self._news) == 1:
            os.eventfd_write(self._bell, 1)

    def fail(self, error: PhubError) -> None:
        """End with an error for all that is under way and to come; the first one counts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            pending, self._pending = list(self._pending.values()), {}
        for one in pending:
            one.latch.fail(error)

    def close(self, error: PhubError) -> None:
        """Say farewell to the servers; `error` is for who comes later."""
        for server in range(len(self._links)):
            self.tell(server, Header(MessageKind.BYE))
        with self._lock:
            self._closing = True
            os.eventfd_write(self._bell, 1)
        if self._thread.ident is None:  # it never started
            self._release()
        else:
            self._thread.join()
        self.fail(error)
        with self._lock:  # now nobody rings any more
            os.close(self._bell)

    # --- the thread of the sockets ---

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a thread that ends silently would leave waits without end
            self.fail(InternalError(f"[zmq_ps] rank {self._rank}: {error!r}"))
            raise
        finally:
            self._release()

    def _release(self) -> None:
        for link in self._links:
            link.close(at_once=self._error is not None)
        self._context.term()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        for link in self._links:
            poller.register(link.socket, zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
        patience, deadline = sockets.IDLE_MS, float("inf")
        while time.monotonic() < deadline:
            ready = dict(poller.poll(patience))
            is_last = self._hear_news()
            for server, link in enumerate(self._links):
                if link.socket in ready:
                    self._receive(server)
                if link.monitor in ready and link.is_lost():
                    poller.unregister(link.monitor)
                    self._lose(link)
            patience = sockets.IDLE_MS if self._flush() else sockets.RETRY_MS
            if is_last:
                deadline = min(deadline, time.monotonic() + sockets.LINGER_MS / 1000)
                if self._error is not None or all(flow.idle for flow in self._flows):
                    return

    def _hear_news(self) -> bool:
        """Take over what other threads want to say; True when they will say no more."""
        with self._lock:
            news, self._news = self._news, deque()
            with contextlib.suppress(BlockingIOError):  # nobody has rung
                os.eventfd_read(self._bell)
            closing = self._closing
        for server, message in news:
            self._flows[server].put(message)
        return closing

    def _flush(self) -> bool:
        """Send what may leave; False: a queue of ZMQ is full. Nothing is sent after a failure."""
        if self._error is not None:
            return True
        done = [
            flow.flush(functools.partial(sockets.put, link.socket))
            for flow, link in zip(self._flows, self._links, strict=True)
        ]
        return all(done)

    def _receive(self, server: int) -> None:
        for _ in range(BATCH):
            frames = sockets.get(self._links[server].socket)
            if not frames:
                return
            head, *payloads = frames
            header, flow = Header.unpack(head.bytes), self._flows[server]
            if header.kind == MessageKind.CREDIT:
                flow.credited(header.nbytes)
                continue
            payload = payloads[0].buffer if payloads else None
            self._take(header, payload)
            flow.took(Message(header, payload).nbytes)

    def _take(self, header: Header, payload: Payload) -> None:
        about = header.table, header.piece
        if header.kind == MessageKind.MISSING:
            with self._lock:
                question = self._questions.pop(about, None)
            if question is not None:
                question.ranks.extend(np.frombuffer(payload or b"", np.uint32).tolist())
                question.latch.arrive()
            return
        with self._lock:
            pending = self._pending.pop(about, None)
        if pending is None:
            return  # of what has failed here meanwhile
        if header.kind == MessageKind.ERROR:
            pending.latch.fail(unpack_error(bytes(payload)))
            return
        if payload is not None and pending.target is not None:
            pending.target[:] = np.frombuffer(payload, np.uint8)
        pending.latch.arrive()

    def _lose(self, link: Link) -> None:
        lost = PeerLost(f"[zmq_ps] rank {self._rank} lost the server at {link.address}")
        self.fail(self._blame(lost))
