"""A server under floods, and jobs that nobody joins."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from pbox_jobs import SOON, Box, box, until

from phub_collective.backends.pbox import handshake, listener, server
from phub_collective.backends.pbox.handshake import HANDSHAKE_SECONDS
from phub_collective.backends.pbox.service import connect_service, create_service
from phub_collective.errors import AuthError, ConfigError


def dial(pbox: Box) -> socket.socket:
    return socket.create_connection(pbox.server.addresses[0], SOON)


def test_no_thread_for_a_connection_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection that it hits is closed, later ones are served."""
    with box() as pbox:
        start, failures = threading.Thread.start, iter(range(3))

        def fails(thread: threading.Thread) -> None:
            if thread._target.__name__ == "_run" and next(failures, None) is not None:  # type: ignore[attr-defined]
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", fails)
        for _ in range(3):
            with dial(pbox) as sock:
                assert sock.recv(1) == b""
        monkeypatch.undo()
        pbox.job(1).service(0).close()
        pbox.wait_until_idle()
        until(lambda: pbox.server._listener.connections() == 0, "connections are left")


def test_strangers_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_STRANGERS", 10)
    with box() as pbox:
        worker = pbox.job(1).service(0)  # it has proved itself, and is not counted
        silent = [dial(pbox) for _ in range(50)]
        start = time.monotonic()
        for sock in silent[:40]:
            assert sock.recv(1) == b""
        assert time.monotonic() - start < HANDSHAKE_SECONDS / 2
        until(lambda: pbox.server._listener.connections() == 11, "others than those went")
        pbox.job(1).service(0).close()  # others come in
        worker.close()
        for sock in silent:
            sock.close()


def test_a_job_that_nobody_joins_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "WATCH_SECONDS", 0.02)
    with box(start_timeout=0.5) as pbox:
        joined = pbox.job(2)
        first = joined.service(0)
        token = create_service(pbox.address, "unjoined", 1)
        until(lambda: "unjoined" not in pbox.server.jobs(), "the job did not end")
        with pytest.raises(AuthError):
            connect_service(pbox.address, "unjoined", token, 0)
        create_service(pbox.address, "unjoined", 1)  # the name is free
        time.sleep(0.6)  # nothing must happen to this one
        assert joined.name in pbox.server.jobs()
        second = joined.service(1)
        first.close()
        second.close()


def test_the_number_of_jobs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_JOBS", 3)
    with box() as pbox:
        jobs = [pbox.job(1) for _ in range(3)]
        with pytest.raises(ConfigError, match=r"3 jobs.*ends after 120 s"):
            pbox.job(1)
        jobs[0].service(0).close()
        until(lambda: len(pbox.server.jobs()) == 2, "the job did not end")
        pbox.job(1)


def test_lanes_have_the_congestion_control_from_their_first_packet() -> None:
    """Chosen before the connection: one that begins with BBR goes on pacing."""
    accepting = listener.Listener(["127.0.0.1"], 0, "reno", lambda connection: None)
    accepting.start()
    try:
        with handshake.connect(*accepting.addresses[0], "reno") as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)[:4] == b"reno"
    finally:
        accepting.stop()
    with pytest.raises(ConfigError, match="congestion"):
        listener.Listener(["127.0.0.1"], 0, "no such", lambda connection: None)
