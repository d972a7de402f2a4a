"""An emulated worker: exchanges a model's gradients without a model, with no or with emulated
compute. Started on every host of a lab by phubrun; rank 0 writes what was measured.

Numbers follow a closed form (bench/pattern.py), and every element of every result is compared. All
ranks start an iteration at the same moment of the machine's one clock, and it ends with the last.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from phub_collective.backends.base import DType, Exchange, ExchangeSpec, Key, ReduceOp
from phub_collective.bench import pattern
from phub_collective.models import model_keys
from phub_collective.session import Session

LEAD_S = 0.05  # from the moment all have met to the common start
BACKWARD = 2 / 3  # of a batch's time; the forward pass takes the rest


def layers_of(keys: list[Key]) -> list[list[int]]:
    """Keys of one layer together, as "conv1_weight" and "conv1_bias"; the last layer first, as
    backward makes gradients."""
    layers: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        layers.setdefault(key.name.rpartition("_")[0] or key.name, []).append(index)
    return list(reversed(layers.values()))


class Worker:
    """One rank and its model's exchange; `batch_s`: seconds of a batch as they pass here."""

    def __init__(self, session: Session, keys: list[Key], batch_s: float) -> None:
        self._session, self._keys, self._batch_s = session, keys, batch_s
        count = max(key.count for key in keys)
        self._numbers = pattern.Pattern(session.size, DType.FLOAT32, count)
        self._layers = layers_of(keys)
        self.exchange: Exchange = session.open_exchange(ExchangeSpec("lab", keys, ReduceOp.SUM))
        flat = self.exchange.arena.view(np.float32)
        self._views = [
            flat[offset // 4 : offset // 4 + key.count]
            for offset, key in zip(self.exchange.offsets, keys, strict=True)
        ]

    def iterate(self, iteration: int) -> tuple[float, int]:
        """Seconds from the common start to this rank's end, and the number of wrong elements."""
        encoded = self._numbers.encode(self._numbers.row(self._session.rank, iteration))
        for index, view in enumerate(self._views):
            pattern.fill(view, encoded, index)
        start = self._meet()
        self._step()
        seconds = time.monotonic() - start
        expected = self._numbers.encode(self._numbers.total(iteration))
        wrong = sum(pattern.wrong(view, expected, i) for i, view in enumerate(self._views))
        return seconds, wrong

    def _meet(self) -> float:
        """Wait for all ranks, and for the moment at which they start."""
        now = json.dumps(time.monotonic()).encode()
        ranks = self._session.context.rendezvous.all_gather("lab.start", now)
        start = max(json.loads(one) for one in ranks) + LEAD_S
        time.sleep(max(0.0, start - time.monotonic()))
        return float(start)

    def _step(self) -> None:
        time.sleep(self._batch_s * (1 - BACKWARD))
        pause = self._batch_s * BACKWARD / len(self._layers)
        for layer in self._layers:
            if pause:
                time.sleep(pause)
            for key in layer:
                self.exchange.push(key)
        self.exchange.wait()


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """The row that rank 0 writes; seconds are those of the played rack."""
    dilation = float(os.environ.get("PHUB_LAB_DILATION", "1"))
    keys = model_keys(args.model)
    with Session.open() as session:
        worker = Worker(session, keys, args.batch * dilation)
        mine = [worker.iterate(iteration) for iteration in range(args.warmup + args.iterations)]
        gathered = session.context.rendezvous.all_gather("lab.times", json.dumps(mine).encode())
        ranks = [json.loads(one) for one in gathered]
        if session.rank != 0:
            return None
        ends = [max(rank[i][0] for rank in ranks) for i in range(args.warmup, len(mine))]
        return {
            "backend": worker.exchange.backend,
            "model": args.model,
            "workers": session.size,
            "bytes": sum(key.nbytes for key in keys),
            "batch_s": args.batch,
            "dilation": dilation,
            "seconds": [end / dilation for end in ends],
            "wrong": sum(wrong for rank in ranks for _, wrong in rank),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=float, default=0.0, help="seconds of compute in a batch")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    row = measure(args)
    if row is not None:
        args.json.write_text(json.dumps(row))


if __name__ == "__main__":
    main()
