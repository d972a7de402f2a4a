"""What this machine and this Python installation are: facts that several parts ask for."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import shutil
import socket
import struct
import sys
from pathlib import Path

SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
RESERVED_HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")
CONGESTION_OFFERED = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")

SIOCGIFADDR = 0x8915  # ioctl: the IPv4 address of an interface


def kernel_value(path: Path) -> str:
    """Stripped text of one of the kernel's files, "unknown" where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def version_of(package: str) -> str:
    """The version of an installed Python package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def usable_cpus() -> int:
    """CPUs that this process may run on: a container or taskset may allow few of the machine's."""
    return len(os.sched_getaffinity(0))


def find_mpirun() -> str | None:
    """The mpirun beside this Python (it belongs to the MPI that mpi4py loads), else the one on
    PATH, else None."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")


def host_hint() -> str:
    """What processes of one host have in common; others may have it too (see
    rendezvous/hosts.py)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/thread-self/ns/net')}"
    except OSError:
        return socket.gethostname()


def own_addresses() -> list[str]:
    """This host's IPv4 addresses, loopback first, which is the quickest to try."""
    return list(dict.fromkeys(["127.0.0.1", *interface_addresses().values()]))


def interface_addresses() -> dict[str, str]:
    """The first IPv4 address of each network interface that has one, by the interface's name."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, request)
                found[name] = socket.inet_ntoa(answer[20:24])
    return found
