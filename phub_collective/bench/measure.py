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
    rise: int = 0  # peak PSS of this worker above the one before opening
    server_rise: int = 0  # the same of the server; rank 0 only
    held: int = 0  # sizes of the model's own arrays that opening made
    share: int = 0  # the part of them in this worker's PSS
    huge: int = 0  # the part of them in huge pages


class Stopwatch:
    """One rank's part of a measurement. All ranks make the same calls in the same order."""

    def __init__(self, subjects: Sequence[Subject], gate: Gate, warmup: int) -> None:
        self._subjects, self._gate, self._warmup = subjects, gate, warmup
        self.records = [Record() for _ in subjects]

    def open(self) -> None:
        """Open and warm every subject up, one after the other, with an eye on the memory."""
        for subject, record in zip(self._subjects, self.records, strict=True):
            server = getattr(subject.backend, "server_pid", None) if subject.rank == 0 else None
            settle()
            self._gate.pause()
            with PeakMeter([os.getpid(), *([server] if server else [])]) as meter:
                with self._named(subject, "opening"):
                    subject.open()
                for _ in range(self._warmup):
                    self._iterate(subject, record)
                self._gate.pause()
            own = held(subject.arrays())
            record.held, record.share, record.huge = own.nbytes, own.share, own.huge
            record.rise = meter.rise[os.getpid()]
            record.server_rise = meter.rise.get(server, 0) if server else 0
            record.seconds.clear()

    def run(self, iterations: int) -> None:
        """Timed iterations in turn, each round beginning with another subject."""
        pairs = list(zip(self._subjects, self.records, strict=True))
        for index in range(iterations):
            first = index % len(pairs)
            for subject, record in pairs[first:] + pairs[:first]:
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
    watch = Stopwatch(subjects, gate, warmup)
    watch.open()
    watch.run(iterations)
    mine = json.dumps([asdict(record) for record in watch.records]).encode()
    ranks = [json.loads(one) for one in rendezvous.all_gather("bench/records", mine)]
    rows = [
        _row(subject, [Record(**rank[index]) for rank in ranks])
        for index, subject in enumerate(subjects)
    ]
    watch.close()
    gate.pause()
    return rows


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
    """Peak memory beyond the model's own arrays, in bytes. Shared arrays are charged to each
    process by its share, so what the workers are not charged of them is the server's."""
    server: int | None = None
    if records[0].server_rise:
        arrays = subject.job_nbytes(len(records), records[0].held) - sum(r.share for r in records)
        server = records[0].server_rise - arrays - subject.server_nbytes()
    return {
        "worker_beyond_bytes": max(r.rise - r.share for r in records),
        "server_beyond_bytes": server,
        "arena_bytes": records[0].held,
        "arena_huge_bytes": records[0].huge,
    }
