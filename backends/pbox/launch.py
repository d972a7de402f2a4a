"""Starting a PBox for one job: a child process that ends with the process that started it.

Servers of other backends are started in the same way (`start_listening`)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phub_collective.backends.pbox.protocol import new_token
from phub_collective.config import Config
from phub_collective.errors import PeerLost
from phub_collective.machine import own_addresses

START_SECONDS = 60.0  # a loaded machine takes long to import NumPy
STOP_SECONDS = 10.0


@dataclass
class LocalServer:
    """A server that this process has started. Its standard input is the lifeline: it stops when
    that closes, however this process ends.

    Attributes:
        addresses: HOST:PORT at which it may be reached, this host's own way first.
        admin_token: what creating a job on a PBox proves.
    """

    process: subprocess.Popen[bytes]
    addresses: list[str]
    admin_token: str = ""

    @property
    def address(self) -> str:
        """HOST:PORT for this host."""
        return self.addresses[0]

    def stop(self) -> None:
        """Close the lifeline and wait."""
        _stop(self.process, STOP_SECONDS)


def start_server(config: Config, all_local: bool) -> LocalServer:
    """Start `phub serve` on this host: on loopback when every worker is here, else on all
    addresses, where creating a job on it stays a matter of this process.

    Raises:
        PeerLost: it did not come up; its last words are on standard error.
    """
    admin_token = config.admin_token or ("" if all_local else new_token())
    settings = dataclasses.replace(config, admin_token=admin_token).to_environment()
    host, hosts = listening_hosts(all_local)
    process, port = start_listening(["serve", "--host", host], settings, "[pbox] the PBox")
    return LocalServer(process, [f"{one}:{port}" for one in hosts], admin_token)


def listening_hosts(all_local: bool) -> tuple[str, list[str]]:
    """Where a server listens, and the addresses at which it may be reached, this host's own way
    first. `all_local`: every worker is on this host."""
    return ("127.0.0.1", ["127.0.0.1"]) if all_local else ("0.0.0.0", own_addresses())


def start_listening(
    arguments: Sequence[str], settings: Mapping[str, str], who: str
) -> tuple[subprocess.Popen[bytes], int]:
    """Run a command of `phub` that has --lifeline and, once it serves, prints "serving on
    HOST:PORT"; its process and port.

    Args:
        settings: PHUB_* variables beside this process's own.
        who: component and name, for errors.

    Raises:
        PeerLost: it did not come up; its last words are on standard error.
    """
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "phub_collective", *arguments, "--lifeline"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **settings},
            start_new_session=True,
        )
    except OSError as error:
        raise PeerLost(f"{who} could not be started: {error}") from error
    line = _first_line(process)
    if "serving on " not in line:
        _stop(process, 0.0)
        raise PeerLost(
            f"{who} did not start within {START_SECONDS:g} s (exit {process.returncode})"
        )
    return process, int(line.split("serving on ")[1].split()[0].rpartition(":")[2])


def _first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        ready = selector.select(START_SECONDS)
    return process.stdout.readline().decode() if ready else ""


def _stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Close its lifeline; kill it when it has not ended after so long."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
