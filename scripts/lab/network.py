"""Makes the network of a lab out of namespaces, veth pairs, bridges and token buckets, and removes
it. A lab is known by the names of its namespaces alone: `phub-<lab>-<host>`. Needs root."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lab.topology import Host, Link, Network

PREFIX = "phub-"
MIN_BURST = 128 << 10  # bytes; a smaller bucket does not fill the link
BURST_S = 0.002  # of line rate
QUEUE_MS = 20
CONGESTION = "reno"  # the same for everybody, allowed to all users
END_S = 10.0  # how long killed processes may take to vanish


class LabError(Exception):
    """The lab cannot be made here, or something in it failed; the message says what to do."""


def require_kernel() -> None:
    """Raise LabError where a lab cannot be: no root, no tools, no namespaces, no shaping."""
    if os.geteuid() != 0:
        raise LabError("the rack lab makes network namespaces: run it as root (sudo)")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise LabError(f"the rack lab needs {tool!r}: install the package iproute2")
    name = f"{PREFIX}try{os.getpid()}"
    try:
        run(["ip", "netns", "add", name])
        lines = ["link add name x0 type veth peer name x1", "link add name br type bridge"]
        run(["ip", "-n", name, "-batch", "-"], "\n".join(lines) + "\n")
        run(["ip", "netns", "exec", name, "tc", *_bucket("x0", 1e8)])
    except LabError as error:
        raise LabError(f"this kernel cannot play a rack: {error}") from error
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def run(command: Sequence[str], text: str | None = None) -> str:
    """Run a command and give its output.

    Raises:
        LabError: it failed.
    """
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def namespace(lab: str, host: str) -> str:
    return f"{PREFIX}{lab}-{host}"


def inside(lab: str, host: str) -> list[str]:
    """What to put in front of a command to run it on a host."""
    return ["ip", "netns", "exec", namespace(lab, host)]


def build(lab: str, network: Network) -> None:
    """Make everything; nothing of the lab's name may exist.

    Raises:
        LabError: it exists, or the kernel refused; nothing is left then.
    """
    if namespaces(lab):
        raise LabError(f"the lab {lab!r} exists: take it down, or choose another --name")
    try:
        _make(lab, network)
    except BaseException:
        remove(lab)
        raise


def _make(lab: str, network: Network) -> None:
    places = [*network.switches, *(host.name for host in network.hosts)]
    run(["ip", "-batch", "-"], "".join(f"netns add {namespace(lab, one)}\n" for one in places))
    for switch in network.switches:
        bridge = ["link add name br type bridge", "link set dev br up"]
        _batch(lab, switch, ["link set dev lo up", *bridge])
    for index, (one, other, rate) in enumerate(network.trunks):
        _cable(lab, (one, f"trunk{index}"), (other, f"trunk{index}"))
        for switch in (one, other):
            _batch(lab, switch, [f"link set dev trunk{index} master br up"])
            run([*inside(lab, switch), "tc", *_bucket(f"trunk{index}", rate)])
    for host in network.hosts:
        _settle(lab, host)


def _settle(lab: str, host: Host) -> None:
    """A host's addresses, links and rates."""
    # Several addresses and links in one network: each link answers for its own addresses only.
    settings = {
        "net.ipv4.conf.all.arp_ignore": "1",
        "net.ipv4.conf.all.arp_announce": "2",
        "net.ipv4.tcp_congestion_control": CONGESTION,
        # Pauses are longer in a dilated rack, but not the 200 ms after which the kernel takes a
        # connection for idle and lets it start slowly again.
        "net.ipv4.tcp_slow_start_after_idle": "0",
    }
    _batch(lab, host.name, ["link set dev lo up"])
    words = [f"{key}={value}" for key, value in settings.items()]
    run([*inside(lab, host.name), "sysctl", "-qw", *words])
    for link in host.links:
        _cable(lab, (host.name, link.device), (link.switch, link.port))
        adding = [f"addr add {address}/24 dev {link.device}" for address in link.addresses]
        _batch(lab, host.name, [*adding, f"link set dev {link.device} up"])
        _batch(lab, link.switch, [f"link set dev {link.port} master br up"])
        if link.rate:
            run([*inside(lab, host.name), "tc", *_bucket(link.device, link.rate)])
            run([*inside(lab, link.switch), "tc", *_bucket(link.port, link.rate)])
    if host.pairs:
        _shape_pairs(lab, host, host.links[0])


def _shape_pairs(lab: str, host: Host, link: Link) -> None:
    """Replace a host's bucket by one for each destination that has a rate of its own, below one
    for the whole link."""
    device, line = link.device, link.rate
    lines = [
        f"qdisc replace dev {device} root handle 1: htb default 1",
        f"class add dev {device} parent 1: classid 1:ffff htb rate {_tc_rate(line)} {_htb(line)}",
        f"class add dev {device} parent 1:ffff classid 1:1 htb rate {_tc_rate(line)} {_htb(line)}",
    ]
    for index, (address, rate) in enumerate(host.pairs, start=2):
        child = f"1:{index:x}"
        shaped = f"htb rate {_tc_rate(rate)} ceil {_tc_rate(rate)} {_htb(rate)}"
        lines.append(f"class add dev {device} parent 1:ffff classid {child} {shaped}")
        match = f"u32 match ip dst {address}/32 flowid {child}"
        lines.append(f"filter add dev {device} parent 1: protocol ip prio 1 {match}")
    run([*inside(lab, host.name), "tc", "-batch", "-"], "\n".join(lines) + "\n")


def _cable(lab: str, one: tuple[str, str], other: tuple[str, str]) -> None:
    ends = [("name", *reversed(one)), ("peer name", *reversed(other))]
    words = [f"{word} {device} netns {namespace(lab, host)}" for word, device, host in ends]
    run(["ip", *f"link add {words[0]} type veth {words[1]}".split()])


def _batch(lab: str, host: str, lines: Iterable[str]) -> None:
    run(["ip", "-n", namespace(lab, host), "-batch", "-"], "".join(f"{line}\n" for line in lines))


def burst(rate: float) -> int:
    """Bytes of a bucket for a rate in bits per second."""
    return max(MIN_BURST, int(rate / 8 * BURST_S))


def _tc_rate(rate: float) -> str:
    return f"{round(rate)}bit"


def _bucket(device: str, rate: float) -> list[str]:
    words = f"qdisc replace dev {device} root tbf rate {_tc_rate(rate)} burst {burst(rate)}"
    return [*words.split(), "latency", f"{QUEUE_MS}ms"]


def _htb(rate: float) -> str:
    return f"burst {burst(rate)} cburst {burst(rate)} quantum 60000"


# --- what is there, and removing it ---


def namespaces(lab: str = "") -> list[str]:
    """Namespaces of a lab; of all labs without a name."""
    start = f"{PREFIX}{lab}-" if lab else PREFIX
    listed = [line.split()[0] for line in run(["ip", "netns", "list"]).splitlines() if line]
    return sorted(name for name in listed if name.startswith(start))


def labs() -> list[str]:
    found = (re.fullmatch(rf"{PREFIX}(.+)-[^-]+", name) for name in namespaces())
    return sorted({match[1] for match in found if match})


def processes(lab: str) -> list[int]:
    """Processes on the hosts of a lab."""
    found = []
    for name in namespaces(lab):
        found += [int(word) for word in run(["ip", "netns", "pids", name]).split()]
    return found


def remove(lab: str) -> None:
    """End all processes on the lab's hosts and remove it. Idempotent.

    Raises:
        LabError: a process does not end.
    """
    deadline = time.monotonic() + END_S
    while left := processes(lab):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LabError(f"processes of the lab {lab!r} do not end: {left}")
        time.sleep(0.02)
    for name in namespaces(lab):
        run(["ip", "netns", "del", name])


# --- labs of one command ---


def _claim(lab: str) -> socket.socket:
    """Held by the process that a temporary lab belongs to; gone with it, however it ends."""
    claim = socket.socket(socket.AF_UNIX)
    claim.bind(f"\0{PREFIX}lab-{lab}")
    return claim


def remove_abandoned() -> list[str]:
    """Remove the temporary labs whose process is gone; their names."""
    removed = []
    for lab in labs():
        if not re.fullmatch(r"t\d+", lab):
            continue
        try:
            _claim(lab).close()
        except OSError:
            continue  # somebody holds it
        remove(lab)
        removed.append(lab)
    return removed


@contextlib.contextmanager
def temporary(network: Network) -> Iterator[str]:
    """A lab that lasts as long as the block, and is removed at a lab's next start if this process
    is killed; its name."""
    remove_abandoned()
    lab = f"t{os.getpid()}"
    with _claim(lab):
        build(lab, network)
        try:
            yield lab
        finally:
            remove(lab)


# --- counters ---


def counters(lab: str, host: str, device: str) -> tuple[int, int]:
    """Bytes that a device has received and sent, headers included."""
    folder = Path("/sys/class/net", device, "statistics")
    names = [str(folder / name) for name in ("rx_bytes", "tx_bytes")]
    # /sys shows the network namespace of whoever mounted it: ip netns exec mounts its own.
    received, sent = run([*inside(lab, host), "cat", *names]).split()
    return int(received), int(sent)
