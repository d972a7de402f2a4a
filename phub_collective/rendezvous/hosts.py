"""Which ranks share a host, as far as it matters: can they pass each other descriptors?

Host names and boot ids do not tell (containers and network namespaces share or fake them, copies
of a virtual machine have the same), so it is tried: two processes share a host when one can
connect to an abstract Unix socket of the other. Such a socket leaves no file behind.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket

from phub_collective.machine import host_hint
from phub_collective.rendezvous import Rendezvous

PROBE_S = 5.0  # connecting to a local socket takes microseconds


def _reachable(name: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(PROBE_S)
        with contextlib.suppress(OSError):
            probe.connect("\0" + name)
            return True
    return False


def ranks_of_this_host(rendezvous: Rendezvous) -> list[int]:
    """The ranks that share this rank's host, itself included, in order. Collective; errors as in
    `hosts_of`."""
    return next(ranks for ranks in hosts_of(rendezvous) if rendezvous.rank in ranks)


def hosts_of(rendezvous: Rendezvous) -> list[list[int]]:
    """The ranks of each host, in order; hosts by their lowest rank. Equal on all ranks. Collective.

    Raises:
        PeerLost, PeerTimeout: as `Rendezvous.all_gather`.
    """
    name, hint = f"phub-host-{secrets.token_hex(16)}", host_hint()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen(rendezvous.size)  # nobody accepts: being queued is proof enough
        mine = json.dumps([hint, name]).encode()
        cards = [json.loads(card) for card in rendezvous.all_gather("host.card", mine)]
        # Everybody looks for the lowest rank it can reach, which all of its host agree about.
        leader = next(
            rank
            for rank, (their_hint, their_name) in enumerate(cards)
            if rank == rendezvous.rank or (their_hint == hint and _reachable(their_name))
        )
        told = rendezvous.all_gather("host.leader", str(leader).encode())
    leaders = [int(text) for text in told]
    return [
        [rank for rank, theirs in enumerate(leaders) if theirs == one]
        for one in sorted(set(leaders))
    ]
