"""`phub explain` as a user runs it: it starts its own job, measures, and prints one table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from link_matrices import figure_6, matrix_of


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


def test_measured_links_are_explained_too(tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    file.write_text(json.dumps(matrix_of(figure_6()).to_json()))
    flags = ["-np", "2", "--backend", "ring", "--links", str(file)]
    done = explain(tmp_path, *flags, "--uplink", "4.7", "--pbox-link", "90")
    assert done.returncode == 0, done.stderr
    assert "# links: 8 hosts, 8 ranks; a PBox on the first host" in done.stdout
    assert "PBox 90 Gbit/s, rack to the others 4.7 Gbit/s" in done.stdout
    assert done.stdout.rstrip().endswith("yes")


def test_a_wrong_file_of_links_starts_nothing(tmp_path: Path) -> None:
    done = explain(tmp_path, "-np", "2", "--links", str(tmp_path / "none.json"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"phub explain: [probe] {tmp_path / 'none.json'}: ")
