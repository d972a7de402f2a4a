"""Times subjects side by side on one rank: memory while they open, then interleaved iterations."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from phub_collective.bench.gate import Gate
from phub_collective.bench.memory import PeakMeter, held, settle
from phub_collective.bench.subjects import Subject
from phub_collective.errors import PhubError
from phub_collective.rendezvous import Rendezvous

LEAST_ITERATIONS = 3  # timed ones of every subject
ENOUGH_S = 30.0  # of timed iterations: a subject so slow that it takes longer gets fewer


@contextmanager
def naming(what: str, action: str, rank: int) -> Iterator[None]:
    """Turn any error of the block into a PhubError that says whose it is."""
    try:
        yield
    except Exception as error:
        raise PhubError(
            f"[bench] {what} failed on rank {rank} while {action}: {type(error).__name__}: {error}"
        ) from error


@dataclass
class Record:
    """What one rank saw of one subject; bytes and seconds."""

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0
    private: int = 0  # bytes of the model's own arrays that opening made: this worker's own
    shared: int = 0  # and those in memory that it shares
    huge: int = 0  # the part of both in huge pages
    worker_peak: int = 0  # see PeakMeter; on rank 0 only, which watches all
    server_peak: int | None = None


class Stopwatch:
    """One rank's part of a measurement. All ranks make the same calls in the same order."""

    def __init__(
        self, subjects: Sequence[Subject], gate: Gate, workers: Sequence[int], warmup: int
    ) -> None:
        """`workers`: the process of each rank."""
        self._subjects, self._gate, self._workers = subjects, gate, workers
        self._warmup = warmup
        self.records = [Record() for _ in subjects]

    def open(self) -> None:
        """Open and warm every subject up, one after the other, with an eye on the memory."""
        for subject, record in zip(self._subjects, self.records, strict=True):
            settle()
            self._gate.pause()
            if subject.rank == 0:
                servers = getattr(subject.backend, "server_pids", ())
                with PeakMeter(self._workers, servers) as meter:
                    self._warm_up(subject, record)
                record.worker_peak, record.server_peak = meter.worker, meter.server
            else:
                self._warm_up(subject, record)
            own = held(subject.arrays())
            record.private, record.shared, record.huge = own.private, own.shared, own.huge
            record.seconds.clear()

    def _warm_up(self, subject: Subject, record: Record) -> None:
        self._gate.pause()  # the meter has begun
        with self._named(subject, "opening"):
            subject.open()
        for _ in range(self._warmup):
            self._iterate(subject, record)
        self._gate.pause()

    def run(self, rounds: range, limits: Sequence[int]) -> None:
        """Timed iterations in turn, each round beginning with another subject; `limits`: from
        which round on each of them is left out."""
        trios = list(zip(self._subjects, self.records, limits, strict=True))
        for index in rounds:
            first = index % len(trios)
            for subject, record, limit in trios[first:] + trios[:first]:
                if index < limit:
                    self._iterate(subject, record)

    def _iterate(self, subject: Subject, record: Record) -> None:
        subject.prepare()
        self._gate.start()
        begin = time.perf_counter()
        with self._named(subject, f"exchanging (iteration {subject.iteration})"):
            subject.run()
        record.seconds.append(time.perf_counter() - begin)
        self._gate.pause()
        record.wrong += subject.check()

    def close(self) -> None:
        for subject in self._subjects:
            with self._named(subject, "closing"):
                subject.close()

    def _named(self, subject: Subject, action: str) -> Any:
        what = f"backend {subject.backend.name!r} (mode {subject.mode})"
        return naming(what, action, subject.rank)


def measure(
    subjects: Sequence[Subject], gate: Gate, rendezvous: Rendezvous, warmup: int, iterations: int
) -> list[dict[str, Any]]:
    """Measure `subjects` side by side and return one row each, the same on every rank.
    Collective."""
    workers = [int(pid) for pid in rendezvous.all_gather("bench/pids", str(os.getpid()).encode())]
    watch = Stopwatch(subjects, gate, workers, warmup)
    watch.open()
    few = min(iterations, LEAST_ITERATIONS)
    watch.run(range(few), [few] * len(subjects))
    watch.run(range(few, iterations), affordable(watch.records, rendezvous, iterations))
    mine = json.dumps([asdict(record) for record in watch.records]).encode()
    ranks = [json.loads(one) for one in rendezvous.all_gather("bench/records", mine)]
    rows = [
        _row(subject, [Record(**rank[index]) for rank in ranks])
        for index, subject in enumerate(subjects)
    ]
    watch.close()
    gate.pause()
    return rows


def affordable(records: Sequence[Record], rendezvous: Rendezvous, iterations: int) -> list[int]:
    """How many iterations each subject gets, by what those so far took; equal on all ranks.
    Collective."""
    mine = json.dumps([sum(record.seconds) for record in records]).encode()
    ranks = [json.loads(one) for one in rendezvous.all_gather("bench/seconds", mine)]
    done = len(records[0].seconds)
    each = [max(totals) / done for totals in zip(*ranks, strict=True)]
    return [min(iterations, max(done, int(ENOUGH_S / seconds))) for seconds in each]


def _row(subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
    """An iteration takes as long as its slowest rank; the row has the median over iterations."""
    seconds = sorted(max(one) for one in zip(*(r.seconds for r in records), strict=True))
    workers, nbytes = len(records), subject.work.nbytes
    median = statistics.median(seconds)
    algbw = nbytes / median / 1e9
    return {
        "backend": subject.backend.name,
        "mode": subject.mode,
        "workers": workers,
        "model": subject.work.model,
        "bytes": nbytes,
        "dtype": subject.work.dtype.name.lower(),
        "iterations": len(seconds),
        "median_s": median,
        "min_s": seconds[0],
        "p90_s": seconds[-1 - len(seconds) // 10],
        "algbw_GBps": algbw,
        # What each rank must at least send and receive in an allreduce, as nccl-tests has it.
        "busbw_GBps": algbw * 2 * (workers - 1) / workers,
        "exchanges_per_s": workers / median,
        "wrong": sum(r.wrong for r in records),
        **_memory(subject, records),
    }


def _memory(subject: Subject, records: Sequence[Record]) -> dict[str, Any]:
    """Peak memory beyond the model's own arrays, in bytes."""
    first = records[0]
    server = first.server_peak
    if server is not None:
        shared = subject.job_nbytes(len(records), first.shared)
        server -= shared + subject.server_nbytes()
    return {
        "worker_beyond_bytes": first.worker_peak - first.private,
        "server_beyond_bytes": server,
        "arena_bytes": first.private + first.shared,
        "arena_huge_bytes": first.huge,
    }
