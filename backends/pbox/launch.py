"""Starting a PBox for one job: a child process that ends with the process that started it."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
from dataclasses import dataclass

from phub_collective.backends.pbox.protocol import new_token
from phub_collective.config import Config
from phub_collective.errors import PeerLost

START_SECONDS = 60.0  # a loaded machine takes long to import NumPy
STOP_SECONDS = 10.0


@dataclass
class LocalServer:
    """A PBox started by `start_server`. Its standard input is the lifeline: it stops when that
    closes, however this process ends."""

    process: subprocess.Popen[bytes]
    address: str

    def stop(self) -> None:
        """Close the lifeline and wait."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def start_server(config: Config, all_local: bool) -> LocalServer:
    """Start `phub serve` on this host, on loopback when every worker is here.

    Raises:
        PeerLost: it did not come up; its last words are on standard error.
    """
    host = "127.0.0.1" if all_local else _own_address()
    command = [
        sys.executable,
        "-m",
        "phub_collective",
        "serve",
        "--host",
        host,
        "--port",
        "0",
        "--lifeline",
    ]
    environment = dict(os.environ)
    if not all_local:
        # Creating jobs on it stays a matter of this process and its children.
        os.environ.setdefault("PHUB_ADMIN_TOKEN", new_token())
        environment["PHUB_ADMIN_TOKEN"] = os.environ["PHUB_ADMIN_TOKEN"]
    if config.pbox_cores:
        environment["PHUB_PBOX_CORES"] = str(config.pbox_cores)
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        ready = selector.select(START_SECONDS)
    line = process.stdout.readline().decode() if ready else ""
    if "serving on " not in line:
        process.kill()
        process.wait()
        raise PeerLost(
            f"[pbox] the PBox did not start within {START_SECONDS:g} s (exit {process.returncode})"
        )
    return LocalServer(process, line.split("serving on ")[1].split()[0].rstrip(","))


def _own_address() -> str:
    """This host's address as its name resolves, for workers on other hosts."""
    return socket.gethostbyname(socket.gethostname())
