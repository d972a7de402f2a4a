"""Workers and servers that die, stop or leave, as processes; and that nothing is left of them."""

from __future__ import annotations

import json
import logging
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from pbox_jobs import (
    LANES,
    SOON,
    Box,
    Model,
    box,
    hang_up,
    outcomes,
    spec_of,
    together,
    until,
)

from phub_collective.backends.base import SGD
from phub_collective.backends.pbox.launch import LocalServer, start_server
from phub_collective.backends.pbox.service import connect_service, create_service
from phub_collective.config import Config
from phub_collective.errors import PeerLost, PeerTimeout

LONG = "PHUB_TEST_LONG" in os.environ
KILLS = 20 if LONG else 2  # of each kind, on each lane
SIZE = 3
WORKER = Path(__file__).parents[1] / "pbox_worker.py"


class Worker:
    """A process of pbox_worker.py."""

    def __init__(self, *prefix: str) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def order(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self, state: str) -> dict[str, Any]:
        """The next answer, which must be of this state."""
        answer = self._answers.get(timeout=SOON)
        assert answer is not None, f"the worker died (exit {self._process.wait()})"
        assert answer["state"] == state, answer
        return answer

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def crew() -> Iterator[list[Worker]]:
    """SIZE worker processes; a test replaces those that it kills."""
    workers = [Worker() for _ in range(SIZE)]
    for worker in workers:
        worker.answer("ready")
    yield workers
    for worker in workers:
        worker.end()


@pytest.fixture(scope="module")
def serving() -> Iterator[LocalServer]:
    """A PBox in a process of its own."""
    server = start_server(Config(pbox_cores=2), all_local=True)
    yield server
    server.stop()


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    descriptors: int
    threads: int
    memory_files: int
    sockets: int

    @staticmethod
    def of(pid: int) -> Footprint:
        process = psutil.Process(pid)
        maps = Path(f"/proc/{pid}/maps").read_text()
        connections = [c for c in process.net_connections("all") if c.status != "LISTEN"]
        return Footprint(
            process.num_fds(), process.num_threads(), maps.count("memfd:phub"), len(connections)
        )


def goes_back(pid: int, before: Footprint) -> None:
    """The process holds no more than before, of anything. (Less is possible: what earlier tests
    in this process used goes away in its own time.)"""

    def is_back() -> bool:
        now = asdict(Footprint.of(pid))
        return all(now[name] <= count for name, count in asdict(before).items())

    until(is_back, f"still more than {before}")


def start_training(
    address: str,
    job: str,
    crew: list[Worker],
    lane: str,
    elements: int = 50_000,
    admin_token: str = "",
    **order: Any,
) -> None:
    token = create_service(address, job, SIZE, admin_token=admin_token)
    for rank, worker in enumerate(crew):
        worker.order(
            address=address,
            job=job,
            token=token,
            rank=rank,
            lane=lane,
            elements=elements,
            **{"timeout": 30.0, **order},
        )
    for worker in crew:
        worker.answer("training")


def lost(worker: Worker, rank: int) -> None:
    """The worker was told that `rank` is gone, by the typed error."""
    answer = worker.answer("ended")
    assert answer["error"] == "PeerLost", answer
    assert answer["rank"] == rank, answer


def shared_memory_files() -> set[str]:
    """Those of MPI programs that run beside us come and go."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("mpich_shm")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lane", LANES)
def test_a_killed_worker_is_named_and_nothing_is_left(
    serving: LocalServer, crew: list[Worker], lane: str
) -> None:
    rng = random.Random(lane)
    pid, files = serving.process.pid, shared_memory_files()
    before = Footprint.of(pid)
    for kill in range(KILLS):
        start_training(serving.address, f"{lane}{kill}", crew, lane)
        time.sleep(rng.random() * 0.05)  # the moment is what is random
        victim = rng.randrange(SIZE)
        start = time.monotonic()
        crew[victim].end()
        for rank, worker in enumerate(crew):
            if rank != victim:
                lost(worker, victim)
        assert time.monotonic() - start < 10
        crew[victim] = Worker()
        crew[victim].answer("ready")
        goes_back(pid, before)
    assert shared_memory_files() == files


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lane", LANES)
def test_a_killed_server_is_told_to_every_worker(crew: list[Worker], lane: str) -> None:
    rng = random.Random(lane)
    files = shared_memory_files()
    for kill in range(KILLS // 2 if not LONG else KILLS):
        server = start_server(Config(pbox_cores=2), all_local=True)
        try:
            start_training(server.address, f"{lane}{kill}", crew, lane)
            time.sleep(rng.random() * 0.05)
            server.process.kill()
            for worker in crew:
                lost(worker, -1)
        finally:
            server.stop()
    assert shared_memory_files() == files


@pytest.mark.parametrize("lane", LANES)
def test_a_worker_that_exits_without_a_farewell_is_lost(
    serving: LocalServer, crew: list[Worker], lane: str
) -> None:
    start_training(serving.address, f"exit-{lane}", crew, lane)
    crew[1].order(exit=0)
    lost(crew[0], 1)
    lost(crew[2], 1)
    crew[1].end()
    crew[1] = Worker()
    crew[1].answer("ready")


@pytest.mark.parametrize("lane", LANES)
def test_a_stopped_worker_is_a_stall_and_no_loss(crew: list[Worker], lane: str) -> None:
    """Also for longer than a silent host is given, and with more to send to it than fits."""
    server = start_server(Config(pbox_cores=1, timeout=1.0), all_local=True)
    try:
        before = Footprint.of(server.process.pid)
        start_training(server.address, "stopped", crew, lane, elements=8_000_000, timeout=1.0)
        crew[1].signal(signal.SIGSTOP)
        time.sleep(1.5)  # nothing must happen
        crew[1].signal(signal.SIGCONT)
        time.sleep(0.2)
        crew[2].order(exit=0)  # they trained on until this
        for worker in crew[:2]:
            lost(worker, 2)
        crew[2].end()
        crew[2] = Worker()
        crew[2].answer("ready")
        goes_back(server.process.pid, before)
    finally:
        crew[1].signal(signal.SIGCONT)
        server.stop()


class OtherHost:
    """A network namespace, joined to ours by a cable that can be cut."""

    def __init__(self) -> None:
        self.name = f"phubtest{os.getpid()}"
        self._ours, theirs = f"pa{os.getpid()}", f"pb{os.getpid()}"
        self.address = "198.51.100.1"  # ours, of a range for documentation
        self._ip("netns", "add", self.name)
        self._ip("link", "add", self._ours, "type", "veth", "peer", "name", theirs)
        self._ip("link", "set", theirs, "netns", self.name)
        self._ip("address", "add", f"{self.address}/30", "dev", self._ours)
        self._ip("link", "set", self._ours, "up")
        self._ip("-n", self.name, "address", "add", "198.51.100.2/30", "dev", theirs)
        self._ip("-n", self.name, "link", "set", theirs, "up")

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, timeout=SOON)

    def cut(self) -> None:
        self._ip("link", "set", self._ours, "down")

    def remove(self) -> None:
        self._ip("netns", "delete", self.name)  # and the cable with it


needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip"), reason="needs network namespaces"
)


@needs_namespaces
def test_a_pbox_for_several_hosts_is_reached_from_another(crew: list[Worker]) -> None:
    host = OtherHost()
    far = Worker("ip", "netns", "exec", host.name)
    server = start_server(Config(pbox_cores=1), all_local=False)
    try:
        far.answer("ready")
        (address,) = [a for a in server.addresses if a.startswith(f"{host.address}:")]
        everybody = [crew[0], far, crew[2]]
        start_training(address, "far", everybody, "auto", admin_token=server.admin_token)
        server.process.kill()
        for worker in everybody:
            lost(worker, -1)
    finally:
        server.stop()
        far.end()
        host.remove()


@needs_namespaces
def test_a_host_that_cannot_be_reached_is_lost(crew: list[Worker]) -> None:
    host = OtherHost()
    far = Worker("ip", "netns", "exec", host.name)
    try:
        far.answer("ready")
        with box(interfaces=(host.address,), admin_token="secret", keepalive=2) as made:
            before = Footprint.of(os.getpid())
            everybody, token = [crew[0], far, crew[2]], "secret"
            start_training(made.address, "cut", everybody, "auto", admin_token=token, timeout=2.0)
            host.cut()
            lost(crew[0], 1)
            lost(crew[2], 1)
            lost(far, -1)
            goes_back(os.getpid(), before)  # though the far end has said no farewell
    finally:
        far.end()
        host.remove()


# --- in this process ---


@pytest.fixture(scope="module")
def pbox() -> Iterator[Box]:
    with box() as made:
        yield made


@pytest.mark.parametrize("lane", LANES)
def test_a_stall_warns_and_then_ends_with_the_missing_ranks_and_keys(
    pbox: Box, lane: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = pbox.job(3, lane, stall_warning=0.1, stall_timeout=0.5)
    models = together(3, lambda rank: job.exchange(rank, spec_of([(5,), (7,)])))
    zeros = [np.zeros(5, np.float32), np.zeros(7, np.float32)]
    together(3, lambda rank: models[rank].step(list(zeros)))
    models[0].exchange.push(0)
    models[0].exchange.push(1)
    models[2].exchange.push(0)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(PeerTimeout) as caught:
        models[0].exchange.wait()
    assert 0.5 <= time.monotonic() - start < 10
    assert caught.value.ranks == (1, 2)
    for text in ("p0 from ranks [1]", "p1 from ranks [1, 2]"):
        assert text in str(caught.value)
        assert any(text in record.message for record in caplog.records)
    for model in models:
        model.close()


@pytest.mark.parametrize("lane", LANES)
def test_a_registration_that_a_rank_never_makes_is_a_stall(pbox: Box, lane: str) -> None:
    job = pbox.job(2, lane, stall_warning=0.05, stall_timeout=0.2)
    connections = together(2, job.connect)
    with pytest.raises(PeerTimeout, match=r"registration of 'model' from ranks \[1\]") as caught:
        Model(connections[0], spec_of([(3,)]))
    assert caught.value.ranks == (1,)
    connections[1].close()


@pytest.mark.parametrize("lane", LANES)
def test_who_leaves_in_good_order_while_others_go_on_is_named(pbox: Box, lane: str) -> None:
    services = pbox.job(3, lane).services()
    start = {"w": np.zeros(3000, np.float32)}

    def rank(rank: int) -> None:
        services[rank].init(start, SGD(lr=1.0))
        for step in range(50):
            if rank == 1 and step == 20:
                services[1].close()
                raise PeerLost("I am the one", 1)
            services[rank].push_pull("w", start["w"])

    for error in outcomes(3, rank):
        assert isinstance(error, PeerLost)
        assert error.rank == 1
    for service in services:
        service.close()


@pytest.mark.parametrize("turn", range(10))
def test_the_first_cause_reaches_every_rank(pbox: Box, turn: int) -> None:
    """Survivors that leave because of a loss are not taken for the lost one."""
    services = pbox.job(6, "tcp").services()
    start = {"w": np.zeros(3000, np.float32)}
    together(6, lambda rank: services[rank].init(start))

    def rank(rank: int) -> None:
        if rank == 3:
            hang_up(services[3]._connection)
        try:
            while True:
                services[rank].push_pull("w", start["w"])
        finally:
            services[rank].close()

    errors = outcomes(6, rank)
    assert all(isinstance(error, PeerLost) for error in errors)
    assert {error.rank for error in errors[:3] + errors[4:] if isinstance(error, PeerLost)} == {3}


@pytest.mark.parametrize("lane", LANES)
def test_fifty_jobs_leave_nothing_on_the_server(serving: LocalServer, lane: str) -> None:
    pid = serving.process.pid
    before = Footprint.of(pid)

    def job(number: int) -> None:
        name = f"job-{lane}-{number}"
        token = create_service(serving.address, name, 2)
        start = {"w": np.ones((1000, 100), np.float32)}
        answered = threading.Barrier(2)

        def rank(rank: int) -> None:
            config = Config(lane=lane)
            service = connect_service(serving.address, name, token, rank, config)
            service.init(start, SGD(lr=0.1, momentum=0.9))
            service.push_pull("w", start["w"])
            answered.wait(SOON)
            if number % 3:
                service.close()
            else:  # dropped without a farewell
                hang_up(service._connection)
                service._connection.close()

        together(2, rank)

    for number in range(10):
        job(number)
    goes_back(pid, before)
    resident = psutil.Process(pid).memory_info().rss
    for number in range(10, 60):
        job(number)
    goes_back(pid, before)
    assert psutil.Process(pid).memory_info().rss < resident + (8 << 20)


@pytest.mark.parametrize("lane", LANES)
def test_a_worker_keeps_nothing_of_jobs_that_are_over(serving: LocalServer, lane: str) -> None:
    def job(number: int) -> None:
        name = f"one-{lane}-{number}"
        token = create_service(serving.address, name, 1)
        with connect_service(serving.address, name, token, 0, Config(lane=lane)) as service:
            service.init({"w": np.ones(10_000, np.float32)})
            service.push_pull("w", np.ones(10_000, np.float32))

    job(0)
    before = Footprint.of(os.getpid())
    for number in range(1, 20):
        job(number)
    goes_back(os.getpid(), before)


def test_a_closed_server_is_told_to_its_workers() -> None:
    with box() as made:
        services = made.job(2).services()
        start = {"w": np.zeros(3, np.float32)}
        together(2, lambda rank: services[rank].init(start))
        services[0].push("w", start["w"])
    with pytest.raises(PeerLost, match="server"):
        services[0].pull("w", SOON)
    for service in services:
        service.close()
