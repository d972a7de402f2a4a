"""What Linux offers for leaving no process behind: subreapers, death signals, the tree in /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections import defaultdict
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def become_subreaper() -> None:
    """From now on, orphans among our descendants become our children, not those of init."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which has just forked it, ends. For a
    child between fork and exec: calls nothing that could wait for a lock."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we asked
        os._exit(1)


def descendants() -> list[int]:
    """Pids of all living processes below this one (zombies count as ended)."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    zombies = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it ended while we looked
            # The name, in parentheses, may hold anything; after it: state, parent, ...
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            children[int(parent)].append(int(entry.name))
            if state == "Z":
                zombies.add(int(entry.name))
    found, todo = [], [os.getpid()]
    while todo:
        below = children[todo.pop()]
        found += below
        todo += below
    return [pid for pid in found if pid not in zombies]


def signal_descendants(number: int) -> None:
    """Send a signal to the process groups of all descendants, but our own."""
    ours, groups = os.getpgrp(), set()
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError):
            groups.add(os.getpgid(pid))
    for group in groups - {ours}:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)


def kill_descendants() -> None:
    """SIGKILL to every descendant there is now; call again until `descendants` is empty, since
    one may have forked meanwhile."""
    for pid in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap() -> list[tuple[int, int]]:
    """Collect ended children, adopted orphans too: (pid, exit code as subprocess has it)."""
    ended = []
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended.append((pid, os.waitstatus_to_exitcode(status)))
    return ended
