"""Workers' output: each line with its rank in front, and a copy in files."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

READ_BYTES = 1 << 16
LONGEST_LINE = 1 << 20  # bytes; a longer one is passed on in pieces


@dataclass
class _Stream:
    """One worker's stdout or stderr."""

    rank: int
    name: str  # "stdout" | "stderr"
    target: int  # descriptor that gets the lines
    copy: BinaryIO | None
    rest: bytes = b""  # the beginning of a line whose end has not come


class Forwarder:
    """Passes on workers' output, on a thread of its own: it may block for as long as whoever
    reads our output does (the workers then block too), while others watch over the processes.
    `add` everything before `start`."""

    def __init__(self, directory: str = "", timestamps: bool = False) -> None:
        self._directory, self._timestamps = directory, timestamps
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="phubrun-output", daemon=True)

    def add(self, pipe: IO[bytes], rank: int, size: int, name: str) -> None:
        copy: BinaryIO | None = None
        if self._directory:
            folder = Path(self._directory) / f"rank.{rank:0{len(str(size - 1))}d}"
            folder.mkdir(parents=True, exist_ok=True)
            copy = (folder / name).open("wb", buffering=0)
        target = 1 if name == "stdout" else 2
        self._selector.register(pipe, selectors.EVENT_READ, _Stream(rank, name, target, copy))

    def start(self) -> None:
        self._thread.start()

    def finish(self, timeout: float) -> bool:
        """Wait until the workers' pipes are closed and all is passed on; False if it was not."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                data = os.read(key.fd, READ_BYTES)
                self._pass_on(key.data, data)
                if not data:
                    self._selector.unregister(key.fileobj)

    def _pass_on(self, stream: _Stream, data: bytes) -> None:
        """Pass on the lines that `data` completes; no data: the end, pass on what is left."""
        if stream.copy is not None:
            _copy(stream, data)
        text = stream.rest + data
        # A progress bar ends its lines with a carriage return.
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if len(text) - end > LONGEST_LINE:
            end = len(text)
        lines, stream.rest = text[:end], text[end:]
        if not data and stream.rest:
            lines, stream.rest = lines + stream.rest + b"\n", b""
        if lines:
            _pass_to(stream.target, self._with_prefix(stream, lines))

    def _with_prefix(self, stream: _Stream, lines: bytes) -> bytes:
        stamp = time.strftime("%a %b %d %H:%M:%S %Y") if self._timestamps else ""
        prefix = f"{stamp}[{stream.rank}]<{stream.name}>:".encode()
        return b"".join(prefix + line for line in lines.splitlines(keepends=True))


def _copy(stream: _Stream, data: bytes) -> None:
    """Append to the stream's file; a full disk ends the copy, not the job."""
    assert stream.copy is not None
    try:
        stream.copy.write(data)
        if data:
            return
    except OSError as error:
        message = f"phubrun: no more copy of rank {stream.rank}'s {stream.name}: {error}\n"
        _pass_to(2, message.encode())
    stream.copy.close()
    stream.copy = None


def _pass_to(target: int, data: bytes) -> None:
    """Write; when nobody reads our output any more, the job goes on without."""
    with contextlib.suppress(OSError):
        write_all(target, data)


def write_all(target: int, data: bytes) -> None:
    """Write all of `data` to a descriptor, however little it takes at once."""
    while data:
        data = data[os.write(target, data) :]
