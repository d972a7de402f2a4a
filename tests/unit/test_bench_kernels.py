"""`phub bench kernels` on arrays that are small: its columns, its check, its exit code."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("phub_collective.backends.native._core")

from phub_collective.backends.base import SGD, DType, Key
from phub_collective.bench import kernels, ways
from phub_collective.bench.walks import Case
from phub_collective.errors import ConfigError
from phub_collective.kernels import reference
from phub_collective.kernels.reference import sgd


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    small = ["--size", "512KiB", "--chunk", "4KiB", "--rounds", "2", "--model", ""]
    return parser.parse_args([*small, *words])


@pytest.mark.parametrize("stores", ["cached", "streaming"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_every_number_is_right(stores: str, dtype: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    args = parse("--arrays", "1,8", "--stores", stores, "--dtype", dtype, "--json", str(file))
    assert kernels.main(args) == 0
    results = json.loads(file.read_text())
    rows = {(row["walk"], row["arrays"], row["threads"]): row for row in results["rows"]}
    assert len(rows) == 2 * (3 + 3 * 2)
    for walk, arrays, threads in (("reduce", 8, 1), ("sgd", 1, 2), ("sgd", 8, 2), ("adam", 8, 2)):
        row = rows[walk, arrays, threads]
        assert row["wrong"] == 0
        assert row["stores"] == stores
        assert row["median_s"] > 0
        assert row["times_floor"] > 0
    assert rows["copy", 1, 1]["times_floor"] == pytest.approx(1)
    assert results["header"]["chunk_bytes"] == 4096


def test_a_wrong_number_is_counted_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def off_by_one(*args: Any) -> np.ndarray:
        result = finish(*args)
        result[3] += 1
        return result

    finish = reference.finish
    monkeypatch.setattr(reference, "finish", off_by_one)
    assert kernels.main(parse("--arrays", "2", "--threads", "1")) == 1
    assert "1 numbers WRONG" in capsys.readouterr().out


def test_bytes_that_a_walk_moves() -> None:
    cached, streamed = Case("reduce", 4, 1, False), Case("reduce", 4, 1, True)
    assert (cached.loads, cached.stores) == (5, 1)
    assert (streamed.loads, streamed.stores) == (4, 1)
    assert (Case("sgd", 4, 1, False).loads, Case("sgd", 4, 1, False).stores) == (7, 2)
    assert (Case("adam", 4, 1, False).loads, Case("adam", 4, 1, False).stores) == (8, 3)
    assert (Case("read", 1, 1, False).loads, Case("read", 1, 1, False).stores) == (1, 0)


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [Key("a", (3000,), DType.FLOAT32), Key("b", (7,), DType.FLOAT32),
            Key("c", (50, 50), DType.FLOAT32)]  # fmt: skip
    monkeypatch.setattr(ways, "model_keys", lambda name: keys)


@pytest.mark.usefixtures("small_model")
def test_tall_and_wide_aggregate_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.json"
    args = parse("--arrays", "1", "--model", "Small", "--threads", "1,2", "--json", str(file))
    assert kernels.main(args) == 0
    rows = json.loads(file.read_text())["ways"]
    cases = {(row["way"], row["stores"], row["threads"]) for row in rows}
    assert len(cases) == len(rows) == 8
    assert all(row["wrong"] == 0 and row["median_s"] > 0 for row in rows)
    assert all(row["times_tall"] == 1 for row in rows if row["way"] == "tall")
    assert "paper: tall 20 times as fast" in capsys.readouterr().out


@pytest.mark.usefixtures("small_model")
def test_a_wrong_sum_of_a_model_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(rule: SGD, *arrays: Any) -> Any:
        weights, momentum, gradient, scale = arrays
        return sgd(rule, weights, momentum, gradient, 2 * scale)

    monkeypatch.setattr(reference, "sgd", doubled)
    assert kernels.main(parse("--arrays", "1", "--model", "Small", "--threads", "1")) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arrays", "9"], "numbers from 1 to 8"),
        (["--threads", "0,1"], "numbers from 1 to 1024"),
        (["--chunk", "100"], "multiples of 128"),
        (["--size", "4KiB"], "expected at least 256KiB"),
        (["--rounds", "0"], "expected at least 1"),
    ],
)
def test_wrong_flags_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kernels.main(parse(*words))
