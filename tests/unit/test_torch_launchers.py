"""One training script, started by each launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phub_collective import backends
from phub_collective.identity import LAUNCH_VARIABLES

SCRIPT = Path(__file__).parents[1] / "torch_script.py"
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    ("launcher", "size"),
    [
        ([str(BIN / "mpirun"), "-n", "2"], 2),
        ([str(BIN / "torchrun"), "--nproc-per-node", "2", "--no-python"], 2),
        ([str(BIN / "phubrun"), "-np", "2"], 2),
    ],
    ids=["mpirun", "torchrun", "phubrun"],
)
def test_same_script(launcher: list[str], size: int) -> None:
    if not Path(launcher[0]).exists():
        pytest.skip(f"{launcher[0]} is not installed")
    usable = backends.unavailable_reason("pbox") is None
    environ = {k: v for k, v in os.environ.items() if k not in LAUNCH_VARIABLES}
    environ |= {"PHUB_BACKEND": "pbox" if usable else "gloo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, sys.executable, str(SCRIPT)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trained = re.findall(r"rank (\d) of (\d) trained", done.stdout)
    assert sorted(trained) == [(str(rank), str(size)) for rank in range(size)]
