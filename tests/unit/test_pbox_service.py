"""CreateService, ConnectService, InitService, Push, Pull and PushPull, and what is wrong input."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from pbox_jobs import LANES, SOON, Box, box, outcomes, together, until

from phub_collective.backends.base import SGD, ReduceOp
from phub_collective.backends.pbox.server import PBoxServer, ServerOptions
from phub_collective.backends.pbox.service import Service, connect_service, create_service
from phub_collective.config import Config
from phub_collective.errors import (
    AuthError,
    ConfigError,
    DuplicateName,
    MismatchError,
    PeerLost,
    PeerTimeout,
)


@pytest.fixture(scope="module")
def pbox() -> Iterator[Box]:
    with box() as made:
        yield made


def floats(*shape: int, value: float = 0.0) -> np.ndarray:
    return np.full(shape, value, np.float32)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "uint8"])
def test_push_pull_sums_and_averages(pbox: Box, lane: str, dtype: str) -> None:
    services = pbox.job(3, lane).services()
    shape = (17, 5)

    def rank(rank: int) -> None:
        with services[rank] as service:
            arrays = {"w": np.full(shape, rank, dtype), "scalar": np.array(rank, dtype)}
            start = service.init(arrays, op=ReduceOp.SUM, root=1)
            assert start["w"].dtype == dtype
            np.testing.assert_array_equal(start["w"], np.full(shape, 1))
            assert start["scalar"].shape == ()
            for step in range(4):
                service.push("w", np.full(shape, rank + step, dtype))
                scalar = service.push_pull("scalar", np.array(rank + step, dtype))
                assert scalar == 3 + 3 * step
                result = service.pull("w")
                np.testing.assert_array_equal(result, np.full(shape, 3 + 3 * step))

    together(3, rank)


def test_the_server_optimizes(pbox: Box) -> None:
    services = pbox.job(2).services()

    def rank(rank: int) -> None:
        with services[rank] as service:
            weights = service.init({"w": floats(10, value=1)}, SGD(lr=0.5, momentum=0.5))
            np.testing.assert_array_equal(weights["w"], floats(10, value=1))
            got = service.push_pull("w", floats(10, value=2 * rank))  # average 1
            np.testing.assert_array_equal(got, floats(10, value=0.5))
            service.set_optimizer(SGD(lr=1.0, momentum=0.5))
            got = service.push_pull("w", floats(10, value=1))
            np.testing.assert_array_equal(got, floats(10, value=-1))

    together(2, rank)


@pytest.mark.parametrize("lane", LANES)
def test_a_pull_without_a_push_brings_the_current_weights(pbox: Box, lane: str) -> None:
    services = pbox.job(2, lane).services()

    def rank(rank: int) -> None:
        with services[rank] as service:
            service.init({"w": floats(20_000, value=3 + rank), "b": floats(5)}, SGD(lr=1.0))
            for step in range(3):
                for _ in range(2):
                    if lane == "tcp":  # it comes from the server, and not from this side's memory
                        service._view("w")[...] = -1
                    np.testing.assert_array_equal(service.pull("w"), floats(20_000, value=3 - step))
                service.push_pull("w", floats(20_000, value=1))
            assert not service.pull("b").any()

    together(2, rank)


def test_keys_advance_on_their_own(pbox: Box) -> None:
    """One key may be many steps ahead of another."""
    services = pbox.job(2).services()

    def rank(rank: int) -> None:
        with services[rank] as service:
            service.init({"a": floats(3), "b": floats(3)}, op=ReduceOp.SUM)
            service.push("b", floats(3, value=100))
            for step in range(5):
                assert service.push_pull("a", floats(3, value=step))[0] == 2 * step
            assert service.pull("b")[0] == 200

    together(2, rank)


def test_read_only_and_strided_arrays_are_taken(pbox: Box) -> None:
    services = pbox.job(1).services()
    with services[0] as service:
        array = np.arange(12, dtype=np.float32).reshape(3, 4)
        array.flags.writeable = False
        assert (service.init({"w": array})["w"] == array).all()
        assert (service.push_pull("w", array.reshape(4, 3).T) == array.reshape(4, 3).T).all()


def test_jobs_and_their_equal_keys_are_apart(pbox: Box) -> None:
    jobs = [pbox.job(2, LANES[index % 2]) for index in range(4)]

    def rank(index: int) -> None:
        job, rank = jobs[index // 2], index % 2
        with job.service(rank) as service:
            service.init({"w": floats(5000)}, op=ReduceOp.SUM)
            for step in range(10):
                result = service.push_pull("w", floats(5000, value=index + step))
                expected = 2 * step + 4 * (index // 2) + 1
                np.testing.assert_array_equal(result, floats(5000, value=expected))

    together(8, rank)


# --- wrong input ---


def test_a_wrong_token_is_refused(pbox: Box) -> None:
    job = pbox.job(1)
    for token in ("0" * 32, "", "ü"):
        with pytest.raises(AuthError, match="wrong token"):
            connect_service(job.address, job.name, token, 0)
    with pytest.raises(AuthError, match="wrong token"):  # nothing is told about names
        connect_service(job.address, "no such job", job.token, 0)
    job.service(0).close()  # the job has not suffered


def test_a_rank_out_of_range_or_taken_is_refused(pbox: Box) -> None:
    job = pbox.job(2)
    for rank in (2, -1, 1 << 30):
        with pytest.raises(ConfigError, match=r"ranks 0\.\.1"):
            job.service(rank)
    with job.service(0), pytest.raises(ConfigError, match="connected already"):
        job.service(0)


@pytest.mark.parametrize(
    ("name", "workers", "chunk_bytes", "text"),
    [
        ("", 1, 4096, "name"),
        ("x" * 300, 1, 4096, "name"),
        ("a\nb", 1, 4096, "printable"),
        ("j", 0, 4096, "workers"),
        ("j", 257, 4096, "workers"),
        ("j", 2**70, 4096, "workers"),
        ("j", 1, 0, "chunks"),
        ("j", 1, 1 << 30, "chunks"),
    ],
)
def test_a_job_with_wrong_numbers_is_refused(
    pbox: Box, name: str, workers: int, chunk_bytes: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        create_service(pbox.address, name, workers, chunk_bytes)


def test_a_name_can_be_taken_again_when_its_job_is_over(pbox: Box) -> None:
    token = create_service(pbox.address, "twice", 1)
    with pytest.raises(ConfigError, match="exists already"):
        create_service(pbox.address, "twice", 1)
    connect_service(pbox.address, "twice", token, 0).close()
    until(lambda: "twice" not in pbox.server.jobs(), "the job did not end")
    again = create_service(pbox.address, "twice", 1)
    assert again != token
    with pytest.raises(AuthError):
        connect_service(pbox.address, "twice", token, 0)
    connect_service(pbox.address, "twice", again, 0).close()


def test_calls_that_do_not_fit_are_refused(pbox: Box) -> None:
    with pbox.job(1).service(0) as service:
        with pytest.raises(ConfigError, match="init"):
            service.push("w", floats(3))
        service.init({"w": floats(3)})
        with pytest.raises(ConfigError, match="unknown key 'v'"):
            service.push("v", floats(3))
        with pytest.raises(ConfigError, match="without a push"):
            service.pull("w")
        with pytest.raises(MismatchError, match=r"float32 \[3\], got float32 \[4\]"):
            service.push("w", floats(4))
        with pytest.raises(MismatchError, match="got float64"):
            service.push("w", np.zeros(3))
        service.push("w", floats(3))
        with pytest.raises(DuplicateName):
            service.push("w", floats(3))
        service.pull("w")
        with pytest.raises(ConfigError, match="init was called before"):
            service.init({"w": floats(3)})
        with pytest.raises(ConfigError, match="runs no optimizer"):
            service.set_optimizer(SGD())


def test_a_dtype_that_is_not_exchanged_is_refused(pbox: Box) -> None:
    with pbox.job(1).service(0) as service, pytest.raises(ConfigError, match="complex64"):
        service.init({"w": np.zeros(3, np.complex64)})


@pytest.mark.parametrize("root", [2, -1])
def test_a_root_out_of_range_is_refused(pbox: Box, root: int) -> None:
    services = pbox.job(2).services()
    for error in outcomes(2, lambda rank: services[rank].init({"w": floats(3)}, root=root)):
        assert isinstance(error, ConfigError)
        assert f"root {root}" in str(error)
    for service in services:
        service.close()


@pytest.mark.parametrize(
    ("arrays", "entries"),
    [
        ([floats(3), floats(4)], ["'w' float32 [3]", "'w' float32 [4]"]),
        ([floats(3), np.zeros(3)], ["float32 [3]", "float64 [3]"]),
        ([floats(3), floats(3, 1)], ["[3]", "[3, 1]"]),
    ],
)
def test_keys_that_differ_are_named_on_every_rank(
    pbox: Box, arrays: list[np.ndarray], entries: list[str]
) -> None:
    """Also on the rank that registers after the others were told."""
    services = pbox.job(3).services()
    first_two_know = threading.Barrier(3)

    def rank(rank: int) -> None:
        if rank == 2:
            first_two_know.wait(SOON)
        try:
            services[rank].init({"w": arrays[rank % 2]})
        finally:
            if rank < 2:
                first_two_know.wait(SOON)

    for error in outcomes(3, rank):
        assert isinstance(error, MismatchError)
        assert all(f"rank {other} has" in str(error) for other in (0, 1))
        assert all(entry in str(error) for entry in entries)
    for service in services:
        service.close()


def test_names_and_optimizers_that_differ_are_named(pbox: Box) -> None:
    services = pbox.job(2).services()
    for error in outcomes(2, lambda rank: services[rank].init({f"w{rank}": floats(3)})):
        assert isinstance(error, MismatchError)
        assert "'w0'" in str(error)
        assert "'w1'" in str(error)
    hypers = [SGD(), None]
    for error in outcomes(2, lambda rank: services[rank].init({"v": floats(3)}, hypers[rank])):
        assert isinstance(error, MismatchError)
        assert "server optimizer True" in str(error)
    # A mismatch ends the registration and not the job.
    with contextlib.ExitStack() as stack:
        for service in services:
            stack.enter_context(service)
        together(2, lambda rank: services[rank].init({"w": floats(3)}))


def test_a_model_that_does_not_fit_is_refused_and_harms_nobody(pbox: Box) -> None:
    from phub_collective.backends.base import DType, Key
    from phub_collective.backends.pbox.keytable import TableSpec

    job = pbox.job(1)
    connection = job.connect(0)
    for shape, text in (
        ((1 << 33,), "MiB"),
        ((1 << 70,), "chunks"),
        ((1 << 32, 1 << 32), "chunks"),
    ):
        answered = threading.Event()
        errors: list[object] = []

        def on_registered(table: object, error: object, errors: list[object] = errors) -> None:
            errors.append(error)
            answered.set()  # noqa: B023

        key = Key("w", shape, DType.FLOAT32)
        spec = TableSpec("big", (key,), ReduceOp.SUM, 1.0, 1.0, 32 << 10, model=True)
        connection.register(spec, on_registered)
        assert answered.wait(SOON)
        assert isinstance(errors[0], ConfigError)
        assert text in str(errors[0])
    connection.close()


def test_a_silent_rank_is_a_timeout_that_names_it(pbox: Box) -> None:
    services = pbox.job(2, stall_warning=0.05, stall_timeout=30.0).services()
    together(2, lambda rank: services[rank].init({"w": floats(3)}))
    services[0].push("w", floats(3))
    with pytest.raises(PeerTimeout, match=r"missing: w from ranks \[1\]") as caught:
        services[0].pull("w", timeout=0.2)
    assert caught.value.ranks == (1,)
    services[1].push("w", floats(3))  # the answer can still come
    assert services[0].pull("w", timeout=SOON).shape == (3,)
    assert services[1].pull("w", timeout=SOON).shape == (3,)
    for service in services:
        service.close()


# --- addresses ---


@pytest.mark.parametrize(
    "address", ["", "localhost", ":", "host:", "host:port", "host:0", "h:99999"]
)
def test_a_malformed_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        create_service(address, "job", 1)
    with pytest.raises(ConfigError, match="HOST:PORT"):
        connect_service(address, "job", "token", 0)


def test_no_pbox_there() -> None:
    with socket.socket() as reserved:  # bound, but does not listen
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        with pytest.raises(PeerLost, match="no PBox at"):
            create_service(address, "job", 1)
        with pytest.raises(PeerLost, match="phub serve"):
            connect_service(address, "job", "token", 0)


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x02\0\0\0[]"])
def test_something_else_there(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(says)
                    connection.recv(1 << 16)

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(PeerLost, match="no PBox answers"):
            create_service(address, "job", 1)
        with pytest.raises(PeerLost, match="no PBox answers"):
            connect_service(address, "job", "token", 0)
        thread.join(SOON)


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}"):
            PBoxServer(ServerOptions(port=port))


@pytest.mark.parametrize("options", [{"port": 65536}, {"cores": 0}, {"interfaces": ()}])
def test_server_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        PBoxServer(ServerOptions(**options))  # type: ignore[arg-type]


def test_beyond_loopback_an_admin_token_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("0.0.0.0", "::", "127.0.0.1.example.org"):
        with pytest.raises(ConfigError, match="PHUB_ADMIN_TOKEN"):
            PBoxServer(ServerOptions(interfaces=(address,)))
    with box(interfaces=("0.0.0.0",), admin_token="secret") as made:
        address = f"127.0.0.1:{made.server.addresses[0][1]}"
        monkeypatch.setenv("PHUB_ADMIN_TOKEN", "guess")
        for token in (None, "", "guess"):  # an argument wins over the environment
            with pytest.raises(AuthError):
                create_service(address, "job", 1, admin_token=token)
        create_service(address, "job0", 1, admin_token="secret")
        monkeypatch.setenv("PHUB_ADMIN_TOKEN", "secret")
        token = create_service(address, "job", 1)
        # A wildcard address is told to the worker as the one at which it came.
        with connect_service(address, "job", token, 0, Config(lane="tcp")) as service:
            assert service.init({"w": floats(3)})["w"].shape == (3,)


def test_each_interface_is_served_by_its_own_cores() -> None:
    with pytest.raises(ConfigError, match="one core for each of 2 interfaces"):
        PBoxServer(ServerOptions(interfaces=("127.0.0.1", "127.0.0.2"), cores=1))
    with box(interfaces=("127.0.0.1", "127.0.0.2"), cores=4) as made:
        ports = [port for _, port in made.server.addresses]
        with made.job(1, "tcp").service(0) as service:
            service.init({"w": floats(400_000)}, op=ReduceOp.SUM)
            assert service.push_pull("w", floats(400_000, value=2))[399_999] == 2
            lanes = [(a, p) for a, p in connected_to(ports) if a != "127.0.0.1" or p == ports[0]]
            # Two lanes to each interface, and the control connection to the first one.
            assert sorted(lanes).count(("127.0.0.2", ports[1])) == 2
            assert sorted(lanes).count(("127.0.0.1", ports[0])) == 3


def connected_to(ports: list[int]) -> list[tuple[str, int]]:
    """Remote ends of this host's established TCP connections to one of `ports`."""
    found = []
    with open("/proc/net/tcp") as table:
        for line in table.readlines()[1:]:
            _, _, remote, state = line.split()[:4]
            address, port = remote.split(":")
            if state == "01" and int(port, 16) in ports:
                found.append((socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


# --- the command ---


def train_on(service: Service) -> None:
    while True:
        service.push_pull("w", floats(3))


def test_serve_prints_its_address_and_ends_with_its_lifeline() -> None:
    command = [sys.executable, "-m", "phub_collective", "serve", "--cores", "1", "--lifeline"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        line = run.stdout.readline()
        address = line.split("serving on ")[1].split(" with 1 cores")[0]
        token = create_service(address, "job", 1)
        with connect_service(address, "job", token, 0) as service:
            service.init({"w": floats(3)})
            run.stdin.close()
            with pytest.raises(PeerLost):
                train_on(service)
        assert run.wait(SOON) == 0


@pytest.mark.parametrize(
    ("flags", "text"),
    [(["--host", "0.0.0.0"], "PHUB_ADMIN_TOKEN"), (["--host", "192.0.2.1"], "PHUB_ADMIN_TOKEN")],
)
def test_serve_tells_what_is_wrong(flags: list[str], text: str) -> None:
    command = [sys.executable, "-m", "phub_collective", "serve", *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=False)
    assert run.returncode == 1
    assert text in run.stderr
    assert "Traceback" not in run.stderr
