"""A job of one of our own commands, for a user who calls it outside of any job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence


def run_as_job(words: Sequence[str], ranks: int) -> int:
    """Run `phub WORDS` on so many ranks of this host and print what rank 0 prints; the job's exit
    code."""
    launcher = [sys.executable, "-m", "phub_collective.launch.cli", "-np", str(ranks)]
    command = [sys.executable, "-m", "phub_collective", *words]
    with subprocess.Popen([*launcher, *command], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            print(line.removeprefix("[0]<stdout>:"), end="")
    return job.returncode
