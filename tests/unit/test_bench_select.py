"""`phub bench select`: what is chosen is set against the best of the same run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phub_collective.bench import select
from phub_collective.bench.plan import Plan
from phub_collective.errors import ConfigError

MIB = 1 << 20


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    select.add_arguments(parser)
    return parser.parse_args(flags)


def test_every_number_of_workers_and_lane_is_a_run() -> None:
    plans = select.plans_of(parsed("--workers", "2,8", "--bytes", "32KiB,1MiB"))
    assert [(plan.workers, plan.lane) for plan in plans] == [
        (2, "shm"), (2, "tcp"), (8, "shm"), (8, "tcp"),
    ]  # fmt: skip
    assert all(plan.workloads == ["32768", "1048576"] and plan.choose for plan in plans)


def test_quick_is_less() -> None:
    assert len(select.plans_of(parsed("--quick"))) < len(select.plans_of(parsed()))


@pytest.mark.parametrize(
    "flags", [("--lanes", "rdma"), ("--workers", "two"), ("--bytes", "1MB"), ("--backends", "fax")]
)
def test_wrong_flags(flags: tuple[str, str]) -> None:
    with pytest.raises(ConfigError):
        select.plans_of(parsed(*flags))


def test_small_cells_are_judged_less_strictly() -> None:
    plan = Plan(["ring", "gloo"], "allreduce", "shm", 2, False, [])
    results = {
        "header": {"choices": {str(MIB): "ring", str(2 * MIB): "ring", str(3 * MIB): "gloo"}},
        "rows": [
            {"backend": name, "bytes": size, "median_s": seconds}
            for size in (MIB, 2 * MIB, 3 * MIB)
            for name, seconds in (("ring", 1.5), ("gloo", 1.0))
        ],
    }
    found = select.cells(plan, results)
    assert [(cell["chosen"], cell["best"], cell["ratio"], cell["within"]) for cell in found] == [
        ("ring", "gloo", 1.5, True),
        ("ring", "gloo", 1.5, False),
        ("gloo", "gloo", 1.0, True),
    ]
    lines = select.lines_of(found)
    assert [line.split()[:5] for line in lines[1:]] == [
        ["shm", "ring", "gloo", "2", "1MiB"],
        ["shm", "ring", "gloo", "2", "2MiB"],
        ["shm", "gloo", "gloo", "2", "3MiB"],
    ]
    assert "NO" in lines[2].split()


def test_it_measures_and_judges(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("mpi4py")
    file = tmp_path / "out.json"
    flags = ["--workers", "2", "--lanes", "shm", "--bytes", "4KiB,64KiB", "--iterations", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "phub_collective", "bench", "select", *flags,
         "--backends", "mpi,gloo", "--json", str(file)],
        capture_output=True, text=True, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = json.loads(file.read_text())
    assert [cell["bytes"] for cell in found["rows"]] == [4096, 65536]
    for cell in found["rows"]:
        assert set(cell["median_s"]) == {"mpi", "gloo"}
        assert cell["ratio"] == cell["median_s"][cell["chosen"]] / min(cell["median_s"].values())
        assert cell["within"] == (cell["ratio"] <= 2)
    share = sum(cell["within"] for cell in found["rows"]) / 2
    assert found["header"]["within"] == share
    assert found["header"]["wrong"] == 0
    assert done.returncode == (0 if share >= 0.9 else 1), done.stderr
