"""Starts the workers of a benchmark run, waits for them and hands their results back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from phub_collective.bench.plan import Plan
from phub_collective.errors import BackendUnavailable, ConfigError, PhubError
from phub_collective.machine import find_mpirun

# Put MPI on TCP as well, so that all rows of a tcp run are alike: MPICH, then Open MPI.
MPI_OVER_TCP = {
    "MPIR_CVAR_NOLOCAL": "1",
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
    "FI_TCP_IFACE": "lo",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "tcp,self",
}
# Open MPI asks for these as root, and with more ranks than cores; MPICH ignores them.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
# A network of its own, whose default congestion control is reno: set before anyone connects.
RENO = 'ip link set lo up && echo reno > /proc/sys/net/ipv4/tcp_congestion_control && exec "$@"'


def launcher(plan: Plan) -> list[str]:
    """The command that starts the workers: mpirun where MPI is measured, else phubrun.

    Raises:
        BackendUnavailable: there is no mpirun.
    """
    count = str(plan.workers)
    if "mpi" in plan.backends:
        mpirun = find_mpirun()
        if mpirun is None:
            raise BackendUnavailable(
                "[bench] backend 'mpi' needs mpirun, found none beside "
                f"{sys.executable} or on PATH; pip install 'phub-collective[mpi]'"
            )
        return [mpirun, "-n", count]
    return [sys.executable, "-m", "phub_collective.launch.cli", "-np", count]


def command(plan: Plan, folder: Path, reno: bool) -> list[str]:
    """The whole command line of a run.

    Raises:
        ConfigError: `reno` without the rights for a network namespace.
    """
    inner = [*launcher(plan), sys.executable, "-m", "phub_collective.bench.worker", str(folder)]
    if not reno:
        return inner
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        raise ConfigError(
            "[bench] --reno-namespace makes a network namespace: it needs root and the commands "
            "unshare (util-linux) and ip (iproute2)"
        )
    return ["unshare", "--net", "--", "sh", "-c", RENO, "sh", *inner]


def environment(plan: Plan) -> dict[str, str]:
    """This process's environment with what makes the rows alike; what the user set wins."""
    added = {"OMP_NUM_THREADS": "1", **OPEN_MPI}
    if plan.lane == "tcp":
        added |= MPI_OVER_TCP
    return {**added, **os.environ}


@contextmanager
def terminable() -> Iterator[None]:
    """Make SIGTERM an exception, so that what was changed is put back."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(plan: Plan, reno: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run a plan and return {"header": facts, "rows": [...]}.

    Raises:
        ConfigError: the plan cannot be run.
        PhubError: a worker failed; the message is the first failing worker's.
    """
    plan.check()
    with tempfile.TemporaryDirectory(prefix="phub-bench-") as name, terminable():
        folder = Path(name)
        plan.save(folder / "plan.json")
        line = command(plan, folder, reno)
        with (folder / "output.txt").open("w+b") as output:
            process = subprocess.Popen(
                line, env=environment(plan), stdout=output, stderr=subprocess.STDOUT
            )
            try:
                code = _wait(process, folder, progress)
            finally:
                _stop(process)
                _sweep(folder)
        results = folder / "results.json"
        if code != 0 or not results.exists():
            raise PhubError(_reason(folder, code))
        found: dict[str, Any] = json.loads(results.read_text())
    return found


def _wait(process: subprocess.Popen[bytes], folder: Path, progress: Callable[[str], None]) -> int:
    """Wait for the workers, passing on what they say they are doing."""
    said = ""
    while True:
        try:
            return process.wait(timeout=0.1)
        except subprocess.TimeoutExpired:
            path = folder / "progress.txt"
            now = path.read_text() if path.exists() else said
            if now != said:
                said = now
                progress(now)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends its workers."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _sweep(folder: Path) -> None:
    """Remove the shared memory that the workers named: an MPI that is killed leaves its files."""
    names = folder / "shared-files.json"
    if names.exists():
        for name in json.loads(names.read_text()):
            Path(name).unlink(missing_ok=True)


def _reason(folder: Path, code: int) -> str:
    """The first error that a worker left, else the end of what all of them printed."""
    errors = [json.loads(path.read_text()) for path in folder.glob("error-*.json")]
    if errors:
        first: str = min(errors, key=lambda error: error["at"])["message"]
        return first
    tail = (folder / "output.txt").read_text(errors="replace").strip().splitlines()[-15:]
    return "\n".join([f"[bench] the workers ended with code {code} and said:", *tail])
