"""`phub bench exchange` as a user runs it: real processes, launchers and backends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from phub_collective import backends

COMMAND = [sys.executable, "-m", "phub_collective", "bench", "exchange"]
ROW_KEYS = {
    "backend", "mode", "lane", "workers", "model", "bytes", "dtype", "iterations", "median_s",
    "min_s", "p90_s", "algbw_GBps", "busbw_GBps", "exchanges_per_s", "wrong",
}  # fmt: skip
MODEL = "GoogleNet299"  # the smallest of the paper's with many keys
DEADLINE = 60  # seconds


def bench(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *flags],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
    )


def results(file: Path, *flags: str) -> dict[str, Any]:
    """The JSON of a run that must succeed; its rows must be right and complete."""
    done = bench(*flags, "--json", str(file))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    assert set(found) == {"header", "rows"}
    for row in found["rows"]:
        assert row.keys() >= ROW_KEYS
        assert row["wrong"] == 0
        assert row["median_s"] > 0
    title, *lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == len(found["rows"])
    assert title.split()[:3] == ["backend", "mode", "lane"]
    return found


def test_sizes_and_json(tmp_path: Path) -> None:
    found = results(
        tmp_path / "out.json",
        *("--workers", "2", "--backends", "gloo", "--bytes", "4KiB,100", "--iterations", "3"),
    )
    assert found["header"]["launcher"] == "phubrun"
    assert [(r["mode"], r["bytes"], r["iterations"]) for r in found["rows"]] == [
        (mode, size, 3) for size in (4096, 100) for mode in ("allreduce", "allreduce-arena")
    ]
    assert {row["lane"] for row in found["rows"]} == {"tcp"}  # whatever --lane says: it is Gloo


def test_all_backends_that_are_here_in_one_table(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    pytest.importorskip("zmq")
    flags = ("--workers", "2", "--backends", "all", "--bytes", "4KiB", "--iterations", "3")
    rows = results(tmp_path / "out.json", *flags)["rows"]
    assert {row["backend"] for row in rows} == set(backends.TABLE)
    assert all(row["wrong"] == 0 for row in rows)


def test_mpi_brings_its_launcher_and_follows_the_lane(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    flags = ("--workers", "2", "--backends", "mpi,gloo", "--bytes", "4KiB", "--iterations", "3")
    found = results(tmp_path / "out.json", *flags, "--lane", "tcp", "--mode", "server-optimizer")
    assert found["header"]["launcher"] == "mpirun"
    assert [(r["backend"], r["mode"], r["lane"]) for r in found["rows"]] == [
        ("mpi", "server-optimizer", "tcp"),
        ("gloo", "server-optimizer", "tcp"),
    ]


@pytest.mark.parametrize("mode", ["allreduce", "server-optimizer", "shared-model"])
def test_a_model_on_the_pbox_in_every_mode(tmp_path: Path, mode: str) -> None:
    flags = ("--workers", "2", "--backends", "pbox", "--model", MODEL, "--iterations", "5")
    for row in results(tmp_path / "out.json", *flags, "--mode", mode)["rows"]:
        assert row["model"] == MODEL
        assert row["worker_beyond_bytes"] < 64 << 20
        assert row["server_beyond_bytes"] is not None


@pytest.mark.parametrize("lane", ["shm", "tcp"])
@pytest.mark.parametrize("compression", ["two_bit", "one_bit", "topk:0.05"])
def test_packed_gradients_equal_their_twins(tmp_path: Path, lane: str, compression: str) -> None:
    flags = ("--workers", "2", "--backends", "pbox", "--bytes", "200000", "--iterations", "5")
    wanted = ("--compression", compression, "--lane", lane)
    found = results(tmp_path / "out.json", *flags, *wanted)
    assert found["header"]["compression"] == compression
    assert [(row["mode"], row["lane"]) for row in found["rows"]] == [("allreduce-packed", lane)]


def test_casts_are_compared_over_backends(tmp_path: Path) -> None:
    flags = ("--workers", "2", "--backends", "pbox,ring,gloo", "--bytes", "100KiB")
    wanted = ("--compression", "bf16", "--iterations", "3")
    found = results(tmp_path / "out.json", *flags, *wanted)
    assert [row["backend"] for row in found["rows"]] == ["pbox", "ring", "gloo"]


def test_the_namespace_has_reno(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to make a network namespace")
    flags = ("--workers", "2", "--backends", "gloo", "--bytes", "4KiB", "--iterations", "3")
    found = results(tmp_path / "out.json", *flags, "--reno-namespace")
    assert found["header"]["congestion_default"] == "reno"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--backends", "gloo,fax", "--bytes", "4KiB"), "expected different names among pbox"),
        (("--backends", "gloo,gloo", "--bytes", "4KiB"), "expected different names among pbox"),
        (("--backends", "gloo", "--bytes", "4KB"), "such as 32KiB"),
        (("--backends", "gloo", "--model", "HalNet"), "AlexNet"),
        (("--backends", "gloo", "--bytes", "2"), "hold no element"),
        (("--bytes", "4KiB", "--compression", "zip"), "expected none, fp16"),
        (
            ("--bytes", "4KiB", "--compression", "bf16", "--mode", "server-optimizer"),
            "in mode allreduce of float32",
        ),
        (
            ("--backends", "gloo", "--bytes", "4KiB", "--compression", "one_bit", "--workers", "2"),
            "use the pbox",
        ),
    ],
)
def test_wrong_flags(flags: Sequence[str], says: str) -> None:
    done = bench(*flags)
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stdout == ""


def workers_of(mark: str) -> list[int]:
    """The worker processes (not their launchers) of the run that has `mark` in its environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environ = (entry / "environ").read_bytes()
        except OSError:  # ended meanwhile
            continue
        is_worker = words[1:3] == [b"-m", b"phub_collective.bench.worker"]
        if is_worker and f"BENCH_TEST={mark}".encode() in environ:
            found.append(int(entry.name))
    return found


def shared_files_of(pid: int) -> set[str]:
    """Files of shared memory that a process has mapped."""
    return set(re.findall(r"/dev/shm/\S+$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE))


@pytest.mark.parametrize("launcher", ["phubrun", "mpirun"])
@pytest.mark.parametrize("victim", ["driver", "worker"])
def test_no_end_leaves_processes(launcher: str, victim: str) -> None:
    backends = "gloo" if launcher == "phubrun" else "gloo,mpi"
    mark = str(time.monotonic_ns())
    driver = subprocess.Popen(
        [*COMMAND, "--workers", "2", "--backends", backends, "--bytes", "4KiB",
         "--iterations", "1000000"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "BENCH_TEST": mark},
    )  # fmt: skip
    with driver:
        assert driver.stderr is not None
        assert any("allreduce 4KiB" in line for line in driver.stderr)
        workers = workers_of(mark)
        assert len(workers) == 2
        shared = shared_files_of(workers[0])
        assert bool(shared) == (launcher == "mpirun")
        if victim == "driver":
            driver.terminate()
        else:
            os.kill(workers[1], signal.SIGKILL)
        _, errors = driver.communicate(timeout=DEADLINE)
    assert driver.returncode == (128 + signal.SIGTERM if victim == "driver" else 1), errors
    deadline = time.monotonic() + DEADLINE
    while workers_of(mark):
        assert time.monotonic() < deadline, "workers are left"
    assert not [name for name in shared if Path(name).exists()]
