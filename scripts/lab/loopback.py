"""What this host's TCP loopback can move at most: every rank, and a process of its own beside it,
send each other blocks both ways and do nothing with them. Rank 0 writes what all moved together."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from phub_collective.session import Session

BLOCK = 256 << 10  # bytes of a send or receive
SECONDS = 3.0
LEAD_S = 0.5


def both_ways(sock: socket.socket, until: float) -> int:
    """Send and receive until a moment of the monotonic clock; bytes received until then."""
    sender = threading.Thread(target=_send, args=(sock, until))
    sender.start()
    received, buffer = 0, bytearray(BLOCK)
    while count := sock.recv_into(buffer):
        received += count if time.monotonic() < until else 0
    sender.join()
    return received


def _send(sock: socket.socket, until: float) -> None:
    block = bytes(BLOCK)
    while time.monotonic() < until:
        sock.sendall(block)
    sock.shutdown(socket.SHUT_WR)


def _partner(address: tuple[str, int], begin: float, told: multiprocessing.Queue[int]) -> None:
    with socket.create_connection(address) as sock:
        time.sleep(max(0.0, begin - time.monotonic()))
        told.put(both_ways(sock, begin + SECONDS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    with Session.open() as session, socket.create_server(("127.0.0.1", 0)) as server:
        rendezvous = session.context.rendezvous
        now = json.dumps(time.monotonic() + LEAD_S).encode()
        begin = max(json.loads(one) for one in rendezvous.all_gather("loopback.begin", now))
        told: multiprocessing.Queue[int] = multiprocessing.Queue()
        process = multiprocessing.Process(target=_partner, args=(server.getsockname(), begin, told))
        process.start()
        with server.accept()[0] as sock:
            time.sleep(max(0.0, begin - time.monotonic()))
            received = both_ways(sock, begin + SECONDS)
        mine = received + told.get(timeout=SECONDS + 30)
        process.join()
        ranks = rendezvous.all_gather("loopback.moved", json.dumps(mine).encode())
        # What one end receives the other has sent: both count, as they do for an exchange.
        moved = 2 * sum(json.loads(one) for one in ranks)
        if session.rank == 0:
            args.json.write_text(json.dumps({"bytes_per_s": moved / SECONDS}))


if __name__ == "__main__":
    main()
