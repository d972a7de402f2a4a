"""phubrun with real processes: what it starts, says and returns, and that nothing stays behind."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import random
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phub_collective.launch.delegate import require_mpirun

PYTHON = sys.executable
QUICK = ["--grace", "0.3"]
MARK = "PHUB_TEST_MARK"


class Launcher:
    """Starts phubrun with a mark in the environment, by which all its processes are found."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [PYTHON, "-m", "phub_collective.launch.cli", *arguments],
            env={**os.environ, MARK: self.mark, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, **variables: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **variables)
        out, err = process.communicate(timeout=60)
        assert not self.alive(), "processes were left behind"
        return process.returncode, out, err

    def alive(self) -> list[int]:
        """Pids of all processes that carry the mark, zombies not counted."""
        wanted, found = f"{MARK}={self.mark}".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher()
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)
    for pid in made.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for `condition`, which some other process brings about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    try:
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def processes_of(launcher: subprocess.Popen[str], role: str) -> list[int]:
    """Those of a job that are "phubrun", "supervisor" or "worker": none while not yet up."""
    found = [launcher.pid]
    for _ in range(["phubrun", "supervisor", "worker"].index(role)):
        found = [child for pid in found for child in children(pid)]
    return found


WHO = """
import os
from phub_collective.config import Config
from phub_collective.rendezvous.topology import connect
who, rendezvous = connect(Config.from_environment())
with rendezvous:
    cards = rendezvous.all_gather("card", b"%d" % who.rank)
assert cards == [b"%d" % rank for rank in range(who.size)]
print(f"{who.launcher} {who.rank}/{who.size} {who.local_rank}/{who.local_size}")
"""
CHECK_TORCH = (
    WHO
    + """
assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(who.rank)
"""
)


def test_ranks_meet_and_their_output_carries_their_rank(launcher: Launcher) -> None:
    code, out, err = launcher.run("-np", "3", PYTHON, "-c", CHECK_TORCH)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{r}]<stdout>:phubrun {r}/3 {r}/3" for r in range(3)]


def test_flags_reach_the_workers_as_settings(launcher: Launcher) -> None:
    flags = ["--backend", "^gloo", "--lane", "tcp", "--timeout", "7", "--pbox-cores", "2"]
    script = "env | grep -E '^PHUB_(BACKEND|LANE|TIMEOUT|PBOX)' | sort"
    code, out, _ = launcher.run("-np", "1", *flags, "bash", "-c", script, PHUB_LANE="shm")
    assert code == 0
    assert [line.partition(">:")[2] for line in out.splitlines()] == [
        "PHUB_BACKEND=^gloo",
        "PHUB_LANE=tcp",
        "PHUB_PBOX_CORES=2",
        "PHUB_TIMEOUT=7.0",
    ]


def test_another_launchers_variables_do_not_reach_the_workers(launcher: Launcher) -> None:
    foreign = {"TORCHELASTIC_RUN_ID": "1", "PMI_RANK": "5", "PMI_SIZE": "9"}
    code, out, _ = launcher.run("-np", "2", PYTHON, "-c", WHO, **foreign)
    assert code == 0
    assert "phubrun 1/2 1/2" in out


def test_the_secret_is_on_no_command_line(launcher: Launcher) -> None:
    script = 'grep -l "$PHUB_SECRET" -a /proc/[0-9]*/cmdline; [ ${#PHUB_SECRET} = 32 ]'
    code, out, err = launcher.run("-np", "1", "bash", "-c", script)
    assert code == 0, err
    assert out == ""


def test_the_first_failing_rank_is_named_and_its_code_returned(launcher: Launcher) -> None:
    script = "[ $PHUB_RANK = 2 ] && exit 7; sleep 60"
    code, _, err = launcher.run("-np", "4", *QUICK, "bash", "-c", script)
    assert code == 7
    assert "rank 2" in err
    assert "exited with code 7, the first to end with an error; stopping the other 3" in err


def test_a_killed_rank_is_named_with_its_signal(launcher: Launcher) -> None:
    script = "[ $PHUB_RANK = 1 ] && kill -9 $$; sleep 60"
    code, _, err = launcher.run("-np", "2", *QUICK, "bash", "-c", script)
    assert code == 128 + signal.SIGKILL
    assert "rank 1" in err
    assert "was killed by SIGKILL" in err


def test_survivors_may_say_what_they_saw_before_they_are_stopped(launcher: Launcher) -> None:
    survivor = WHO.replace('all_gather("card"', 'all_gather("card" if who.rank else "x"')
    dying = "import os, signal\n" + WHO.replace(
        "with rendezvous:",
        "with rendezvous:\n    who.rank == 1 and os.kill(os.getpid(), signal.SIGKILL)",
    )
    assert survivor != WHO
    code, _, err = launcher.run("-np", "3", PYTHON, "-c", dying)
    assert code == 128 + signal.SIGKILL
    for rank in (0, 2):
        assert any(
            f"[{rank}]<stderr>:" in line and "rank 1 died" in line for line in err.splitlines()
        )


def test_workers_that_ignore_the_signal_are_killed_with_their_children(launcher: Launcher) -> None:
    children = "sleep 60 & setsid sleep 60 &"
    stubborn = f"trap '' TERM; {children} [ $PHUB_RANK = 0 ] && exit 4; sleep 60; sleep 60"
    started = time.monotonic()
    code, _, err = launcher.run("-np", "2", *QUICK, "bash", "-c", stubborn)
    assert code == 4
    assert "killing processes that did not end" in err
    assert time.monotonic() - started < 20


def test_what_workers_leave_behind_is_ended(launcher: Launcher) -> None:
    code, out, _ = launcher.run("-np", "2", *QUICK, "bash", "-c", "setsid sleep 60 & echo done")
    assert code == 0
    assert out.count("done") == 2


BUSY = "trap '' TERM; echo up; (sleep 60; sleep 60) & setsid sleep 60 & sleep 60; sleep 60"


def start_busy_job(launcher: Launcher) -> subprocess.Popen[str]:
    process = launcher.start("-np", "2", *QUICK, "bash", "-c", BUSY)
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {
        "[0]<stdout>:up\n",
        "[1]<stdout>:up\n",
    }
    return process


@pytest.mark.parametrize("victim", ["phubrun", "supervisor"])
def test_nothing_is_left_after_sigkill(launcher: Launcher, victim: str) -> None:
    process = start_busy_job(launcher)
    os.kill(processes_of(process, victim)[0], signal.SIGKILL)
    until(lambda: not launcher.alive())
    assert process.wait(20) == (-signal.SIGKILL if victim == "phubrun" else 1)


CHAOS_ROUNDS = 20 if os.environ.get("PHUB_TEST_LONG") else 3
FORKING = WHO.replace(
    "with rendezvous:",
    "import multiprocessing, time\n"
    "helper = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))\n"
    "helper.start()\n"
    "with rendezvous:\n    rendezvous.get('never', timeout=60)",
)


@pytest.mark.parametrize("round_", range(CHAOS_ROUNDS))
@pytest.mark.parametrize("victim", ["phubrun", "supervisor", "worker"])
def test_nothing_is_left_after_sigkill_at_any_moment(
    launcher: Launcher, victim: str, round_: int
) -> None:
    process = launcher.start("-np", "3", *QUICK, PYTHON, "-c", FORKING)
    time.sleep(random.Random(f"{victim} {round_}").uniform(0, 0.8))
    until(lambda: bool(processes_of(process, victim)))
    os.kill(processes_of(process, victim)[-1], signal.SIGKILL)
    until(lambda: not launcher.alive())
    assert process.wait(20) != 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(launcher: Launcher, number: signal.Signals) -> None:
    process = start_busy_job(launcher)
    process.send_signal(number)
    assert process.wait(20) == 128 + number
    assert not launcher.alive()


def test_output_that_nobody_reads_does_not_save_the_job_from_its_end(launcher: Launcher) -> None:
    process = launcher.start("-np", "1", *QUICK, "bash", "-c", "yes")
    assert process.stdout is not None
    pipe, waiting = process.stdout.fileno(), array.array("i", [0])

    def full() -> bool:  # then the supervisor's output thread hangs in its write
        fcntl.ioctl(pipe, termios.FIONREAD, waiting)
        return waiting[0] >= fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)

    until(full)
    process.kill()
    until(lambda: not launcher.alive())


def test_output_is_copied_to_files(launcher: Launcher, tmp_path: Path) -> None:
    script = "echo out $PHUB_RANK; echo err >&2; printf rest"
    flags = ["--output-filename", str(tmp_path), "--prefix-output-with-timestamp"]
    code, out, err = launcher.run("-np", "2", *flags, "bash", "-c", script)
    assert code == 0
    assert (tmp_path / "rank.1" / "stdout").read_text() == "out 1\nrest"
    assert (tmp_path / "rank.0" / "stderr").read_text() == "err\n"
    stamped = out.splitlines() + err.splitlines()
    assert len(stamped) == 6
    for line in stamped:
        time.strptime(line.partition("[")[0], "%a %b %d %H:%M:%S %Y")


def test_a_command_that_cannot_start_is_named(launcher: Launcher) -> None:
    code, _, err = launcher.run("-np", "2", "no-such-program")
    assert code == 127
    assert "cannot start 'no-such-program' (rank 0)" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-np", "2"], "expected a command"),
        (["true"], "expected -np N"),
        (["-np", "0", "true"], "N >= 1"),
        (["-np", "5", "-H", "localhost:2", "true"], "more than the slots"),
        (["-np", "1", "-H", "a:x", "true"], r"expected HOST[:SLOTS],..."),
        (["-np", "1", "--timeout", "-1", "true"], "expected seconds > 0"),
        (["-np", "2", "-H", "a,b", "--output-filename", "x", "true"], "work on one host"),
    ],
)
def test_wrong_usage_starts_nothing(launcher: Launcher, arguments: list[str], said: str) -> None:
    code, out, err = launcher.run(*arguments)
    assert code == 1
    assert out == ""
    assert said in err


def test_several_hosts_are_started_by_mpirun_and_ranks_still_meet(launcher: Launcher) -> None:
    pytest.importorskip("mpi4py")
    version = subprocess.run([require_mpirun(), "--version"], capture_output=True, text=True).stdout
    if "HYDRA" not in version:
        pytest.skip("only MPICH's mpirun can pretend to reach a host")
    # Its daemons are forked here instead of being sent to hosts "one" and "two" by ssh.
    where = ["-np", "3", "-H", "one:2,two:1"]
    code, out, _ = launcher.run(*where, PYTHON, "-c", WHO, HYDRA_LAUNCHER="fork")
    assert code == 0
    # Its prefixes may fall between a line and its end, so only what the ranks said is compared.
    for rank in range(3):
        assert f"mpirun {rank}/3 {rank}/3" in out


def test_an_agent_starts_each_rank_on_its_host(launcher: Launcher, tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\nexport ON_HOST="$1"\nshift\nexec "$@"\n')
    agent.chmod(0o755)
    show = "import os; e = os.environ; print(*(e[k] for k in ('ON_HOST', 'RANK', 'LOCAL_RANK', "
    show += "'LOCAL_WORLD_SIZE', 'WORLD_SIZE')), 'MASTER_ADDR' in e)"
    flags = ["-np", "3", "-H", "a:2,b:2", "--agent", str(agent)]
    code, out, _ = launcher.run(*flags, PYTHON, "-c", show)
    assert code == 0
    assert sorted(line.partition(":")[2] for line in out.splitlines()) == [
        "a 0 0 2 3 False",
        "a 1 1 2 3 False",
        "b 2 0 1 3 False",
    ]
    code, _, err = launcher.run("-np", "1", "--agent", str(agent), "true")
    assert code == 1
    assert "-H" in err
