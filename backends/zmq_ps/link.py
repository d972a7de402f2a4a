"""A worker's connection to one server, and the news of its end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from phub_collective.backends.zmq_ps import sockets
from phub_collective.errors import AuthError, PeerLost

CONNECT_S = 10.0  # for one address, to the end of the handshake
SUCCEEDED = zmq.EVENT_HANDSHAKE_SUCCEEDED
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class Link:
    """A DEALER socket that is connected once and never again: what a server held is lost with it.

    Attributes:
        socket: for `sockets.put` and `sockets.get`.
        monitor: readable when ZMQ says something about the connection.
    """

    def __init__(
        self, context: sockets.Context, address: str, token: str, rank: int, timeout: float
    ) -> None:
        """
        Raises:
            PeerLost: nobody answers there.
            AuthError: it is another job's server.
        """
        self.address = address
        self.socket = context.socket(zmq.DEALER)
        sockets.tune(self.socket, timeout)
        self.socket.setsockopt(zmq.ROUTING_ID, sockets.identity(rank))
        self.socket.setsockopt_string(zmq.PLAIN_USERNAME, sockets.USER)
        self.socket.setsockopt_string(zmq.PLAIN_PASSWORD, token)
        self.socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self.socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_S * 1000))
        self.monitor = self.socket.get_monitor_socket(SUCCEEDED | REFUSED | LOST)
        self.socket.connect(f"tcp://{address}")
        try:
            self._await_handshake()
        except BaseException:
            self.close(at_once=True)
            raise

    def _await_handshake(self) -> None:
        deadline = time.monotonic() + CONNECT_S
        while self.monitor.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            event = recv_monitor_message(self.monitor)["event"]
            if event & SUCCEEDED:
                return
            if event & REFUSED:
                raise AuthError(
                    f"[zmq_ps] the server at {self.address} refused the job's token; is it another "
                    "job's? PHUB_TOKEN must be what the server was started with"
                )
            raise PeerLost(f"[zmq_ps] no server answers at {self.address}")
        raise PeerLost(f"[zmq_ps] no server answered at {self.address} within {CONNECT_S:g} s")

    def is_lost(self) -> bool:
        """Whether the monitor has said that the connection has ended."""
        while self.monitor.poll(0):
            if recv_monitor_message(self.monitor)["event"] & LOST:
                return True
        return False

    def close(self, at_once: bool) -> None:
        """`at_once`: what is still to be sent is dropped."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0 if at_once else sockets.LINGER_MS)


def connect(
    context: sockets.Context, addresses: Sequence[str], token: str, rank: int, timeout: float
) -> Link:
    """A link to the first of a server's addresses that leads to it."""
    failures: list[PeerLost | AuthError] = []
    for address in addresses:
        try:
            return Link(context, address, token, rank, timeout)
        except (PeerLost, AuthError) as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    raise PeerLost(
        f"[zmq_ps] rank {rank} found a server at none of its host's addresses; open one of them: "
        + "; ".join(map(str, failures))
    )
