"""Who we are in the job, told by the variables of what started us."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phub_collective.errors import ConfigError

# What phubrun sets for each worker, beside torch's variables; nobody sets these by hand.
LAUNCH_VARIABLES = {
    "PHUB_RENDEZVOUS": "HOST:PORT,... of the job's store",
    "PHUB_SECRET": "what proves that a process belongs to the job (hexadecimal)",
    "PHUB_RANK": "rank of this process in the job",
    "PHUB_SIZE": "number of ranks in the job",
    "PHUB_LOCAL_RANK": "rank of this process among those of its host",
    "PHUB_LOCAL_SIZE": "number of ranks on its host",
}


@dataclass(frozen=True)
class Identity:
    """A process's place in its job.

    Attributes:
        rank, size: in the job.
        local_rank, local_size: among the ranks of this host; -1: the launcher does not say.
        launcher: "phubrun", "torchrun", "mpirun", "env" (torch's variables, set by something
            else), "srun" or "single".
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    launcher: str


@dataclass(frozen=True)
class _Launcher:
    """The variable that tells a launcher, and where it says what."""

    name: str
    sign: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""


# The first one found counts: what starts processes inside another's job stands above that.
_LAUNCHERS = (
    _Launcher("phubrun", "PHUB_RENDEZVOUS", *list(LAUNCH_VARIABLES)[2:]),
    _Launcher(
        "torchrun", "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    ),
    # mpirun's own local ranks are not asked for: it counts by host name, we by what can be reached.
    _Launcher("mpirun", "PMI_RANK", "PMI_RANK", "PMI_SIZE"),
    _Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    _Launcher("env", "WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher("srun", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)


def identify(environ: Mapping[str, str]) -> Identity:
    """Our place in the job, from the environment alone.

    Raises:
        ConfigError: a launcher's variables are incomplete or contradict each other.
    """
    for launcher in _LAUNCHERS:
        if launcher.sign in environ:
            return _read(launcher, environ)
    return Identity(0, 1, 0, 1, "single")


def _read(launcher: _Launcher, environ: Mapping[str, str]) -> Identity:
    def number(variable: str) -> int:
        text = environ.get(variable)
        if text is None or not text.isdecimal():
            raise ConfigError(
                f"[topology] {variable}={text}: expected a number, since {launcher.sign} is set "
                f"(started by {launcher.name}?)"
            )
        return int(text)

    def check(rank: str, size: str) -> tuple[int, int]:
        if number(rank) >= number(size):
            raise ConfigError(
                f"[topology] {rank}={environ[rank]} is not below {size}={environ[size]}"
            )
        return number(rank), number(size)

    rank, size = check(launcher.rank, launcher.size)
    local = (-1, -1)
    if launcher.local_rank in environ and launcher.local_size in environ:
        local = check(launcher.local_rank, launcher.local_size)
    return Identity(rank, size, *local, launcher.name)
