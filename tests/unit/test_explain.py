"""`phub explain` as a user runs it: it starts its own job, measures, and prints one table."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def explain(cache: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run it outside of any job."""
    mine = ("PHUB_", "PMI_", "PMIX_", "OMPI_", "RANK", "WORLD_SIZE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
    return subprocess.run(
        [sys.executable, "-m", "phub_collective", "explain", *flags],
        env={**environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_it_measures_once_and_prints_the_choices(tmp_path: Path) -> None:
    outputs = []
    for _ in range(2):
        done = explain(tmp_path, "-np", "2", "--backend", "^gloo,mpi")
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    first, second = outputs
    assert "# 2 ranks, 2 on this host, lane auto" in first
    assert "# PHUB_BACKEND=^gloo,mpi" in first
    assert "not a candidate: gloo: excluded by PHUB_BACKEND=^gloo,mpi" in first
    assert "# predictions: measured now" in first
    assert f"# predictions: cached in {tmp_path}" in second
    for line in ("100MiB", "GB/s", "pbox"):
        assert line in first
    strip = [line for line in first.splitlines() if not line.startswith("# predictions")]
    assert strip == [line for line in second.splitlines() if not line.startswith("# predictions")]


def test_rules_need_no_measurement(tmp_path: Path) -> None:
    done = explain(tmp_path, "-np", "2", "--backend", "ring:<64KiB,pbox")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if not line.startswith("#")]
    assert rows[1:] == [["0B", "64KiB", "ring"], ["64KiB", "any", "pbox"]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_wrong_text_ends_it_with_the_grammar(tmp_path: Path, ranks: str) -> None:
    done = explain(tmp_path, "-np", ranks, "--backend", "ring:<64KB,pbox")
    assert done.returncode != 0
    assert "'64KB' is no size" in done.stderr
    assert "Traceback" not in done.stderr
