"""Names of operations that the caller did not name.

Backends match operations by name and compare what is done under it, so a made name must not depend
on the operation itself: ranks whose tensors differ then meet under one name, and all of them get
the error. But a name that is used for one shape after another is registered anew each time. So a
name is made of

    position   the lowest number that no unnamed operation in flight has
    context    the operations that were synchronized last, where the position alone has already
               meant different operations; as many of them as are needed, up to LONGEST

In a loop, after its first rounds, each name means one operation, whatever shapes follow each other.
All ranks must submit and synchronize unnamed operations in one order, as they must in any case.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import replace
from itertools import islice
from typing import Protocol

from phub_collective.backends.base import Operation, Work
from phub_collective.backends.operations import describe
from phub_collective.errors import PeerTimeout

LONGEST = 256  # operations of context; two loops that differ less often share names
MOST = 1024  # names; a backend keeps memory for each


class OperationNames:
    """Not thread-safe. What changes the choice of names changes when an operation has succeeded,
    so that an error, which all ranks get, leaves them in step."""

    def __init__(self) -> None:
        self._in_flight: set[int] = set()
        self._meant: dict[str, str] = {}  # name -> the operation that it was used for first
        self._ambiguous: set[str] = set()  # names that were used for another one later
        self._past: deque[str] = deque(maxlen=LONGEST)  # the latest operation first

    def take(self) -> str:
        """The name of the next operation; it is in flight until `release`."""
        position = next(i for i in range(len(self._in_flight) + 1) if i not in self._in_flight)
        self._in_flight.add(position)
        name, length = f"unnamed operation {position}", 0
        while name in self._ambiguous and length < LONGEST:
            length = max(1, 2 * length)
            context = zlib.crc32("\n".join(islice(self._past, length)).encode())
            longer = f"unnamed operation {position} ({length}:{context:08x})"
            if longer not in self._meant and len(self._meant) >= MOST:
                break
            name = longer
        return name

    def release(self, name: str, description: str | None) -> None:
        """The operation that `name` was taken for has ended, with success if its `description`
        (what all ranks must have in common) is given."""
        self._in_flight.discard(int(name.split()[2]))
        if description is not None:
            if self._meant.setdefault(name, description) != description:
                self._ambiguous.add(name)
            self._past.appendleft(description)


class Submitter(Protocol):
    """What takes operations: a session, or a backend."""

    def submit(self, operation: Operation) -> Work: ...


class UnnamedWork:
    """See `Work`. Its name is free again once it was waited for, with success or an error."""

    def __init__(self, names: OperationNames, target: Submitter, operation: Operation) -> None:
        """Submit `operation` to `target` under the next name."""
        self._names, self._name, self._waited = names, names.take(), False
        self._description = describe(operation)
        try:
            self._work = target.submit(replace(operation, name=self._name))
        except BaseException:
            self._release(None)
            raise

    def done(self) -> bool:
        return self._work.done()

    def wait(self, timeout: float | None = None) -> None:
        try:
            self._work.wait(timeout)
        except PeerTimeout:
            raise  # it is in flight still
        except BaseException:
            self._release(None)
            raise
        self._release(self._description)

    def _release(self, description: str | None) -> None:
        if not self._waited:
            self._waited = True
            self._names.release(self._name, description)
