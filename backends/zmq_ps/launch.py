"""Starting a server for one job: a child process that ends with the process that started it."""

from __future__ import annotations

import dataclasses

from phub_collective.backends.pbox.launch import LocalServer, listening_hosts, start_listening
from phub_collective.config import Config


def start_server(config: Config, workers: int, token: str, all_local: bool) -> LocalServer:
    """Start `phub serve-zmq` on this host: on loopback when every worker is here, else on all
    addresses.

    Raises:
        PeerLost: it did not come up; its last words are on standard error.
    """
    host, hosts = listening_hosts(all_local)
    arguments = ["serve-zmq", "--host", host, "--workers", str(workers)]
    settings = dataclasses.replace(config, token=token).to_environment()
    process, port = start_listening(arguments, settings, "[zmq_ps] the server")
    return LocalServer(process, [f"{one}:{port}" for one in hosts])
