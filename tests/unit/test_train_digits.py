"""The main job: the same weights by every way of exchanging and under every launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

SCRIPTS = Path(__file__).parents[2] / "scripts"
TRAINING = str(SCRIPTS / "train_digits.py")
BESIDE_PYTHON = Path(sys.executable).parent
PHUBRUN = [sys.executable, "-m", "phub_collective.launch.cli", "-np"]


def script(name: str) -> ModuleType:
    """A file of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def train(folder: Path, launch: Sequence[str], *flags: str) -> tuple[dict[str, Any], Any]:
    """What a training reported, and its weights."""
    outcome, weights = folder / "outcome.json", folder / "weights.pt"
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, TRAINING, *flags, "--json", str(outcome), "--save", str(weights)],
        capture_output=True, text=True, timeout=100, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(outcome.read_text()), torch.load(weights)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weights of a single process after two epochs, and the outcome of all eight."""
    folder = tmp_path_factory.mktemp("alone")
    return train(folder, [sys.executable], "--save-epoch", "2")


def test_a_single_process_learns(alone: Any) -> None:
    outcome, _ = alone
    assert outcome["ranks"] == 1
    assert len(outcome["accuracy"]) == 8
    assert outcome["accuracy"][0] < 0.9  # else the data would be too easy to show anything
    assert outcome["accuracy"][-1] >= 0.95


SERVER = ("--optimizer-place", "server")
# Of what test_torch_ranks.py and the quickstart's test train too.
LONG = pytest.mark.skipif(not os.environ.get("PHUB_TEST_LONG"), reason="long: set PHUB_TEST_LONG=1")


@pytest.mark.parametrize(
    ("launch", "flags"),
    [
        ([*PHUBRUN, "3", sys.executable], ("--backend", "ring")),
        pytest.param(
            [*PHUBRUN, "3", "--backend", "halving_doubling", sys.executable], (), marks=LONG
        ),
        pytest.param([*PHUBRUN, "3", sys.executable], ("--backend", "pbox"), marks=LONG),
        pytest.param([*PHUBRUN, "2", sys.executable], ("--backend", "pbox", *SERVER), marks=LONG),
        ([*PHUBRUN, "3", sys.executable], ("--backend", "pbox", *SERVER, "--shared-model")),
        ([str(BESIDE_PYTHON / "mpirun"), "-n", "2", sys.executable], ("--backend", "mpi")),
        ([str(BESIDE_PYTHON / "torchrun"), "--nproc-per-node", "2"], ("--backend", "gloo")),
    ],
    ids=["ring", "halving_doubling", "pbox", "server", "shared model", "mpirun", "torchrun"],
)
def test_ranks_get_the_weights_of_a_single_process(
    tmp_path: Path, alone: Any, launch: Sequence[str], flags: Sequence[str]
) -> None:
    outcome, weights = train(tmp_path, launch, "--epochs", "2", *flags)
    _, expected = alone
    assert outcome["ranks"] == int(next(word for word in launch if word.isdecimal()))
    assert outcome["exchange_s"] > 0
    words = [*launch, *flags]
    assert outcome["backend"] == words[words.index("--backend") + 1]  # whoever was told
    difference = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
    assert difference <= 1e-4
    moved = max(float(expected[name].abs().max()) for name in expected)
    assert moved > 100 * 1e-4  # the comparison means something


@pytest.mark.parametrize("staleness", [pytest.param("2", marks=LONG), "inf"])
def test_steps_of_single_ranks_train_as_well(tmp_path: Path, staleness: str) -> None:
    words = [*PHUBRUN, "3", "--backend", "pbox", sys.executable]
    # Three steps where a synchronous run makes one, so smaller ones.
    outcome, _ = train(tmp_path, words, *SERVER, "--staleness", staleness, "--lr", "0.02")
    assert outcome["accuracy"][-1] >= 0.93


# What comes late is amplified by momentum, which two of the compressions do not bear here.
PLAIN = ("--lr", "0.3", "--momentum", "0")


@pytest.mark.parametrize(
    ("compression", "flags"),
    [
        pytest.param("fp16", ("--backend", "ring"), marks=LONG),
        pytest.param("bf16", ("--backend", "pbox", *SERVER), marks=LONG),
        ("two_bit:0.05", ("--backend", "pbox", *PLAIN)),
        pytest.param("one_bit", ("--backend", "pbox", *PLAIN, *SERVER), marks=LONG),
        ("topk:0.02", ("--backend", "pbox", *SERVER)),
    ],
)
def test_what_is_compressed_learns_too(
    tmp_path: Path, compression: str, flags: Sequence[str]
) -> None:
    launch = [*PHUBRUN, "2", sys.executable]
    outcome, _ = train(tmp_path, launch, "--compression", compression, *flags)
    assert outcome["compression"] == compression
    assert outcome["accuracy"][-1] >= 0.93


def test_an_unknown_backend_is_an_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PHUBRUN, "2", sys.executable, TRAINING, "--backend", "fax"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode != 0
    assert "there is no backend 'fax'" in done.stdout + done.stderr


def test_batches_hold_every_image_once_in_a_given_order() -> None:
    module = script("train_digits")
    digits = module.Digits.read()
    count = len(digits.labels)
    assert count + len(digits.test_labels) == 1797
    first, again, other = (list(digits.batches(epoch, seed=1, size=64)) for epoch in (1, 1, 2))
    assert len(first) == digits.batch_count(64)
    assert sorted(torch.cat(first).tolist()) == list(range(count))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(torch.cat(first), torch.cat(other))


class TestQuickstart:
    def test_faults_are_found(self) -> None:
        quickstart = script("quickstart")

        def run(accuracy: float, weight: float) -> Any:
            outcome = {"accuracy": [0.1, accuracy]}
            return quickstart.Run(outcome, {"w": torch.tensor([0.0, weight])})

        runs = {
            "good": run(0.95, 1.00005),
            "dull": run(0.94, 1.0),
            "astray": run(0.99, 1.0002),
            "broken": run(0.99, float("nan")),
            quickstart.SINGLE: run(0.97, 1.0),
        }
        assert [sentence.split(":")[0] for sentence in quickstart.faults(runs)] == [
            "dull",
            "astray",
            "broken",
        ]

    def test_it_compares_and_says_so(self) -> None:
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / "quickstart.py"),
             "--workers", "2", "--backends", "gloo", "--epochs", "2"],
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert "gloo             epoch 2/2 test accuracy" in done.stdout
        assert [line.split()[0] for line in done.stdout.splitlines()[-3:]] == [
            "backend",
            "gloo",
            "single",
        ]
        # Two epochs are too few to learn enough, so exactly that must be what fails.
        assert done.returncode == 1
        assert "gloo: accuracy" in done.stderr
        assert "weights differ" not in done.stderr
