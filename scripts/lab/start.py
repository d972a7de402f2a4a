"""Starts things on the lab's hosts: PBoxes, and a command on every worker through phubrun."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from lab import network
from lab.topology import Host, Network, Shape
from phub_collective.launch.processes import die_with_parent

PHUB = [sys.executable, "-m", "phub_collective"]
PHUBRUN = [sys.executable, "-m", "phub_collective.launch.cli"]


class Pbox:
    """A PBox that serves: `address` for PHUB_PBOX, and the token that creates jobs."""

    def __init__(self, address: str, admin_token: str) -> None:
        self.address, self.admin_token = address, admin_token


@contextlib.contextmanager
def pbox(lab: str, made: Network, cores: int = 0) -> Iterator[Pbox | None]:
    """The first rack's PBox, on all of its links, as long as the block lasts; None where the lab
    has no PBox. `cores`: 0 for one per link.

    Raises:
        LabError: it does not start.
    """
    if not made.pboxes:
        yield None
        return
    host, token = made.pboxes[0], secrets.token_hex(16)
    serve = [*PHUB, "serve", "--lifeline", "--cores", str(cores or len(host.links))]
    with subprocess.Popen(
        [*network.inside(lab, host.name), *serve, "--interfaces", ",".join(host.addresses)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PHUB_ADMIN_TOKEN": token},
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        if "serving on " not in said:
            raise network.LabError("the PBox does not start; see its output")
        yield Pbox(said.partition("serving on ")[2].split(",")[0].split()[0], token)
        assert process.stdin is not None
        process.stdin.close()


def variables(shape: Shape, server: Pbox | None) -> dict[str, str]:
    """What the command on the workers is told."""
    told = {"PHUB_LAB_DILATION": f"{shape.dilation:g}"}
    if server is not None:
        told |= {"PHUB_PBOX": server.address, "PHUB_ADMIN_TOKEN": server.admin_token}
    return told


def phubrun(
    lab: str,
    made: Network,
    words: Sequence[str],
    told: Mapping[str, str],
    workers: Sequence[Host] | None = None,
) -> subprocess.Popen[bytes]:
    """Run a command on every worker, or on some, from the host `head`."""
    chosen = made.workers if workers is None else workers
    hosts = ",".join(network.namespace(lab, worker.name) for worker in chosen)
    return _launch(lab, made.head, ["-H", hosts, "--agent", "ip netns exec"], words, told)


def phubrun_here(
    lab: str, made: Network, ranks: int, words: Sequence[str], told: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Run a command as so many ranks on the host `head`, over its loopback."""
    return _launch(lab, made.head, ["-np", str(ranks)], words, told)


def _launch(
    lab: str, host: Host, flags: Sequence[str], words: Sequence[str], told: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    environment, parent = {"OMP_NUM_THREADS": "1", **os.environ, **told}, os.getpid()
    return subprocess.Popen(
        [*network.inside(lab, host.name), *PHUBRUN, *flags, "--", *words],
        env=environment,
        preexec_fn=lambda: die_with_parent(parent),
    )
