#!/usr/bin/env python3
"""Train the same network from the same seed with every way of exchanging gradients, and compare.

Four workers on one host train the digits network (train_digits.py) through a PBox, then through
the collectives; a single process is the reference. The exit status is 1 when a run fails, misses
the accuracy, or has other weights than the reference.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from phub_collective.bench.report import table

TRAINING = Path(__file__).with_name("train_digits.py")
BACKENDS = ("pbox", "ring", "halving_doubling", "gloo")
SINGLE = "single process"
LEAST_ACCURACY = 0.95
LARGEST_DIFFERENCE = 1e-4  # of any weight after COMPARED_EPOCHS; training then amplifies rounding
COMPARED_EPOCHS = 2


@dataclass
class Run:
    """A training that is over: what it reported, and its weights after COMPARED_EPOCHS."""

    outcome: dict[str, Any]
    weights: dict[str, torch.Tensor]

    @property
    def accuracy(self) -> float:
        return float(self.outcome["accuracy"][-1])

    def difference(self, other: Run) -> float:
        """Largest difference of any weight."""
        pairs = ((mine, other.weights[name]) for name, mine in self.weights.items())
        return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


def command(backend: str, workers: int) -> list[str]:
    """What starts the training; SINGLE needs no launcher."""
    script = [sys.executable, str(TRAINING), "--progress"]
    if backend == SINGLE:
        return script
    launch = [sys.executable, "-m", "phub_collective.launch.cli", "-np", str(workers)]
    return [*launch, *script, "--backend", backend]


def follow(lines: Iterable[str], title: str) -> list[str]:
    """Show a training's progress while it runs; all that it printed."""
    printed = []
    # A terminal gets a bar; a log only the lines of the epochs.
    with tqdm(desc=title.ljust(16), unit="step", leave=False, disable=None) as bar:
        for line in lines:
            printed.append(line.rstrip())
            if step := re.search(r"step (\d+)/(\d+)", line):
                bar.total = int(step[2])
                bar.update(int(step[1]) - bar.n)
            elif epoch := re.search(r"epoch .*", line):
                tqdm.write(f"{title.ljust(16)} {epoch[0]}")
    return printed


def train(backend: str, workers: int, epochs: int) -> Run:
    """Run one training.

    Raises:
        SystemExit: it failed; the message ends what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="phub-quickstart-") as folder:
        outcome, weights = Path(folder, "outcome.json"), Path(folder, "weights.pt")
        process = subprocess.Popen(
            [
                *command(backend, workers),
                *("--epochs", str(epochs), "--save-epoch", str(COMPARED_EPOCHS)),
                *("--json", str(outcome), "--save", str(weights)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        with process:
            assert process.stdout is not None
            printed = follow(process.stdout, backend)
        if process.returncode != 0:
            failed = f"[quickstart] training with {backend} ended with {process.returncode}"
            raise SystemExit("\n".join([*printed[-20:], failed]))
        return Run(json.loads(outcome.read_text()), torch.load(weights))


def summary(runs: dict[str, Run]) -> list[str]:
    """The table of all runs."""
    titles = ("backend", "accuracy", "steps/s", "exchange(s)", "of(s)", "weight difference")
    return table(
        [
            titles,
            *(
                (
                    backend,
                    f"{run.accuracy:.4f}",
                    f"{run.outcome['steps_per_s']:.1f}",
                    f"{run.outcome['exchange_s']:.2f}",
                    f"{run.outcome['training_s']:.2f}",
                    f"{run.difference(runs[SINGLE]):.1e}" if backend != SINGLE else "reference",
                )
                for backend, run in runs.items()
            ),
        ],
        text_columns=1,
    )


def faults(runs: dict[str, Run]) -> list[str]:
    """One sentence for each run that is not as it must be."""
    found = []
    for backend, run in runs.items():
        if run.accuracy < LEAST_ACCURACY:
            found.append(f"{backend}: accuracy {run.accuracy:.4f}, expected {LEAST_ACCURACY}")
        difference = run.difference(runs[SINGLE])
        if not difference <= LARGEST_DIFFERENCE:  # a NaN is a fault too
            found.append(
                f"{backend}: weights differ by {difference:.1e} after {COMPARED_EPOCHS} epochs, "
                f"expected at most {LARGEST_DIFFERENCE:.0e}"
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=4, help="default: 4")
    parser.add_argument("--epochs", type=int, default=8, help="default: 8")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="default: %(default)s")
    args = parser.parse_args()
    epochs = max(args.epochs, COMPARED_EPOCHS)
    backends = [*args.backends.split(","), SINGLE]
    runs = {backend: train(backend, args.workers, epochs) for backend in backends}
    print(f"\n{args.workers} workers, {epochs} epochs; weights compared after {COMPARED_EPOCHS}")
    print(*summary(runs), sep="\n")
    found = faults(runs)
    for sentence in found:
        print(f"[quickstart] {sentence}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
