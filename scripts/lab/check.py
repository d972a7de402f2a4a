"""Is the lab what it should be? The rate of a link as TCP sees it, and who was the limit of a run:
the links or the processors."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass

from lab import counters, network
from lab.topology import MTU_SHARE, Host, Network

TOLERANCE = 0.03  # of the rate
ATTEMPTS = 3
SECONDS = 0.8  # of sending, beside the first of it, which a full bucket lets pass at once
DIRECTIONS = ("received", "sent")
BUSY_LINK, PRESSED = 0.9, 0.25  # from when on a link, or the processors, count as the limit

SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as sock:
    end, block = time.monotonic() + float(sys.argv[3]), bytes(1 << 16)
    while time.monotonic() < end:
        sock.sendall(block)
"""
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    sock = server.accept()[0]
    skipped, buffer = 0, bytearray(1 << 18)
    while skipped < int(sys.argv[2]):
        skipped += sock.recv_into(buffer)
    begin, counted = time.monotonic(), 0
    while count := sock.recv_into(buffer):
        counted += count
        end = time.monotonic()
print(counted * 8 / (end - begin))
"""


def goodput(lab: str, sender: Host, receiver: Host, subnet: int, rate: float) -> float:
    """Bits of payload per second that one TCP connection carries between two hosts, to the
    receiver's address in a subnet; `rate`: of the link, in bits per second."""
    target = receiver.addresses[subnet]
    skip = 2 * network.burst(rate) + int(rate / 8 * network.QUEUE_MS / 1e3)
    receive = [*network.inside(lab, receiver.name), sys.executable, "-c", RECEIVE]
    with subprocess.Popen([*receive, target, str(skip)], stdout=subprocess.PIPE, text=True) as end:
        assert end.stdout is not None
        port = end.stdout.readline().strip()
        seconds = SECONDS + skip * 8 / rate
        send = [*network.inside(lab, sender.name), sys.executable, "-c", SEND]
        network.run([*send, target, port, str(seconds)])
        return float(end.stdout.readline())


def links(lab: str, made: Network) -> list[str]:
    """Measure links of the first and the last worker, both ways; a line for each.

    Raises:
        LabError: one is off by more than TOLERANCE.
    """
    lines = []
    for worker in dict.fromkeys((made.workers[0], made.workers[-1])):
        partner = neighbour(made, worker)
        if partner is None:
            lines.append(f"{worker.name}: its link was not measured, it is alone in its rack")
            continue
        rate = worker.links[0].rate
        for sender, receiver in ((worker, partner), (partner, worker)):
            measured, share = settled(lab, sender, receiver, rate)
            text = f"{sender.name} -> {receiver.name}: {measured / 1e6:.1f} Mbit/s of payload, "
            text += f"{share:.3f} of what {rate / 1e6:g} Mbit/s carry"
            if abs(share - 1) > TOLERANCE:
                raise network.LabError(f"the lab's links are not what was asked for: {text}")
            lines.append(text)
    return lines


def settled(lab: str, sender: Host, receiver: Host, rate: float) -> tuple[float, float]:
    """(bits of payload per second, their share of what the rate carries), measured again where it
    is off: a busy machine disturbs a measurement now and then, a wrong rate stays wrong."""
    for _ in range(ATTEMPTS):
        measured = goodput(lab, sender, receiver, 0, rate)
        share = measured / (rate * MTU_SHARE)
        if abs(share - 1) <= TOLERANCE:
            break
    return measured, share


def neighbour(made: Network, worker: Host) -> Host | None:
    """A host in the same rack with a link as fast as the worker's and no rates of pairs between
    them: the PBox, or another worker."""
    for host in (*made.pboxes, *made.workers):
        near = host is not worker and host.links[0].switch == worker.links[0].switch
        if near and not _paired(worker, host) and not _paired(host, worker):
            return host
    return None


def _paired(sender: Host, receiver: Host) -> bool:
    return any(address in receiver.addresses for address, _ in sender.pairs)


@dataclass(frozen=True)
class Sample:
    """The state of a lab at a moment: seconds, and bytes by (host, device, direction)."""

    at: float
    waited: float  # seconds in which some process waited for a processor, since the start
    moved: dict[tuple[str, str, str], int]


def sample(lab: str, made: Network) -> Sample:
    moved = {}
    for host in made.hosts:
        for link in host.links:
            counted = network.counters(lab, host.name, link.device)
            for direction, nbytes in zip(DIRECTIONS, counted, strict=True):
                moved[host.name, link.device, direction] = nbytes
    return Sample(time.monotonic(), counters.waited(), moved)


@dataclass(frozen=True)
class Use:
    """What a run made of the machine between two samples, as shares of its time.

    Attributes:
        link: of the busiest shaped link and direction, of its rate.
        pressure: in which a process had to wait for a processor.
        nbytes: that all workers' links moved, both ways.
        pbox_bytes: that all PBoxes' links moved, both ways.
    """

    link: float
    pressure: float
    nbytes: int
    pbox_bytes: int = 0

    @property
    def cpu_bound(self) -> bool:
        """No link was the limit, and the processors were short."""
        return self.link < BUSY_LINK and self.pressure > PRESSED

    def __str__(self) -> str:
        mark = "; cpu-bound" if self.cpu_bound else ""
        moved = f"{self.nbytes / 1e6:.1f} MB over the workers' links"
        return f"busiest link {self.link:.0%}, cpu pressure {self.pressure:.0%}, {moved}{mark}"


def use(made: Network, before: Sample, after: Sample) -> Use:
    seconds = after.at - before.at
    busiest, workers, pboxes = 0.0, 0, 0
    for host in made.hosts:
        for link in host.links:
            keys = [(host.name, link.device, direction) for direction in DIRECTIONS]
            moved = [after.moved[key] - before.moved[key] for key in keys]
            workers += sum(moved) if host in made.workers else 0
            pboxes += sum(moved) if host in made.pboxes else 0
            if link.rate:
                busiest = max(busiest, max(moved) * 8 / seconds / link.rate)
    return Use(busiest, (after.waited - before.waited) / seconds, workers, pboxes)
