"""What one job may take of a PBox: what is counted is what is allocated, and what one job takes
without end is refused to it while others go on."""

from __future__ import annotations

import gc
import os
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pbox_jobs import SOON, Box, Model, allreduce, box, spec_of, together, until

from phub_collective.backends.base import DType, Key, ReduceOp
from phub_collective.backends.compression import Compression
from phub_collective.backends.native import load
from phub_collective.backends.pbox import protocol, quota
from phub_collective.backends.pbox.exchange import PboxExchange
from phub_collective.backends.pbox.keytable import TableIds, TableSpec, native_table
from phub_collective.backends.pbox.quota import Need, Quota, lane_need, memory_need
from phub_collective.backends.pbox.server import ring_bytes
from phub_collective.errors import ConfigError, MismatchError, PhubError

SIZE = 4 << 20  # bytes of a table's keys; a multiple of a huge page


@pytest.fixture
def pbox() -> Iterator[Box]:
    with box() as made:
        yield made


# --- what is counted ---


def mapped(least: int) -> int:
    """Bytes of this process's readable mappings of at least `least` bytes."""
    spans = re.findall(r"^(\w+)-(\w+) r", Path("/proc/self/maps").read_text(), re.MULTILINE)
    sizes = [int(end, 16) - int(begin, 16) for begin, end in spans]
    return sum(size for size in sizes if size >= least)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.INT32])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(
    ("model", "server", "shared"),
    [(False, False, False), (True, False, False), (True, True, False), (True, True, True)],
)
def test_a_table_takes_what_is_counted(
    dtype: DType, local: bool, model: bool, server: bool, shared: bool
) -> None:
    if (server and not dtype.is_floating) or (shared and not local):
        return
    workers = 3
    spec = TableSpec(
        "t",
        (Key("w", (SIZE // dtype.itemsize,), dtype),),
        ReduceOp.SUM,
        1.0,
        1.0,
        32 << 10,
        model,
        server,
        shared,
    )
    alone(lambda: takes_what_is_counted(spec, workers, local))


@pytest.mark.parametrize("server", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_packed_gradients_need_no_arenas(server: bool, local: bool) -> None:
    key = Key("w", (SIZE // 4,), DType.FLOAT32)
    how = Compression.of("one_bit")
    spec = TableSpec(
        "t", (key,), ReduceOp.SUM, 1.0, 1.0, 32 << 10, True, server=server, compression=how
    )
    alone(lambda: takes_what_is_counted(spec, 3, local))


def takes_what_is_counted(spec: TableSpec, workers: int, local: bool) -> None:
    native = load().Server(1)
    native.add_job(1, workers)
    before = mapped(SIZE)
    info = native_table(spec, TableIds(0, 0, 0, 0), workers, 1, 1, local)
    table = native.add_table(1, info, workers)
    need = memory_need(spec, workers, local)
    # The core's own bookkeeping of 128 chunks is no mapping of this size.
    assert mapped(SIZE) - before == need.nbytes
    files = [m for m in [*table.arenas, *table.weights] if m is not None]
    assert need.mappings >= len(files) + (2 if local and not spec.model else 0)


def alone(check: Callable[[], None]) -> None:
    """Run `check` in a copy of this process where no other thread maps or unmaps anything."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            gc.disable()
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "see its traceback"


@pytest.mark.parametrize(
    ("chunk_bytes", "cores", "ring"),
    [
        (32 << 10, 1, 1 << 20),
        (32 << 10, 8, 1 << 20),
        (32 << 10, 64, 256 << 10),
        (1 << 20, 8, 4 << 20),
        (4 << 20, 8, 16 << 20),
    ],
)
def test_rings_are_as_large_as_documented(chunk_bytes: int, cores: int, ring: int) -> None:
    payload = protocol.lane_payload(chunk_bytes)
    assert ring_bytes(payload, cores) == ring
    assert ring >= 2 * (payload + 64)  # else no lane takes them
    memory = load().make_ring_memory(ring)
    assert os.fstat(memory).st_size == lane_need(ring).nbytes
    os.close(memory)


# --- what is refused ---


def test_a_job_gets_half_of_what_others_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "available_memory", lambda: 1000 << 20)
    shares = Quota()
    shares.take(1, Need(500 << 20), "x")
    for job in (1, 2):
        with pytest.raises(ConfigError, match=r"MiB for this job; the server has \d+ MiB left"):
            shares.take(job, Need(251 << 20), "x")
    shares.take(2, Need(250 << 20), "x")
    shares.give(1, Need(300 << 20))
    shares.take(2, Need(150 << 20), "x")
    shares.end(2)
    shares.take(1, Need(300 << 20), "x")


@pytest.mark.parametrize(
    ("limit", "need", "text"),
    [
        ("MAX_TABLES", Need(tables=1), "4 tables"),
        ("MAX_KEYS", Need(keys=1), "4 keys"),
        ("MAX_CHUNKS", Need(chunks=1), "4 chunks"),
    ],
)
def test_numbers_are_limited_per_job(
    monkeypatch: pytest.MonkeyPatch, limit: str, need: Need, text: str
) -> None:
    monkeypatch.setattr(quota, limit, 3)
    shares = Quota()
    for job in (1, 2):
        for _ in range(3):
            shares.take(job, need, "x")
        with pytest.raises(ConfigError, match=text):
            shares.take(job, need, "x")


def test_a_job_that_uses_names_without_end_leaves_mappings_to_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit = tmp_path / "max_map_count"
    own = len(Path("/proc/self/maps").read_text().splitlines())
    limit.write_text(f"{own + 400}\n")
    monkeypatch.setattr(quota, "MAX_MAPPINGS", limit)
    with box(cores=1) as pbox:
        greedy = pbox.job(1, "shm").backend(0)
        used: list[str] = []

        def use_names_without_end() -> None:
            for number in range(200):
                greedy.submit(allreduce(f"name.{number}", 1)).wait(SOON)
                used.append(f"name.{number}")

        with pytest.raises(ConfigError, match="memory mappings.*vm.max_map_count"):
            use_names_without_end()
        assert len(used) in range(80, 110)  # two for each, of half of 400
        job = pbox.job(2, "shm")
        others = together(2, lambda rank: job.backend(rank))
        work = [other.submit(allreduce("x", 1)) for other in others]
        for one in work:
            one.wait(SOON)
        greedy.submit(allreduce(used[0], 1)).wait(SOON)  # those it has go on
        for backend in (greedy, *others):
            backend.close()


def test_names_that_one_rank_only_announces_are_limited(
    pbox: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quota, "MAX_TABLES", 10)
    backend = pbox.job(2).backend(0)
    works = [backend.submit(allreduce(f"name.{number}", 1)) for number in range(11)]
    with pytest.raises(ConfigError, match="11 tables"):
        works[-1].wait(SOON)
    assert not any(work.done() for work in works[:-1])
    backend.close()


def test_what_is_over_is_given_back(pbox: Box) -> None:
    """Tables closed, used with another shape, or refused."""
    job = pbox.job(2)
    backends = together(2, lambda rank: job.backend(rank))
    (tenant,) = pbox.server._jobs.values()
    taken = pbox.server._quota._taken
    lanes = taken[tenant.number]

    def use(rank: int) -> None:
        for step in range(5):
            Model(backends[rank].connection, spec_of([(5,), (7,)])).exchange.close()
            backends[rank].submit(allreduce("x", *range(step + 1))).wait(SOON)
            with pytest.raises(MismatchError):
                backends[rank].submit(allreduce("y", *range(rank + 1))).wait(SOON)

    together(2, use)
    assert taken[tenant.number].tables == 1  # x
    x = TableSpec("x", (Key("", (5,), DType.FLOAT32),), ReduceOp.SUM, 1, 1, 32 << 10, model=False)
    expected = lanes + quota.description_need(x) + memory_need(x, 2, local=True)
    assert taken[tenant.number] == expected
    for backend in backends:
        backend.close()
    until(lambda: not taken, "something is left")


def test_a_model_that_takes_too_much_is_refused_and_leaves_nothing(pbox: Box) -> None:
    connection = pbox.job(1).connect(0)
    (tenant,) = pbox.server._jobs.values()
    before = pbox.server._quota._taken[tenant.number]
    with pytest.raises(PhubError, match="MiB"):
        PboxExchange(connection, spec_of([(1 << 33,)]), 32 << 10)
    assert pbox.server._quota._taken[tenant.number] == before
    connection.close()
