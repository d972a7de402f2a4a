"""What the kernel counts: bytes over this host's links, and waiting for processors."""

from __future__ import annotations

import re
from pathlib import Path

DEVICES = Path("/proc/net/dev")
PRESSURE = Path("/proc/pressure/cpu")


def moved() -> tuple[int, int]:
    """Bytes received and sent over all links of this host (network namespace) but loopback."""
    received = sent = 0
    for line in DEVICES.read_text().splitlines()[2:]:
        device, _, fields = line.partition(":")
        if device.strip() != "lo":
            numbers = fields.split()
            received, sent = received + int(numbers[0]), sent + int(numbers[8])
    return received, sent


def waited() -> float:
    """Seconds in which some process of the machine waited for a processor, since its start."""
    found = re.search(r"^some .*total=(\d+)", PRESSURE.read_text(), re.M)
    assert found is not None
    return int(found[1]) / 1e6
