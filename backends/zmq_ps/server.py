"""A server: one ROUTER socket, one thread that takes whole arrays from its queue, and the threads
that all work on each of them.

What bounds it, beyond the link: ZMQ receives each array into memory of its own, from which it is
added; an addition begins when a whole array is there, and occupies all threads while other arrays
wait; and every message passes the interpreter, on one thread.
"""

from __future__ import annotations

import functools
import logging
import time
from dataclasses import dataclass

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator

from phub_collective.backends.zmq_ps import sockets
from phub_collective.backends.zmq_ps.flow import Flow
from phub_collective.backends.zmq_ps.job import Job, Reply
from phub_collective.backends.zmq_ps.limits import QUEUE_BYTES, Limits
from phub_collective.backends.zmq_ps.threads import Threads
from phub_collective.backends.zmq_ps.wire import Header, Message, MessageKind
from phub_collective.errors import ConfigError, PhubError

log = logging.getLogger(__name__)

BATCH = 16  # messages that are taken in before answers are sent
LAST_WORDS_S = 5.0  # for what is still to be sent when the starter of this server has ended
DOMAIN = "zmq_ps"


@dataclass(frozen=True)
class ServerOptions:
    """How a server runs.

    Attributes:
        port: 0: any free one.
        threads: of the aggregation.
        timeout: seconds of silence until a worker counts as lost.
        queue_bytes: see limits.py.
    """

    workers: int
    token: str
    host: str = "127.0.0.1"
    port: int = 0
    threads: int = 1
    timeout: float = 30.0
    queue_bytes: int = QUEUE_BYTES


class Server:
    """See the module. For one thread, but for `stop`.

    Attributes:
        address: HOST:PORT that it listens on.
    """

    def __init__(self, options: ServerOptions) -> None:
        """Raises ConfigError when it cannot listen there."""
        self._workers = options.workers
        self._threads = Threads(options.threads)
        self._job = Job(options.workers, self._threads)
        window = Limits.of(options.workers, options.queue_bytes).window
        self._flows = [Flow(window) for _ in range(options.workers)]
        self._context: sockets.Context = zmq.Context(io_threads=max(1, options.threads // 4))
        self._guard = ThreadAuthenticator(self._context)
        self._guard.start()
        self._guard.configure_plain(DOMAIN, {sockets.USER: options.token})
        self._router = self._context.socket(zmq.ROUTER)
        self.address = self._listen(options)
        self._present: set[int] = set()  # ranks that have said something, and not BYE
        self._gone: set[int] = set()  # ranks that ZMQ has no connection to any more
        self._was_used = self._stopping = False

    def _listen(self, options: ServerOptions) -> str:
        router = self._router
        sockets.tune(router, options.timeout)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue is an error, not a lost message
        router.setsockopt(zmq.PLAIN_SERVER, 1)
        router.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        try:
            router.bind(f"tcp://{options.host}:{options.port or '*'}")
        except zmq.ZMQError as error:
            where = f"{options.host}:{options.port}"
            self.close()
            raise ConfigError(f"[zmq_ps] cannot listen on {where}: {error}") from None
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        return endpoint.removeprefix("tcp://")

    def stop(self) -> None:
        """Make `run` end when all is sent; from any thread, and soon rather than at once."""
        self._stopping = True

    def run(self, lifeline: int | None = None) -> None:
        """Serve one job: until its workers are gone, or the descriptor `lifeline` is at its end
        and what was to be sent is sent."""
        poller = zmq.Poller()
        for source in (self._router, *([] if lifeline is None else [lifeline])):
            poller.register(source, zmq.POLLIN)
        patience = sockets.IDLE_MS
        while not (self._stopping or (self._was_used and not self._present)):
            ready = dict(poller.poll(patience))
            if lifeline in ready:
                poller.unregister(lifeline)
                self.stop()
            if not ready and patience == sockets.IDLE_MS:
                self._look_for_all()
            self._receive()
            patience = sockets.IDLE_MS if self._send() else sockets.RETRY_MS
        self._say_last_words(poller)

    def _say_last_words(self, poller: zmq.Poller) -> None:
        deadline = time.monotonic() + LAST_WORDS_S
        while self._present and time.monotonic() < deadline:
            if all(flow.idle for flow in self._flows):
                break
            poller.poll(sockets.RETRY_MS)
            self._receive()  # credits
            self._send()

    def _look_for_all(self) -> None:
        """Nothing has come for a while: find out who cannot be reached any more."""
        for rank in self._present:
            self._put(rank, Message(Header(MessageKind.CREDIT)))

    def _receive(self) -> None:
        """Take whole messages from ZMQ's queue, which is the dispatcher's, and act on each."""
        for _ in range(BATCH):
            frames = sockets.get(self._router)
            if not frames:
                return
            try:
                self._take(frames)
            except PhubError as error:  # of somebody who has the token: a broken worker
                log.warning("%s", error)

    def _take(self, frames: list[zmq.Frame]) -> None:
        name, head, *payloads = frames
        rank = sockets.rank_of(name.bytes, self._workers)
        flow, header = self._flows[rank], Header.unpack(head.bytes)
        self._note(rank, header)
        if header.kind == MessageKind.CREDIT:
            return flow.credited(header.nbytes)
        payload = np.frombuffer(payloads[0].buffer, np.uint8) if payloads else None
        nbytes = Message(header, payload).nbytes
        for reply in self._job.take(rank, header, payload):
            self._answer(reply)
        flow.took(nbytes)
        return None

    def _note(self, rank: int, header: Header) -> None:
        """Who is there: a worker's first message is an empty credit, its last BYE."""
        self._was_used = True
        if header.kind == MessageKind.BYE:
            self._present.discard(rank)
        else:
            self._present.add(rank)

    def _answer(self, reply: Reply) -> None:
        """One frame for all: the array is sent from where it stands."""
        payload = reply.payload
        if isinstance(payload, np.ndarray):
            payload = zmq.Frame(payload, copy=False) if payload.size else None
        for rank in reply.ranks:
            self._flows[rank].put(Message(reply.header, payload))

    def _send(self) -> bool:
        """False: a queue of ZMQ is full."""
        done = [
            flow.flush(functools.partial(self._put, rank)) for rank, flow in enumerate(self._flows)
        ]
        while self._gone:
            rank = self._gone.pop()
            self._present.discard(rank)
            for reply in self._job.leave(rank, "was lost"):
                self._answer(reply)
        return all(done)

    def _put(self, rank: int, message: Message) -> bool:
        try:
            return sockets.put(self._router, message, sockets.identity(rank))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._gone.add(rank)
            return True  # it needs no answer any more

    def close(self) -> None:
        """Give everything back; idempotent."""
        if self._context.closed:
            return
        self._router.close()
        self._guard.stop()
        self._threads.close()
        self._context.term()
