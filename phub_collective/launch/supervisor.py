"""The process that has all workers of this host below it, and leaves none behind.

phubrun starts it with a pipe as its standard input. The first line is the plan (JSON: no secret
ever stands on a command line); later lines are numbers of signals to stop with; its end means that
phubrun is gone, however that came about. Being a subreaper, the supervisor inherits what workers
orphan, so everything that the job started is below it in /proc. What happens goes to phubrun as
lines of JSON on the descriptor named by the only argument.

Should the supervisor itself be killed, the kernel kills the workers (their death signal), and
phubrun, a subreaper too, inherits and kills the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from phub_collective.launch import processes
from phub_collective.launch.output import Forwarder

GRACE_S = 3.0  # see Plan.grace
KILL_S = 10.0  # a process that outlives SIGKILL so long hangs in the kernel; it is reported
POLL_S = 0.05
CANNOT_START = 127  # exit code, as a shell's


class Stage(IntEnum):
    """How far the end of the job has come."""

    RUNNING = 0
    FAREWELL = 1  # something ended; the rest may end by itself
    STOPPING = 2  # the rest was sent a signal
    KILLING = 3  # the rest is being killed


@dataclass(frozen=True)
class Plan:
    """What to run: the same command for each of `ranks`, each with its own variables, and behind
    its own prefix where there are `prefixes`.

    `grace`: seconds that the others have, after a failure, to end by themselves with an error
    that says what they saw; and again from the signal to stop until SIGKILL.
    """

    command: list[str]
    environment: dict[str, str]
    ranks: list[dict[str, str]]
    prefixes: list[list[str]]
    output_directory: str = ""
    timestamps: bool = False
    grace: float = GRACE_S


class Supervisor:
    """Starts, watches and ends the workers. One thread, but for the output's."""

    def __init__(self, plan: Plan, report: int) -> None:
        self._plan, self._report = plan, report
        self._ranks: dict[int, int] = {}  # pid of a living worker -> its rank
        self._stage, self._deadline = Stage.RUNNING, float("inf")
        self._code = 0  # what phubrun shall exit with
        self._signal: int = signal.SIGTERM
        self._forwarder = Forwarder(plan.output_directory, plan.timestamps)
        self._wake, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ)

    def run(self) -> None:
        """Until nothing of the job is left."""
        self._start()
        self._forwarder.start()
        while self._work_left():
            self._sleep()
            self._collect()
            self._escalate()
        self._forwarder.finish(self._plan.grace)
        self._tell(event="end", code=self._code)

    def _start(self) -> None:
        size, parent = len(self._plan.ranks), os.getpid()
        for rank, variables in enumerate(self._plan.ranks):
            try:
                worker = subprocess.Popen(
                    [*self._plan.prefixes[rank], *self._plan.command],
                    env={**self._plan.environment, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    preexec_fn=lambda: processes.die_with_parent(parent),
                )
            except OSError as error:
                self._tell(event="cannot start", rank=rank, error=str(error))
                self._code = CANNOT_START
                self._enter(Stage.STOPPING)
                return
            assert worker.stdout is not None
            assert worker.stderr is not None
            self._forwarder.add(worker.stdout, rank, size, "stdout")
            self._forwarder.add(worker.stderr, rank, size, "stderr")
            self._ranks[worker.pid] = rank
            worker.returncode = 0  # _collect waits for it, not its Popen
            self._tell(event="started", rank=rank, pid=worker.pid)

    def _work_left(self) -> bool:
        """True while workers live, or what they left behind: that has a little time to end."""
        if self._stage == Stage.KILLING and time.monotonic() > self._deadline:
            return False
        if not self._ranks and self._stage == Stage.RUNNING and processes.descendants():
            self._enter(Stage.FAREWELL)
        return bool(self._ranks) or bool(processes.descendants())

    def _sleep(self) -> None:
        """Until a child ends, phubrun says something, or it is time to become stricter."""
        waiting_for_workers = self._ranks and self._stage < Stage.KILLING
        limit = self._deadline - time.monotonic() if waiting_for_workers else POLL_S
        for key, _ in self._selector.select(None if limit == float("inf") else max(0.0, limit)):
            data = os.read(key.fd, 4096)
            if key.fd == self._wake:
                continue
            if not data:
                self._selector.unregister(key.fd)
            self._obey(data)

    def _obey(self, orders: bytes) -> None:
        """Signals from phubrun: the first stops the job, a second one kills it; no data: phubrun
        is gone."""
        for number in orders.split() or [b"%d" % signal.SIGTERM]:
            self._signal = int(number)
            self._code = self._code or 128 + self._signal
            self._enter(Stage.KILLING if self._stage == Stage.STOPPING else Stage.STOPPING)

    def _collect(self) -> None:
        """Reap what ended. Of several that ended at once, one killed by a signal is the likelier
        cause: the others may have failed for want of it."""
        ended = [(pid, code) for pid, code in processes.reap() if pid in self._ranks]
        for pid, code in sorted(ended, key=lambda one: one[1]):
            rank = self._ranks.pop(pid)
            first = code != 0 and self._stage == Stage.RUNNING
            self._tell(event="ended", rank=rank, pid=pid, code=code, first=first)
            if first:
                self._code = code if code > 0 else 128 - code
                self._enter(Stage.FAREWELL)

    def _escalate(self) -> None:
        if self._stage == Stage.KILLING:
            processes.kill_descendants()
        elif time.monotonic() >= self._deadline:
            self._enter(Stage(self._stage + 1))

    def _enter(self, stage: Stage) -> None:
        if stage <= self._stage:
            return
        self._stage = stage
        self._deadline = time.monotonic() + (KILL_S if stage == Stage.KILLING else self._plan.grace)
        if stage == Stage.STOPPING:
            processes.signal_descendants(self._signal)
        elif stage == Stage.KILLING:
            self._tell(event="killing", pids=processes.descendants())
            processes.kill_descendants()

    def _tell(self, **what: Any) -> None:
        with contextlib.suppress(OSError):  # phubrun is gone; the end of its pipe tells us
            os.write(self._report, json.dumps(what).encode() + b"\n")


def main() -> None:
    """Entry point of the process; see the module's text."""
    processes.become_subreaper()
    # Unbuffered, so that later lines stay in the pipe, where `select` sees them.
    line = open(0, "rb", buffering=0, closefd=False).readline()  # noqa: SIM115
    if line.endswith(b"\n"):  # else phubrun was killed before it had said all
        Supervisor(Plan(**json.loads(line)), int(sys.argv[1])).run()
    os._exit(0)  # without waiting for an output thread that nobody reads from


if __name__ == "__main__":
    main()
