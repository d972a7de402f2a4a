#!/usr/bin/env python3
"""Train a small network on scikit-learn's handwritten digits, data-parallel.

The same script runs alone and under any launcher:

    python scripts/train_digits.py
    phubrun -np 4 python scripts/train_digits.py --backend ring
    mpirun -n 4 python scripts/train_digits.py
    torchrun --nproc-per-node 4 scripts/train_digits.py

The global batch is split over the ranks, so the weights do not depend on their number beyond
rounding.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import phub_collective.torch as hvd

TEST_IMAGES = 360  # of 1797; the rest is for training


@dataclass
class Outcome:
    """What rank 0 knows at the end; times in seconds."""

    backend: str  # that exchanged the gradients
    ranks: int
    optimizer_place: str
    shared_model: bool
    compression: str
    accuracy: list[float]  # on the test images, after each epoch
    steps: int
    steps_per_s: float
    exchange_s: float  # waiting for gradients or weights, after backward
    training_s: float  # without evaluation


@dataclass
class Digits:
    """8 x 8 grey images in [0, 1] and their digits, split in one fixed way."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @staticmethod
    def load() -> Digits:
        """Rank 0 reads them for everybody: the import takes longer than the sending."""
        digits: Digits = hvd.broadcast_object(Digits.read() if hvd.rank() == 0 else None)
        return digits

    @staticmethod
    def read() -> Digits:
        from sklearn.datasets import load_digits

        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(data.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
        return Digits(images[train], labels[train], images[test], labels[test])

    def batches(self, epoch: int, seed: int, size: int) -> Iterator[Tensor]:
        """Indices of each global batch, in an order that seed and epoch alone decide."""
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        yield from torch.randperm(len(self.labels), generator=generator).split(size)

    def batch_count(self, size: int) -> int:
        return -(-len(self.labels) // size)


def build_model(width: int = 16) -> nn.Sequential:
    """Two convolutions and two dense layers; no batch norm, whose statistics a split would move."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Share of the test images that are named right."""
    with torch.no_grad():
        guesses = model(digits.test_images).argmax(1)
    return float((guesses == digits.test_labels).float().mean())


class Trainer:
    """Model and optimizer of one rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._digits = Digits.load()
        # Only rank 0's weights count: the others get them below.
        torch.manual_seed(args.seed + hvd.rank())
        self.model = build_model()
        local = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=args.momentum)
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(local, root_rank=0)
        self._optimizer: Any = hvd.DistributedOptimizer(
            local,
            named_parameters=self.model.named_parameters(),
            optimizer_place=args.optimizer_place,
            shared_model=args.shared_model,
            staleness=args.staleness,
            compression=hvd.Compression.of(args.compression),
        )
        self._steps = 0
        self._exchange_s = 0.0
        self._training_s = 0.0

    def _step(self, batch: Tensor) -> None:
        mine = batch[hvd.rank() :: hvd.size()]
        self._optimizer.zero_grad()
        output = self.model(self._digits.images[mine])
        loss = nn.functional.cross_entropy(output, self._digits.labels[mine], reduction="sum")
        # The exchange averages over ranks; together this is the mean over the global batch, also
        # when it does not divide evenly.
        (loss * hvd.size() / len(batch)).backward()
        self._exchange_and_step()

    def _exchange_and_step(self) -> None:
        begin = time.perf_counter()
        if self._args.optimizer_place == "server":
            self._optimizer.step()  # does nothing but wait for the new weights
            self._exchange_s += time.perf_counter() - begin
            return
        self._optimizer.synchronize()
        self._exchange_s += time.perf_counter() - begin
        with self._optimizer.skip_synchronize():
            self._optimizer.step()

    def _epoch(self, epoch: int) -> None:
        args = self._args
        total = args.epochs * self._digits.batch_count(args.batch)
        for batch in self._digits.batches(epoch, args.seed, args.batch):
            begin = time.perf_counter()
            self._step(batch)
            self._training_s += time.perf_counter() - begin
            self._steps += 1
            if args.progress and hvd.rank() == 0 and self._steps % 5 == 0:
                print(f"step {self._steps}/{total}", flush=True)

    def run(self) -> Outcome:
        """Train all epochs; rank 0 evaluates, prints and saves."""
        args, reached = self._args, []
        for epoch in range(1, args.epochs + 1):
            self._epoch(epoch)
            if hvd.rank() != 0:
                continue
            reached.append(accuracy(self.model, self._digits))
            print(f"epoch {epoch}/{args.epochs} test accuracy {reached[-1]:.4f}", flush=True)
            if args.save and epoch == (args.save_epoch or args.epochs):
                torch.save(self.model.state_dict(), args.save)
        return Outcome(
            backend=self._optimizer.exchange_backend(),
            ranks=hvd.size(),
            optimizer_place=args.optimizer_place,
            shared_model=args.shared_model,
            compression=args.compression,
            accuracy=reached,
            steps=self._steps,
            steps_per_s=self._steps / self._training_s,
            exchange_s=self._exchange_s,
            training_s=self._training_s,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--backend", help="who sums the gradients (default: PHUB_BACKEND, or auto)")
    add("--optimizer-place", choices=("worker", "server"), default="worker",
        help="where the optimizer runs (default: worker)")  # fmt: skip
    add("--shared-model", action="store_true",
        help="with --optimizer-place server: read weights where the server wrote them")  # fmt: skip
    add("--staleness", type=float, default=0,
        help="with --optimizer-place server: steps that a rank may be ahead of the slowest, each "
        "rank's being its own; inf: asynchronous (default: 0, synchronous)")  # fmt: skip
    add("--compression", default="none", metavar="HOW",
        help="of gradients: fp16, bf16, two_bit[:THRESHOLD], one_bit, topk[:RATIO]")  # fmt: skip
    add("--epochs", type=int, default=8)
    add("--batch", type=int, default=64, help="images of all ranks together (default: 64)")
    add("--lr", type=float, default=0.05)
    add("--momentum", type=float, default=0.9)
    add("--seed", type=int, default=1, help="of weights and of the data's order (default: 1)")
    add("--json", type=Path, metavar="FILE", help="write the outcome there")
    add("--save", type=Path, metavar="FILE", help="write rank 0's weights there")
    add("--save-epoch", type=int, default=0, metavar="N", help="after epoch N, not the last one")
    add("--progress", action="store_true", help="print the steps done")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # the ranks share the cores
    hvd.init(backend=args.backend)
    outcome = Trainer(args).run()
    if hvd.rank() == 0:
        print(
            f"{outcome.backend}: {outcome.ranks} ranks, {outcome.steps_per_s:.1f} steps/s, "
            f"{outcome.exchange_s:.2f} s of {outcome.training_s:.2f} s in exchange"
        )
        if args.json:
            args.json.write_text(json.dumps(asdict(outcome), indent=1) + "\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
