"""One training script, started by each launcher."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phub_collective import backends
from phub_collective.rendezvous.identity import LAUNCH_VARIABLES

SCRIPT = Path(__file__).parents[1] / "torch_script.py"
BIN = Path(sys.executable).parent
LIMIT_S = 100.0


def output_of(command: list[str], environ: dict[str, str]) -> tuple[int, str]:
    """(exit status, output) of a launcher; nothing it started outlives this call."""
    with subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{command} did not end in {LIMIT_S} s: {process.communicate()[0]}")
    return process.returncode, output


@pytest.mark.parametrize(
    "launcher",
    [["mpirun", "-n", "2"], ["torchrun", "--nproc-per-node", "2"], ["phubrun", "-np", "2"]],
    ids=lambda launcher: launcher[0],
)
def test_same_script(launcher: list[str]) -> None:
    program = BIN / launcher[0]
    if not program.exists():
        pytest.skip(f"{program} is not installed")
    usable = backends.unavailable_reason("pbox") is None
    environ = {k: v for k, v in os.environ.items() if k not in LAUNCH_VARIABLES}
    environ |= {"PHUB_BACKEND": "pbox" if usable else "gloo", "OMP_NUM_THREADS": "1"}
    python = [] if launcher[0] == "torchrun" else [sys.executable]
    status, output = output_of([str(program), *launcher[1:], *python, str(SCRIPT)], environ)
    assert status == 0, output
    assert sorted(re.findall(r"rank (\d) of (\d) trained", output)) == [("0", "2"), ("1", "2")]
