"""The hosts of a job: reading `-H`, and handing a job of several hosts to an MPI's mpirun.

We keep no fleet of ssh connections: mpirun, srun and torchrun do that well, and a script finds its
rank under each of them.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping, Sequence

from phub_collective.errors import BackendUnavailable, ConfigError
from phub_collective.machine import find_mpirun

PROBE_S = 30.0


def parse_hosts(text: str) -> dict[str, int]:
    """ "a:2,b" -> {"a": 2, "b": 1}: slots per host, in the order given.

    Raises:
        ConfigError: it does not read so, or a host stands there twice.
    """
    hosts: dict[str, int] = {}
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        count = slots if colon else "1"
        if not name or not count.isdecimal() or int(count) < 1 or name in hosts:
            raise ConfigError(f"[launch] -H {text!r}: expected HOST[:SLOTS],... each host once")
        hosts[name] = int(count)
    return hosts


def is_here(host: str) -> bool:
    """True when `host` is a name or loopback address of this machine."""
    own = socket.gethostname()
    return host in ("localhost", own, own.partition(".")[0]) or host.startswith("127.")


def mpirun_command(
    program: str,
    hosts: Mapping[str, int],
    size: int,
    environment: Mapping[str, str],
    command: Sequence[str],
) -> list[str]:
    """The command that has `program`, some MPI's mpirun, start the job. Values of variables do
    not stand in it, only names where this mpirun wants them named: those of all PHUB_* variables
    in `environment`, with which it is run, since Open MPI gives other hosts no others.

    Raises:
        BackendUnavailable: the mpirun does not run.
    """
    try:
        asked = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=PROBE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"[launch] {program} does not run: {error}") from error
    where = ",".join(f"{host}:{slots}" for host, slots in hosts.items())
    if "Open MPI" in asked.stdout:
        ours = sorted(name for name in environment if name.startswith("PHUB_"))
        names = [word for name in ours for word in ("-x", name)]
        return [program, "-n", str(size), "-H", where, "--tag-output", *names, *command]
    return [program, "-n", str(size), "-hosts", where, "-prepend-rank", *command]


def require_mpirun() -> str:
    """The mpirun to use.

    Raises:
        BackendUnavailable: there is none; the message says what else starts several hosts.
    """
    found = find_mpirun()
    if found is None:
        raise BackendUnavailable(
            "[launch] several hosts need mpirun, which is not here: pip install "
            "'phub-collective[mpi]', or start the same script with 'srun python ...' or 'torchrun "
            "--nnodes N --nproc-per-node M --rdzv-endpoint HOST ...'"
        )
    return found
