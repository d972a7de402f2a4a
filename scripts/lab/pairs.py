"""Measures the rate between every pair of hosts, one pair at a time, and tells groups from it.
Started on every host of a lab by phubrun; rank 0 writes what was found."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.topology import MTU_SHARE
from phub_collective.machine import own_addresses
from phub_collective.rendezvous import Rendezvous
from phub_collective.session import Session

SKIP_BYTES = 512 << 10  # what full buckets let pass at once is not counted
COUNT_BYTES = 6 << 20
BLOCK = bytes(1 << 16)
LIMIT_S = 30.0
APART = 1.25  # times the slower rates: from when on two levels are two

Rates = list[list[float | None]]


def send(address: str, port: int) -> None:
    with socket.create_connection((address, port), LIMIT_S) as sock:
        for _ in range((SKIP_BYTES + COUNT_BYTES) // len(BLOCK)):
            sock.sendall(BLOCK)


def receive(server: socket.socket) -> float:
    """Bits of payload per second of one connection."""
    sock = server.accept()[0]
    sock.settimeout(LIMIT_S)
    buffer, begin, skipped, counted = bytearray(1 << 16), 0.0, 0, 0
    with sock:
        while count := sock.recv_into(buffer):
            if skipped < SKIP_BYTES:
                skipped += count
                begin = time.monotonic()
            else:
                counted += count
        return counted * 8 / (time.monotonic() - begin)


def probe(rendezvous: Rendezvous, rank: int, size: int) -> Rates:
    """Payload bits per second from each rank (line) to each rank (column). Collective."""
    with socket.create_server((own_addresses()[-1], 0)) as server:
        server.settimeout(LIMIT_S * size * size)
        told = rendezvous.all_gather("pairs.doors", json.dumps(server.getsockname()).encode())
        doors = [json.loads(one) for one in told]
        rates: Rates = [[None] * size for _ in range(size)]
        for sender in range(size):
            for receiver in range(size):
                if sender == receiver:
                    continue
                measured = b""
                if rank == sender:
                    send(*doors[receiver])
                elif rank == receiver:
                    measured = json.dumps(receive(server)).encode()
                answers = rendezvous.all_gather("pairs.rate", measured)
                rates[sender][receiver] = float(json.loads(answers[receiver]))
    return rates


def groups_of(rates: Sequence[Sequence[float | None]]) -> list[list[int]]:
    """Hosts that reach each other at the higher of two levels of rates; one group where there is
    one level. The levels part at the widest gap, as a factor, between sorted rates."""
    hosts = range(len(rates))
    pairs = {
        (a, b): min(rates[a][b] or 0.0, rates[b][a] or 0.0) for a in hosts for b in hosts if a < b
    }
    levels = sorted(pairs.values())
    gaps = [(high / low, high) for low, high in zip(levels, levels[1:], strict=False)]
    factor, limit = max(gaps, default=(1.0, 0.0))
    if factor < APART:
        return [list(hosts)]
    groups: list[list[int]] = []
    for host in hosts:
        near = [g for g in groups if any(pairs[other, host] >= limit for other in g)]
        joined = sorted([host, *(member for group in near for member in group)])
        groups = [group for group in groups if group not in near] + [joined]
    return sorted(groups)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    factor = float(os.environ.get("PHUB_LAB_DILATION", "1")) / 1e9 / MTU_SHARE
    with Session.open() as session:
        rates = probe(session.context.rendezvous, session.rank, session.size)
        if session.rank == 0:
            played = [[None if r is None else r * factor for r in line] for line in rates]
            args.json.write_text(json.dumps({"gbps": played, "groups": groups_of(rates)}))


if __name__ == "__main__":
    main()
