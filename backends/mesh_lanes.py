"""Connects every worker with every other: authenticated sockets, and lanes on them.

Of two ranks the higher one connects and the lower one accepts. On a Unix socket, which only works
within a host, shared memory follows; descriptors pass over it and nothing is left in the file
system. Messages are those of store/wire.py; nothing that arrives is unpickled or evaluated.

    hello    (connector)  nonce{16} rank
    welcome  (acceptor)   nonce{16} mac     mac = HMAC-SHA256(secret, who says it, what was said)
    proof    (connector)  mac
    rings    (acceptor)   one byte, with the memory of the rings and its bell     Unix socket only
    bell     (connector)  one byte, with its bell                                 Unix socket only

The secret is made by rank 0 and known to whoever takes part in the job's rendezvous.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from phub_collective.backends.base import Context
from phub_collective.backends.descriptors import recv_fds
from phub_collective.backends.mesh_doors import Doors, Link, Reception
from phub_collective.backends.native import load
from phub_collective.config import Config
from phub_collective.errors import AuthError, ConfigError, PeerLost, PeerTimeout
from phub_collective.machine import host_hint
from phub_collective.rendezvous.store.wire import mac, pack, receive, unpack

HANDSHAKE_S = 10.0  # for each message
MAX_HELLO = 256  # bytes of a message from somebody who has not proved to know the secret
NONCE_BYTES = 16


@dataclass(frozen=True)
class Card:
    """Where a rank is reached.

    Attributes:
        hint: equal for ranks of one host, as far as can be told without trying.
        unix: name of its abstract Unix socket; empty when it wants TCP only.
        hosts, port: of its TCP socket.
        secret: hexadecimal; only rank 0's counts.
    """

    hint: str
    unix: str
    hosts: list[str]
    port: int
    secret: str


class Handshake:
    """This rank's side of all handshakes of one mesh."""

    def __init__(self, context: Context, secret: bytes, core: Any, bell: int, ring_bytes: int):
        self._rank, self._secret = context.rank, secret
        self._core, self._bell, self._ring_bytes = core, bell, ring_bytes

    def _mac(self, who: bytes, nonces: bytes, connector: int, acceptor: int) -> bytes:
        return mac(self._secret, who, nonces, str(connector).encode(), str(acceptor).encode())

    def connect(self, sock: socket.socket, peer: int) -> Link:
        """Raises OSError, ValueError, AuthError: it is not our peer that answers."""
        sock.settimeout(HANDSHAKE_S)
        mine = secrets.token_bytes(NONCE_BYTES)
        sock.sendall(pack(mine, str(self._rank).encode()))
        theirs, proof = unpack(receive(sock, MAX_HELLO))
        nonces = mine + theirs
        if not hmac.compare_digest(proof, self._mac(b"accept", nonces, self._rank, peer)):
            raise AuthError(f"[mesh] what answers in place of rank {peer} does not know the secret")
        sock.sendall(pack(self._mac(b"connect", nonces, self._rank, peer)))
        if sock.family != socket.AF_UNIX:
            return Link(peer, sock)
        memory, bell = _receive_descriptors(sock, 2)
        try:
            socket.send_fds(sock, [b"b"], [self._bell])
        except BaseException:
            os.close(memory)
            os.close(bell)
            raise
        return Link(peer, sock, memory, bell)

    def accept(self, sock: socket.socket, expected: Container[int]) -> Link:
        """Raises OSError, ValueError, AuthError: it is none of the `expected` ranks."""
        sock.settimeout(HANDSHAKE_S)
        theirs, rank = unpack(receive(sock, MAX_HELLO))
        peer = int(rank)
        if peer not in expected:
            raise AuthError(f"[mesh] rank {peer} was not expected")
        mine = secrets.token_bytes(NONCE_BYTES)
        nonces = theirs + mine
        sock.sendall(pack(mine, self._mac(b"accept", nonces, peer, self._rank)))
        (proof,) = unpack(receive(sock, MAX_HELLO))
        if not hmac.compare_digest(proof, self._mac(b"connect", nonces, peer, self._rank)):
            raise AuthError(f"[mesh] who says it is rank {peer} does not know the secret")
        if sock.family != socket.AF_UNIX:
            return Link(peer, sock)
        memory = self._core.make_ring_memory(self._ring_bytes)
        try:
            socket.send_fds(sock, [b"m"], [memory, self._bell])
            (bell,) = _receive_descriptors(sock, 1)
        except BaseException:
            os.close(memory)
            raise
        return Link(peer, sock, memory, bell, first=True)


def connect_all(
    context: Context, name: str, core: Any, bell: int, ring_bytes: int
) -> Iterator[Link]:
    """A link to every other rank. Collective.

    Raises:
        PeerTimeout: some ranks, which are named, did not come within config.timeout.
        PeerLost: a rank cannot be reached.
        ConfigError: PHUB_LANE=shm, and a rank is on another host.
    """
    rank = context.rank
    with Doors(context) as doors:
        secret = secrets.token_hex(32) if rank == 0 else ""
        mine = Card(host_hint(), doors.unix, doors.hosts, doors.port, secret)
        cards = [
            Card(**json.loads(card))
            for card in context.rendezvous.all_gather(
                f"mesh.{name}", json.dumps(vars(mine)).encode(), context.config.start_timeout
            )
        ]
        handshake = Handshake(context, bytes.fromhex(cards[0].secret), core, bell, ring_bytes)
        deadline = time.monotonic() + context.config.timeout
        for peer in range(rank):
            yield _reach(handshake, peer, cards[peer], mine.hint, context.config)
        yield from _await(handshake, doors, rank, set(range(rank + 1, context.size)), deadline)


def _await(
    handshake: Handshake, doors: Doors, rank: int, missing: set[int], deadline: float
) -> Iterator[Link]:
    def greet(sock: socket.socket) -> Link:
        return handshake.accept(sock, missing)

    with Reception(doors, greet, len(missing), rank) as reception:
        while missing:
            link = reception.next(deadline)
            if link is None:
                ranks = tuple(sorted(missing))
                raise PeerTimeout(f"[mesh] rank {rank} waited for ranks {ranks} to connect", ranks)
            if link.peer not in missing:  # it has come twice
                link.close()
                continue
            missing.discard(link.peer)
            yield link


def _reach(handshake: Handshake, peer: int, card: Card, hint: str, config: Config) -> Link:
    """Connect to `peer`, through shared memory where that is possible and wanted."""
    failures = []
    is_near = False  # its socket of this host is there
    for family, address in _ways(card, hint, config.lane):
        sock = socket.socket(family)
        try:
            if family != socket.AF_UNIX:  # before it connects: BBR's pacing would stay
                load().choose_congestion(sock.fileno(), config.congestion)
            sock.settimeout(HANDSHAKE_S)
            sock.connect(address)
            is_near |= family == socket.AF_UNIX
            return handshake.connect(sock, peer)
        except (OSError, ValueError, AuthError) as error:
            failures.append(f"{address}: {error}")
            sock.close()
    if config.lane == "shm" and not is_near:
        raise ConfigError(f"[mesh] PHUB_LANE=shm, but rank {peer} is on another host: {failures}")
    raise PeerLost(f"[mesh] rank {peer} cannot be reached: {failures}", peer)


def _ways(card: Card, hint: str, lane: str) -> Iterator[tuple[socket.AddressFamily, Any]]:
    near = card.hint == hint
    if near and card.unix and lane != "tcp":
        yield socket.AF_UNIX, "\0" + card.unix
    if lane != "shm":
        hosts = [h for h in card.hosts if near or not h.startswith("127.")]
        yield from ((socket.AF_INET, (host, card.port)) for host in hosts)


def _receive_descriptors(sock: socket.socket, count: int) -> list[int]:
    data, descriptors = recv_fds(sock, 1, count)
    if len(data) == 1 and len(descriptors) == count:
        return descriptors
    for descriptor in descriptors:
        os.close(descriptor)
    raise ConnectionError(f"expected {count} descriptors, got {len(descriptors)}")
