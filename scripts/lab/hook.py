"""The real hook under real autograd: a model trained by DistributedOptimizer over the lab's links,
with about as much compute as communication. Started on every host of a lab by phubrun; rank 0
writes what was measured, and compares the weights with those of a training in one process."""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import phub_collective.torch as hvd

WIDTH, LAYERS = 640, 24  # 39 MB of parameters, of which the first are there early
LEAST, MOST = 16, 4096  # samples of a rank's batch
LEARNING_RATE = 0.01
CLOSE = 1e-5  # of the largest weight: rounding of other orders of sums


def build() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def batch(rank: int, step: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(count, WIDTH, generator=generator)


def passes(model: nn.Module, samples: torch.Tensor) -> tuple[float, float]:
    """One forward and backward; seconds of each."""
    begin = time.perf_counter()
    loss = model(samples).square().mean()
    middle = time.perf_counter()
    loss.backward()
    return middle - begin, time.perf_counter() - middle


def compute(count: int, repeats: int) -> tuple[float, float]:
    """Median seconds of forward and backward alone, as the slowest rank has them. Collective."""
    model, seconds = build(), []
    for step in range(repeats):
        hvd.barrier()
        samples = batch(hvd.rank(), step, count)
        seconds.append(passes(model, samples))
        model.zero_grad()
    own = [statistics.median(column) for column in zip(*seconds[1:], strict=True)]
    slowest = hvd.allreduce(torch.tensor(own), op=hvd.Max, name="compute")
    return float(slowest[0]), float(slowest[1])


def batch_for(seconds: float) -> int:
    """Samples whose forward and backward take about so long. Collective."""
    count = 4 * LEAST
    for _ in range(2):
        took = sum(compute(count, 3))
        count = int(min(MOST, max(LEAST, count * seconds / took)))
    return count


def train(count: int, steps: int) -> tuple[list[float], nn.Module, str]:
    """Seconds of each step, the trained model, and who exchanged the gradients."""
    model = build()
    plain = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    optimizer: Any = hvd.DistributedOptimizer(plain, model.named_parameters())
    seconds = []
    for step in range(steps):
        samples = batch(hvd.rank(), step, count)
        hvd.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        passes(model, samples)
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    slowest = hvd.allreduce(torch.tensor(seconds), op=hvd.Max, name="steps")
    return slowest.tolist(), model, optimizer.exchange_backend()


def reference(count: int, steps: int) -> nn.Module:
    """The same training in one process, on the batches of all ranks."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(hvd.size()):
            (model(batch(rank, step, count)).square().mean() / hvd.size()).backward()
        optimizer.step()
    return model


def wrong(model: nn.Module, other: nn.Module) -> int:
    """Weights that differ by more than rounding."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return sum(int(((a - b).abs() > CLOSE * b.abs().max()).sum()) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exchange", type=float, required=True, help="seconds of its floor")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    hvd.init()
    count = batch_for(args.exchange)
    before = compute(count, args.steps)
    seconds, model, backend = train(count, args.steps)
    after = compute(count, args.steps)
    forward, backward = ((a + b) / 2 for a, b in zip(before, after, strict=True))
    # All ranks end together: who compared alone would leave the others waiting for its lane.
    differing = wrong(copy.deepcopy(model), reference(count, args.steps))
    if hvd.rank() == 0:
        row = {"backend": backend, "wrong": differing, "samples": count}
        row |= {"forward_s": forward, "backward_s": backward, "seconds": seconds[1:]}
        args.json.write_text(json.dumps(row))
    hvd.shutdown()


if __name__ == "__main__":
    main()
