"""The exchange benchmark's parts: exact numbers, the gate, and what a row says. Ranks are threads
here, and the backends small stand-ins that can be made to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phub_collective.backends.base import (
    ALIGNMENT,
    Backend,
    Context,
    DType,
    Key,
    Kind,
    Operation,
    Work,
)
from phub_collective.backends.compression import Compression
from phub_collective.bench import pattern, report
from phub_collective.bench.gate import Gate
from phub_collective.bench.measure import Record, affordable, measure
from phub_collective.bench.packed import PackedAllreduce
from phub_collective.bench.pattern import Pattern
from phub_collective.bench.plan import Plan, Workload, parse_bytes
from phub_collective.bench.subjects import (
    ArenaAllreduce,
    FlatAllreduce,
    Subject,
    WorkerOptimizer,
    WorkerSgd,
)
from phub_collective.config import Config
from phub_collective.errors import ConfigError, PeerLost, PeerTimeout, PhubError
from phub_collective.rendezvous import LocalRendezvous
from phub_collective.sizes import size_text

EXCHANGED = [dtype for dtype in DType if dtype is not DType.BOOL]
PLAN = Plan(["ring"], "allreduce", "shm", 2, False, ["4096"])


def on_threads(size: int, body: Callable[[LocalRendezvous], Any]) -> list[Any]:
    """What `body` returns on each rank; the exception of the first rank that raised one."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rendezvous: LocalRendezvous) -> None:
        try:
            with rendezvous:
                results[rendezvous.rank] = body(rendezvous)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(one,), daemon=True)
        for one in LocalRendezvous.group(size, timeout=20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return results


class DoneWork:
    """An operation that finished within submit."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return None


class SumThroughStore(Backend):
    """Sums through the rendezvous; `spoil` may change a result before it is handed back."""

    def __init__(
        self, context: Context, name: str, spoil: Callable[[np.ndarray, int], None] | None = None
    ) -> None:
        self.context, self.name, self._spoil, self._uses = context, name, spoil, 0

    def submit(self, operation: Operation) -> Work:
        assert operation.kind is Kind.ALLREDUCE
        assert operation.buffer is not None
        mine = operation.buffer.array()
        key = f"{self.name}/{operation.name}"
        everyone = self.context.rendezvous.all_gather(key, mine.tobytes())
        mine[:] = sum(np.frombuffer(one, mine.dtype) for one in everyone)
        if self._spoil:
            self._spoil(mine, self._uses)
        self._uses += 1
        return DoneWork()

    def close(self) -> None:
        return None


class TestPattern:
    @pytest.mark.parametrize("dtype", EXCHANGED)
    @pytest.mark.parametrize("ranks", [1, 2, 8])
    def test_the_sum_is_exact_in_the_type(self, dtype: DType, ranks: int) -> None:
        numbers = Pattern(ranks, dtype, 5000)
        total = numbers.total(3)
        assert total.max() > total.min()
        encoded = numbers.encode(total)
        assert encoded.itemsize == dtype.itemsize
        if dtype is DType.BFLOAT16:
            encoded = (encoded.astype(np.uint32) << 16).view(np.float32)
        assert np.array_equal(encoded.astype(np.int64), total)

    def test_it_differs_by_rank_and_iteration(self) -> None:
        numbers = Pattern(8, DType.FLOAT32, 1 << 20)
        rows = [numbers.row(rank, iteration) for rank in range(8) for iteration in range(5)]
        for index, row in enumerate(rows):
            for other in rows[:index]:
                assert np.mean(row == other) < 0.01

    def test_no_small_multiple_of_a_chunk_looks_the_same(self) -> None:
        numbers = Pattern(2, DType.FLOAT32, 1 << 22)
        array = np.empty(1 << 22, np.float32)
        pattern.fill(array, numbers.encode(numbers.total(0)))
        chunk = 8192
        for distance in (1, chunk, 7 * chunk, 500 * chunk):
            assert np.mean(array[distance : distance + chunk] == array[:chunk]) < 0.01

    @pytest.mark.parametrize("begin", [0, 1, pattern.PERIOD - 1, 3 * pattern.PERIOD + 17])
    @pytest.mark.parametrize("count", [0, 1, pattern.PERIOD, 2 * pattern.PERIOD + 5])
    def test_wrong_counts_every_changed_element(self, begin: int, count: int) -> None:
        numbers = Pattern(4, DType.INT32, 1 << 20)
        encoded = numbers.encode(numbers.total(1))
        array = np.zeros(count, np.int32)
        pattern.fill(array, encoded, begin)
        assert pattern.wrong(array, encoded, begin) == 0
        changed = np.arange(0, count, 1000)
        array[changed] += 1
        assert pattern.wrong(array, encoded, begin) == changed.size

    def test_numbers_that_outgrow_the_type_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="fewer --iterations"):
            Pattern(2, DType.FLOAT32, 4).encode(np.array([1 << 25]))


class TestPlan:
    @pytest.mark.parametrize(
        ("text", "nbytes"),
        [("32KiB", 32768), ("1MiB", 1 << 20), ("25MiB", 25 << 20), ("4096", 4096)],
    )
    def test_sizes(self, text: str, nbytes: int) -> None:
        assert parse_bytes(text) == nbytes
        assert parse_bytes(size_text(nbytes)) == nbytes

    @pytest.mark.parametrize("text", ["", "MiB", "1MB", "x", "-1KiB"])
    def test_sizes_that_are_none(self, text: str) -> None:
        with pytest.raises(ConfigError, match="such as 32KiB"):
            parse_bytes(text)

    @pytest.mark.parametrize(
        "change",
        [
            {"workers": 0},
            {"warmup": 0},
            {"workloads": ["3"]},
            {"workloads": ["NoNet"], "models": True},
            {"mode": "shared-model", "lane": "tcp"},
            {"mode": "server-optimizer", "dtype": "int32"},
            {"compression": "fp16", "dtype": "float64"},
            {"compression": "zip"},
        ],
    )
    def test_impossible_plans_are_refused(self, change: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            Plan(**{**vars(PLAN), **change}).check()

    def test_it_survives_the_file(self, tmp_path: Path) -> None:
        PLAN.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == PLAN

    def test_alexnet_is_the_papers(self) -> None:
        plan = Plan(**{**vars(PLAN), "models": True})
        assert Workload.of(plan, "AlexNet").count == 50_844_008


class TestGate:
    def test_nobody_leaves_before_the_last_one_came(self, tmp_path: Path) -> None:
        came = [0] * 3

        def body(rendezvous: LocalRendezvous) -> None:
            gate = Gate(tmp_path, rendezvous, timeout=10)
            for turn in range(1, 30):
                came[rendezvous.rank] = turn
                gate.start() if turn % 2 else gate.pause()
                assert min(came) >= turn
                gate.pause()
            gate.close()

        on_threads(3, body)

    def test_a_missing_rank_is_named(self, tmp_path: Path) -> None:
        over = threading.Event()

        def body(rendezvous: LocalRendezvous) -> None:
            gate = Gate(tmp_path, rendezvous, timeout=0.3)
            if rendezvous.rank == 1:
                over.wait(20)
                return
            try:
                gate.pause()
            finally:
                over.set()

        with pytest.raises(PeerTimeout, match=r"rank 0 waited 0.3 s.*\(1,\)") as caught:
            on_threads(2, body)
        assert caught.value.ranks == (1,)

    def test_a_rank_that_ended_is_named(self, tmp_path: Path) -> None:
        def body(rendezvous: LocalRendezvous) -> None:
            gate = Gate(tmp_path, rendezvous, timeout=20)
            if rendezvous.rank == 1:
                gate.close()
            else:
                gate.pause()

        with pytest.raises(PeerLost, match="rank 1") as caught:
            on_threads(2, body)
        assert caught.value.rank == 1


Spoil = Callable[[np.ndarray, int], None]
KEYS = [
    Key("a", (1000, 3), DType.FLOAT32),
    Key("b", (5,), DType.FLOAT32),
    Key("c", (), DType.FLOAT32),
]


def measured(
    folder: Path, ranks: int, modes: list[str], spoil: Spoil | None = None, dtype: str = "FLOAT32"
) -> list[dict[str, Any]]:
    """The rows of rank 0 for a small model over two stand-in backends, the second one spoilt."""
    keys = [Key(key.name, key.shape, DType[dtype]) for key in KEYS]
    work = Workload("small", keys, DType[dtype])

    def body(rendezvous: LocalRendezvous) -> list[dict[str, Any]]:
        rank = rendezvous.rank
        context = Context(rank, ranks, rank, ranks, rendezvous, Config())
        numbers = Pattern(ranks, work.dtype, work.count)
        subjects: list[Subject] = []
        for name in ("good", "bad"):
            backend = SumThroughStore(context, name, spoil if name == "bad" else None)
            for mode in modes:
                if mode == "allreduce":
                    tensor = np.zeros(work.nbytes, np.uint8)
                    subjects.append(FlatAllreduce(backend, work, numbers, tensor, name == "bad"))
                elif mode == "allreduce-packed":
                    how = Compression.of("fp16")
                    subjects.append(PackedAllreduce(backend, work, numbers, 1 << 20, how))
                elif mode == "allreduce-arena":
                    subjects.append(ArenaAllreduce(backend, work, numbers, 4 * ALIGNMENT))
                else:
                    sgd = WorkerSgd(work)
                    subjects.append(WorkerOptimizer(backend, work, numbers, 1 << 20, sgd))
        return measure(subjects, Gate(folder, rendezvous, 20), rendezvous, 2, 7)

    rows: list[list[dict[str, Any]]] = on_threads(ranks, body)
    assert all(row == rows[0] for row in rows)
    return rows[0]


class TestMeasure:
    @pytest.mark.parametrize("ranks", [1, 3])
    def test_rows_of_backends_that_are_right(self, tmp_path: Path, ranks: int) -> None:
        rows = measured(tmp_path, ranks, ["allreduce", "allreduce-arena"])
        assert [(row["backend"], row["mode"]) for row in rows] == [
            (name, mode) for name in ("good", "bad") for mode in ("allreduce", "allreduce-arena")
        ]
        for row in rows:
            assert row["wrong"] == 0
            assert row["bytes"] == 4 * 3006
            assert row["iterations"] == 7
            assert 0 < row["min_s"] <= row["median_s"] <= row["p90_s"]
            assert row["exchanges_per_s"] == pytest.approx(ranks / row["median_s"])
            assert row["algbw_GBps"] == pytest.approx(4 * 3006 / row["median_s"] / 1e9)
            assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"] * 2 * (ranks - 1) / ranks)

    def test_a_slow_backend_gets_fewer_iterations_on_all_ranks_alike(self) -> None:
        class Other(LocalRendezvous):
            """A second rank, on which the first subject took long."""

            def all_gather(self, name: str, data: bytes, *_: object) -> list[bytes]:
                return [data, b"[45.0, 0.003]"]

        records = [Record([0.1] * 3), Record([0.001] * 3)]
        rendezvous = Other.__new__(Other)
        assert affordable(records, rendezvous, 200) == [3, 200]
        assert affordable(records, rendezvous, 2) == [2, 2]

    @pytest.mark.parametrize("dtype", ["FLOAT16", "INT8", "INT64"])
    def test_other_types(self, tmp_path: Path, dtype: str) -> None:
        rows = measured(tmp_path, 2, ["allreduce", "allreduce-arena"], None, dtype)
        assert [row["wrong"] for row in rows] == [0] * 4

    def test_the_workers_own_optimizer_is_exact_over_many_steps(self, tmp_path: Path) -> None:
        pytest.importorskip("torch")
        rows = measured(tmp_path, 2, ["server-optimizer"])
        assert [row["wrong"] for row in rows] == [0, 0]

    def test_a_wrong_element_is_counted_wherever_and_whenever(self, tmp_path: Path) -> None:
        def spoil(result: np.ndarray, use: int) -> None:
            if use == 0:
                result[-1] += 1  # last element of one operation, in the first warm-up only

        rows = measured(tmp_path, 2, ["allreduce-arena"], spoil)
        assert [row["wrong"] for row in rows] == [0, 2]

    def test_a_wrong_element_of_what_was_cast_is_counted(self, tmp_path: Path) -> None:
        pytest.importorskip("phub_collective.backends.native._core")

        def spoil(result: np.ndarray, use: int) -> None:
            if use == 0:
                result[-1] += 1

        rows = measured(tmp_path, 2, ["allreduce-packed"], spoil)
        assert [row["wrong"] for row in rows] == [0, 2]

    def test_a_stale_result_is_counted(self, tmp_path: Path) -> None:
        kept: dict[int, np.ndarray] = {}

        def spoil(result: np.ndarray, use: int) -> None:
            if result.size > 2000:
                before = kept.setdefault(id(result.base), result.copy())
                result[:] = before

        wrong = measured(tmp_path, 2, ["allreduce"], spoil)[1]["wrong"]
        assert wrong > 0.98 * 2 * 8 * 3000  # 2 ranks, all iterations but the first

    def test_a_failing_backend_is_named(self, tmp_path: Path) -> None:
        def spoil(result: np.ndarray, use: int) -> None:
            raise ValueError("out of order")

        with pytest.raises(PhubError, match=r"backend 'bad' \(mode allreduce\) failed on rank . "):
            measured(tmp_path, 2, ["allreduce"], spoil)


class TestReport:
    def test_columns_are_aligned_and_nothing_is_lost(self) -> None:
        row = {
            "backend": "ring", "mode": "allreduce", "lane": "shm", "model": "", "bytes": 32768,
            "dtype": "float32", "median_s": 1.5e-4, "min_s": 1e-4, "p90_s": 2e-4, "wrong": 0,
            "algbw_GBps": 0.218, "busbw_GBps": 0.32, "exchanges_per_s": 26666.0, "floor_s": None,
            "times_floor": None, "worker_beyond_bytes": 1 << 20, "server_beyond_bytes": None,
        }  # fmt: skip
        lines = report.row_lines([row, {**row, "backend": "halving_doubling", "wrong": 12345}])
        ends = [line.index("allreduce") for line in lines[1:]]
        assert len(set(ends)) == 1
        expected = (
            "ring allreduce shm 32KiB float32 32768 0.150 0.100 0.200 0.218 0.320 26666.0 0 - - "
            "1.049 -"
        )
        assert " ".join(lines[1].split()) == expected
        assert "12345" in lines[2].split()
        assert len(lines[0].split()) == len(lines[1].split())
