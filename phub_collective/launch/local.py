"""A job whose ranks are all started from this host: phubrun's own part of it.

phubrun serves the job's store and reports what happens; the processes are the supervisor's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from phub_collective.launch import processes
from phub_collective.launch.output import write_all
from phub_collective.launch.supervisor import GRACE_S, KILL_S, Plan
from phub_collective.machine import own_addresses, usable_cpus
from phub_collective.rendezvous.store import StoreServer

# Variables of launchers above us, which would make a worker believe it was theirs.
FOREIGN = ("TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDI_", "MPI_LOCAL")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Job:
    """What phubrun was asked to run."""

    command: list[str]
    size: int
    settings: Mapping[str, str]  # PHUB_* variables that flags set
    output_directory: str = ""
    timestamps: bool = False
    grace: float = GRACE_S
    verbose: bool = False
    hosts: tuple[str, ...] = ()  # of each rank; empty: all are here
    agent: tuple[str, ...] = ()  # words that, with a host behind them, run a command there


def run(job: Job) -> int:
    """Run the job; the exit code: 0, the first failing rank's code (128 + N when signal N killed
    it), 127 when the command could not be started, or 128 + N when signal N stopped phubrun."""
    processes.become_subreaper()
    with StoreServer("" if job.agent else "127.0.0.1") as server:
        plan = Plan(
            job.command,
            _environment(job),
            _ranks(job, server),
            [[*job.agent, host] for host in job.hosts] or [[]] * job.size,
            job.output_directory,
            job.timestamps,
            job.grace,
        )
        with _supervisor(plan) as events:
            code = _follow(events, job)
    return code


def _environment(job: Job) -> dict[str, str]:
    """What all workers share: our environment without launchers' variables, with settings, and
    with as many threads for each worker's arithmetic as there are CPUs for it."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    threads = str(max(1, usable_cpus() // job.size))
    return {"OMP_NUM_THREADS": threads, **inherited, **job.settings}


def _ranks(job: Job, server: StoreServer) -> list[dict[str, str]]:
    """The variables of each rank: ours, and torch's, so that `torch.distributed` works in the same
    script. Where ranks are on several hosts, torch is not told where to meet: we do not know the
    first host's address."""
    addresses = own_addresses()[1:] if job.agent else ["127.0.0.1"]
    meeting = {
        "PHUB_RENDEZVOUS": ",".join(f"{address}:{server.port}" for address in addresses),
        "PHUB_SECRET": server.secret.hex(),
    }
    if not job.agent:
        meeting |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return [meeting | _place(job, rank) for rank in range(job.size)]


def _place(job: Job, rank: int) -> dict[str, str]:
    hosts = job.hosts or ("",) * job.size
    local_rank = str(hosts[:rank].count(hosts[rank]))
    local_size, size = str(hosts.count(hosts[rank])), str(job.size)
    return {
        **{name: str(rank) for name in ("PHUB_RANK", "RANK")},
        **{name: local_rank for name in ("PHUB_LOCAL_RANK", "LOCAL_RANK")},
        **{name: size for name in ("PHUB_SIZE", "WORLD_SIZE")},
        **{name: local_size for name in ("PHUB_LOCAL_SIZE", "LOCAL_WORLD_SIZE")},
    }


def _free_port() -> int:
    """A port that was free a moment ago, for torch's store."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _supervisor(plan: Plan) -> Iterator[BinaryIO]:
    """The supervisor at work on `plan`, as the stream of its reports. Signals that would end us
    go to it. On exit nothing of the job is left."""
    read, write = os.pipe()
    command = [sys.executable, "-m", "phub_collective.launch.supervisor", str(write)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, bufsize=0, pass_fds=[write], start_new_session=True
    )
    os.close(write)
    orders = process.stdin
    assert orders is not None

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(OSError):
            orders.write(b"%d\n" % number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        with contextlib.suppress(BrokenPipeError):
            write_all(orders.fileno(), json.dumps(asdict(plan)).encode() + b"\n")
        with open(read, "rb") as events:
            yield events
    finally:
        orders.close()  # ends the supervisor, if it has not ended
        process.wait()
        _kill_the_rest()
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_the_rest() -> None:
    """End what is left below us: something is only when the supervisor was killed."""
    deadline = time.monotonic() + KILL_S
    while processes.descendants() and time.monotonic() < deadline:
        processes.kill_descendants()
        processes.reap()
        time.sleep(0.01)


def _follow(events: BinaryIO, job: Job) -> int:
    """Tell the user what the supervisor reports, until it is done; the job's exit code."""
    for line in events:
        if not line.endswith(b"\n"):
            break  # it was killed in mid-sentence
        event = json.loads(line)
        if event["event"] == "end":
            return int(event["code"])
        text = _text(event, job)
        if text:
            print(f"phubrun: {text}", file=sys.stderr, flush=True)
    print("phubrun: the supervisor was killed; killing all ranks", file=sys.stderr, flush=True)
    return 1


def _text(event: dict[str, Any], job: Job) -> str:
    """The message for an event, or nothing when it is not worth one."""
    kind = event["event"]
    if kind == "cannot start":
        return f"cannot start {job.command[0]!r} (rank {event['rank']}): {event['error']}"
    if kind == "killing" and event["pids"]:
        return f"killing processes that did not end: {', '.join(map(str, event['pids']))}"
    if kind == "ended" and event["first"]:
        stopping = f"; stopping the other {job.size - 1}" if job.size > 1 else ""
        return f"{_death(event)}, the first to end with an error{stopping}"
    if kind == "ended" and job.verbose:
        return _death(event)
    if kind == "started" and job.verbose:
        return f"rank {event['rank']} is process {event['pid']}"
    return ""


def _death(event: dict[str, Any]) -> str:
    code = event["code"]
    how = f"exited with code {code}"
    if code < 0:
        try:
            how = f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            how = f"was killed by signal {-code}"
    return f"rank {event['rank']} (process {event['pid']}) {how}"
