"""Who we are and how ranks meet, under each launcher that is here and the variables of the rest."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phub_collective.config import Config
from phub_collective.errors import AuthError, ConfigError, PeerTimeout
from phub_collective.machine import usable_cpus
from phub_collective.rendezvous import LocalRendezvous, hosts
from phub_collective.rendezvous.store import StoreServer
from phub_collective.rendezvous.topology import Identity, connect, identify

TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
PHUB = {"PHUB_RENDEZVOUS": "127.0.0.1:1", "PHUB_RANK": "0", "PHUB_SIZE": "2"}
SLURM = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Identity(0, 1, 0, 1, "single")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, Identity(0, 1, 0, 1, "single")),
        (TORCH, Identity(3, 4, 1, 2, "env")),
        ({"RANK": "3", "WORLD_SIZE": "4"}, Identity(3, 4, -1, -1, "env")),
        ({**TORCH, "TORCHELASTIC_RUN_ID": "x"}, Identity(3, 4, 1, 2, "torchrun")),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, Identity(1, 3, -1, -1, "mpirun")),
        (
            {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"},
            Identity(2, 3, -1, -1, "mpirun"),
        ),
        (SLURM, Identity(1, 2, -1, -1, "srun")),
        ({**SLURM, "PMI_RANK": "1", "PMI_SIZE": "2"}, Identity(1, 2, -1, -1, "mpirun")),
        ({**SLURM, **TORCH, "TORCHELASTIC_RUN_ID": "x"}, Identity(3, 4, 1, 2, "torchrun")),
        ({**PHUB, **TORCH, **SLURM}, Identity(0, 2, -1, -1, "phubrun")),
    ],
)
def test_the_launcher_is_told_by_its_variables(environ: dict[str, str], expected: Identity) -> None:
    assert identify(environ) == expected


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"WORLD_SIZE": "2"}, "RANK=None: expected a number, since WORLD_SIZE is set"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE=two: expected a number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK=-1: expected a number"),
        ({**TORCH, "LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
    ],
)
def test_contradictory_variables_are_named(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        identify(environ)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR='' MASTER_PORT=''"),
        ({**PHUB, "PHUB_RENDEZVOUS": "here"}, "PHUB_RENDEZVOUS='here': expected HOST:PORT"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST=''"),
    ],
)
def test_a_missing_address_is_named(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        connect(Config(), environ)


def test_a_single_process_needs_nobody() -> None:
    identity, rendezvous = connect(Config(), {})
    assert identity == Identity(0, 1, 0, 1, "single")
    assert rendezvous.all_gather("k", b"v") == [b"v"]


def test_usable_cpus_are_those_we_may_run_on() -> None:
    command = ["taskset", "-c", "0", sys.executable, "-c"]
    code = "from phub_collective.machine import usable_cpus; print(usable_cpus())"
    out = subprocess.run([*command, code], capture_output=True, text=True, timeout=60)
    assert out.stdout == "1\n"
    assert usable_cpus() == len(os.sched_getaffinity(0))


def phubrun_environ(server: StoreServer, rank: int, size: int) -> dict[str, str]:
    return {
        "PHUB_RENDEZVOUS": f"127.0.0.1:{server.port}",
        "PHUB_SECRET": server.secret.hex(),
        "PHUB_RANK": str(rank),
        "PHUB_SIZE": str(size),
    }


def test_ranks_that_do_not_come_are_named_after_the_start_timeout() -> None:
    with (
        StoreServer() as server,
        pytest.raises(PeerTimeout, match="ranks 1, 2 did not come within 0.2 s") as caught,
    ):
        connect(Config(start_timeout=0.2), phubrun_environ(server, 0, 3))
    assert caught.value.ranks == (1, 2)


def test_a_process_without_the_jobs_secret_is_refused() -> None:
    with StoreServer() as server, pytest.raises(AuthError):
        connect(Config(), {**phubrun_environ(server, 0, 2), "PHUB_SECRET": "00"})


SCRIPT = """
from phub_collective.config import Config
from phub_collective.rendezvous.topology import connect
for _ in range(2):  # the second time as well
    who, rendezvous = connect(Config.from_environment(start_timeout=60))
    with rendezvous:
        assert rendezvous.all_gather("x", b"%d" % who.rank) == [b"%d" % r for r in range(who.size)]
        rendezvous.put(f"from {who.rank}", b"v")
        assert rendezvous.get(f"from {(who.rank + 1) % who.size}") == b"v"
local = f"{who.local_rank}/{who.local_size}"
print(f"{who.launcher} {who.rank}/{who.size} {local}\\n", end="", flush=True)
"""
AFTER = """
import torch.distributed
torch.distributed.init_process_group("gloo")  # on the same port, served by torch now
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def expect(launcher: str, size: int, out: str) -> None:
    wanted = [f"{launcher} {rank}/{size} {rank}/{size}" for rank in range(size)]
    assert sorted(out.split("\n")[:-1]) == wanted


def run(command: Sequence[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_same_script_under_mpirun(script: Path) -> None:
    pytest.importorskip("mpi4py")
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        pytest.skip("no mpirun beside this Python")
    expect("mpirun", 3, run([mpirun, "-n", "3", sys.executable, script]))


def test_the_same_script_under_torchrun(script: Path) -> None:
    pytest.importorskip("torch")
    script.write_text(SCRIPT + AFTER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    expect("torchrun", 2, run([*torchrun, script]))


def side_by_side(script: Path, environs: Sequence[dict[str, str]]) -> str:
    """Run the script once per environment at once; all their output."""
    processes = [
        subprocess.Popen(
            [sys.executable, script], env={**os.environ, **one}, stdout=subprocess.PIPE, text=True
        )
        for one in environs
    ]
    try:
        out = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes)
    return "".join(out)


def test_the_same_script_with_torchs_variables_set_by_hand(script: Path) -> None:
    pytest.importorskip("torch")
    script.write_text(SCRIPT + AFTER)
    with StoreServer() as probe:
        port = str(probe.port)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    out = side_by_side(script, [{**shared, "RANK": str(rank)} for rank in range(2)])
    expect("env", 2, out)


def test_the_same_script_with_slurms_variables(script: Path) -> None:
    pytest.importorskip("torch")
    shared = {**SLURM, "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost"}
    out = side_by_side(script, [{**shared, "SLURM_PROCID": str(rank)} for rank in range(2)])
    expect("srun", 2, out)


def hosts_of(size: int, apart: Sequence[int]) -> list[list[int]]:
    """What `ranks_of_this_host` says on each rank, those in `apart` alone in their network."""

    def look(one: LocalRendezvous) -> list[int]:
        if one.rank in apart and ctypes.CDLL(None).unshare(0x40000000) != 0:  # CLONE_NEWNET
            raise PermissionError
        return hosts.ranks_of_this_host(one)

    with ThreadPoolExecutor(size) as pool:
        looking = [pool.submit(look, one) for one in LocalRendezvous.group(size)]
        try:
            return [one.result(timeout=30) for one in looking]
        except PermissionError:
            pytest.skip("making a network namespace needs root")


def test_ranks_of_one_host_find_each_other() -> None:
    assert hosts_of(4, apart=[]) == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize("hint_tells", [True, False])
def test_a_network_namespace_is_a_host_of_its_own(
    monkeypatch: pytest.MonkeyPatch, hint_tells: bool
) -> None:
    if not hint_tells:
        monkeypatch.setattr(hosts, "host_hint", lambda: "all copies of one machine")
    assert hosts_of(4, apart=[1]) == [[0, 2, 3], [1], [0, 2, 3], [0, 2, 3]]
