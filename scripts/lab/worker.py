"""An emulated worker: exchanges a model's gradients without a model, with no or with emulated
compute. Started on every host of a lab by phubrun; rank 0 writes what was measured.

Numbers follow a closed form (bench/pattern.py), and every element of every result is compared. All
ranks start an iteration at the same moment of the machine's one clock, and it ends with the last.
An iteration is one exchange or a burst of them, each of the sums that the one before has left.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.counters import moved, waited
from phub_collective.backends.base import DType, Exchange, ExchangeSpec, Key, ReduceOp
from phub_collective.bench import pattern
from phub_collective.models import model_keys
from phub_collective.session import Session

LEAD_S = 0.05  # from the moment all have met to the common start
BACKWARD = 2 / 3  # of a batch's time; the forward pass takes the rest
WHOLE = 1 << 40  # bytes of a bucket that holds any model
# When gradients are sent: as they appear; or all of them at once, as one message, with the first
# or with the last of them (how the paper ran Gloo: paper.md j).
FORMS = ("overlapped", "first", "last")


def layers_of(keys: list[Key]) -> list[list[int]]:
    """Keys of one layer together, as "conv1_weight" and "conv1_bias"; the last layer first, as
    backward makes gradients."""
    layers: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        layers.setdefault(key.name.rpartition("_")[0] or key.name, []).append(index)
    return list(reversed(layers.values()))


@dataclass
class Iteration:
    """What one rank saw of one iteration; seconds and bytes as they passed here.

    Attributes:
        begin, end: of the machine's monotonic clock; `begin` is common to all ranks.
        wrong: elements that differ from the closed form.
        received, sent: bytes over this rank's links.
        waited: seconds in which some process of the machine waited for a processor.
    """

    begin: float
    end: float
    wrong: int
    received: int
    sent: int
    waited: float


class Worker:
    """One rank and its model's exchange; `batch_s`: seconds of a batch as they pass here."""

    def __init__(self, session: Session, keys: list[Key], batch_s: float, form: str) -> None:
        self._session, self._batch_s, self._form = session, batch_s, form
        count = max(key.count for key in keys)
        self._numbers = pattern.Pattern(session.size, DType.FLOAT32, count)
        self._layers = layers_of(keys)
        bucket = session.config.bucket_bytes if form == "overlapped" else WHOLE
        spec = ExchangeSpec("lab", keys, ReduceOp.SUM, bucket_bytes=bucket)
        self.exchange: Exchange = session.open_exchange(spec)
        flat = self.exchange.arena.view(np.float32)
        self._views = [
            flat[offset // 4 : offset // 4 + key.count]
            for offset, key in zip(self.exchange.offsets, keys, strict=True)
        ]

    def iterate(self, number: int, burst: int, computing: bool, at: float = 0.0) -> Iteration:
        """One iteration of `burst` exchanges; `at`: not before this moment of the clock."""
        encoded = self._numbers.encode(self._numbers.row(self._session.rank, number))
        for index, view in enumerate(self._views):
            pattern.fill(view, encoded, index)
        before = moved()
        begin = self._meet(at)
        waited_before = waited()
        for _ in range(burst):
            self._step(self._batch_s if computing else 0.0)
        end = time.monotonic()
        waited_after = waited()
        # Others may have begun before this rank awoke, and what it sent last may still be queued
        # when its own results are there: between two meetings nothing of it is missed.
        self._session.context.rendezvous.barrier("lab.end")
        after = moved()
        grown = self._session.size ** (burst - 1)
        expected = self._numbers.encode(self._numbers.total(number) * grown)
        wrong = sum(pattern.wrong(view, expected, i) for i, view in enumerate(self._views))
        received, sent = (late - early for late, early in zip(after, before, strict=True))
        return Iteration(begin, end, wrong, received, sent, waited_after - waited_before)

    def _meet(self, at: float) -> float:
        """Wait for all ranks, and for the moment at which they start."""
        now = json.dumps(max(at, time.monotonic() + LEAD_S)).encode()
        ranks = self._session.context.rendezvous.all_gather("lab.start", now)
        start = float(max(json.loads(one) for one in ranks))
        if at and start > at:
            raise TimeoutError(f"not ready at the moment asked for, {start - at:.1f} s late")
        time.sleep(max(0.0, start - time.monotonic()))
        return start

    def _step(self, batch_s: float) -> None:
        if batch_s:
            time.sleep(batch_s * (1 - BACKWARD))
        pause = batch_s * BACKWARD / len(self._layers)
        for number, layer in enumerate(self._layers):
            if pause:
                time.sleep(pause)
            if self._form == "overlapped":
                self._push(layer)
            elif self._form == "first" and number == 0:
                self._push([key for every in self._layers for key in every])
        if self._form == "last":
            self._push([key for every in self._layers for key in every])
        self.exchange.wait()

    def _push(self, keys: list[int]) -> None:
        for key in keys:
            self.exchange.push(key)


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """The row that rank 0 writes; `seconds`, of an exchange, are those of the played rack."""
    dilation = float(os.environ.get("PHUB_LAB_DILATION", "1"))
    keys = model_keys(args.model)
    with Session.open() as session:
        session.prepare(fresh=True)  # what another lab has measured says nothing of this one
        worker = Worker(session, keys, args.batch * dilation, args.form)
        mine = [worker.iterate(number, 1, computing=False) for number in range(args.warmup)]
        mine += [
            worker.iterate(args.warmup + number, args.burst, computing=True, at=args.at)
            for number in range(args.iterations)
        ]
        told = json.dumps([asdict(iteration) for iteration in mine]).encode()
        gathered = session.context.rendezvous.all_gather("lab.times", told)
        if session.rank != 0:
            return None
        ranks = [[Iteration(**one) for one in json.loads(text)] for text in gathered]
        return {
            "backend": worker.exchange.backend,
            "bytes": sum(key.nbytes for key in keys),
            "exchanges": args.warmup + args.iterations * args.burst,
            "wrong": sum(iteration.wrong for rank in ranks for iteration in rank),
            **summary([rank[args.warmup :] for rank in ranks], args.burst, dilation),
        }


def summary(ranks: list[list[Iteration]], burst: int, dilation: float) -> dict[str, Any]:
    """Times of an exchange and what it moved, of the timed iterations of all ranks: an iteration
    lasts until its last rank's end."""
    turns = list(zip(*ranks, strict=True))
    passed = [max(rank.end for rank in turn) - turn[0].begin for turn in turns]
    return {
        "seconds": [seconds / burst / dilation for seconds in passed],
        "least_received": min(rank.received // burst for turn in turns for rank in turn),
        "least_sent": min(rank.sent // burst for turn in turns for rank in turn),
        "pressure": [turn[0].waited / seconds for turn, seconds in zip(turns, passed, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=float, default=0.0, help="seconds of compute in a batch")
    parser.add_argument("--form", choices=FORMS, default=FORMS[0])
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1, help="exchanges without compute")
    parser.add_argument("--burst", type=int, default=1, help="exchanges of an iteration")
    parser.add_argument("--at", type=float, default=0.0, help="moment of the monotonic clock")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    row = measure(args)
    if row is not None:
        args.json.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
