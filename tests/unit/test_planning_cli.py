"""`phub plan`: what it prints, its JSON, and what it says of wrong flags and files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from experiments import published

from phub_collective import cli
from phub_collective.planning import cost
from phub_collective.planning.prices import Prices, example_text


def shown(capsys: pytest.CaptureFixture[str], line: str, *words: str) -> list[str]:
    """The lines of `phub plan ...`, which must succeed."""
    assert cli.main(["plan", *line.split(), *words]) == 0
    return capsys.readouterr().out.splitlines()


def error_of(capsys: pytest.CaptureFixture[str], line: str, *words: str) -> str:
    """The message of `phub plan ...`, which must fail with one."""
    assert cli.main(["plan", *line.split(), *words]) == 1
    return capsys.readouterr().err


def table(lines: list[str]) -> list[list[str]]:
    """The cells of the table, titles too; columns stand at least two spaces apart."""
    rows = [line for line in lines if not line.startswith("#")]
    return [[cell.strip() for cell in row.split("  ") if cell.strip()] for row in rows]


def document(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rows of a JSON file."""
    content = json.loads(path.read_text())
    return content["header"], content["rows"]


class TestBandwidth:
    @pytest.mark.parametrize(
        ("model", "batch"),
        [
            ("AlexNet", "17.22ms"),
            ("GoogleNet299", "104.4ms"),
            ("InceptionV3", "227.3 ms"),
            ("ResNet269", "0.3477s"),
        ],
    )
    def test_prints_the_papers_table_2(
        self, model: str, batch: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = shown(capsys, f"bandwidth --workers 8 --model {model} --batch-time", batch)
        _, *rows = table(lines)
        assert {row[0]: int(row[3]) for row in rows} == published.TABLE_2[model]

    def test_json_has_the_units_of_links(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "need.json"
        lines = shown(
            capsys, "bandwidth --bytes 100MiB --workers 4 --batch-time 0.5 --json", str(path)
        )
        header, rows = document(path)
        assert header == {"model": "-", "bytes": 100 << 20, "workers": 4, "batch_s": 0.5}
        assert "# batch_s: 0.5" in lines
        row = next(row for row in rows if row["deployment"] == "NCC")
        assert row["GBps"] == pytest.approx(8 * 104.8576e6 / 0.5 / 1e9)
        assert row["each_way_Gbps"] == pytest.approx(4 * row["GBps"])
        assert row["paper_Gbps"] == pytest.approx(8 * 100 * 8 / 1024 / 0.5)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("--model Alex --batch-time 1", "unknown model 'Alex'; expected one of AlexNet"),
            ("--bytes many --batch-time 1", "--bytes: 'many' is no size; expected 4096"),
            ("--bytes 4 --batch-time 1m", "--batch-time '1m': expected seconds, or a time such"),
            ("--bytes 4 --batch-time 0", "above 0, got 4 bytes, 8 workers and 0 s"),
        ],
    )
    def test_wrong_flags(
        self, words: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert message in error_of(capsys, f"bandwidth --workers 8 {words}")


class TestCost:
    def test_the_example_is_a_file_to_start_from(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        lines = shown(capsys, "cost --example")
        assert "ours, NOT the paper's" in lines[0]
        config = tmp_path / "prices.toml"
        config.write_text("\n".join(lines))
        path = tmp_path / "cost.json"
        titles, *rows = table(shown(capsys, "cost --json", str(path), "--config", str(config)))
        assert titles[0] == "workers"
        assert [row[-1] for row in rows if row[1] == "pbox, 2:1"] == ["+25.7%", "+5.4%", "+36.0%"]
        assert [row[2] for row in rows[:4]] == ["-", "44", "65", "76"]
        header, saved = document(path)
        assert header == {"prices": str(config)}
        assert len(saved) == len(rows) == 3 * 4
        last, prices = saved[-1], Prices.example()
        assert last["gain"] == cost.gain(prices, "cheap processors", 3)
        assert last["dollars"] == cost.with_pbox(prices, "cheap processors", 3).dollars
        assert saved[0]["gain"] is None

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("card = 795.0", "", "missing key network.baseline.card: expected dollars, at least 0"),
            ("card = 795.0", "cart = 795.0", "unknown key network.baseline.cart: expected card, "),
            ("cable = 31.25", "cable = -1", "network.pbox.cable: expected dollars, at least 0, "),
            (
                "ports = 20 ",
                "ports = 20.5 ",
                "pbox.ports: expected a whole number, above 0, got 20",
            ),
            (
                "ports = 20 ",
                "ports = true ",
                "pbox.ports: expected a whole number, above 0, got Tr",
            ),
            ("= 0.02", '= "2%"', "pbox.overhead: expected a share from 0 to below 1, got '2%'"),
            (
                "gpu = 8000.0",
                "gpu = nan",
                "workers.V100.gpu: expected dollars, at least 0, got nan",
            ),
            ("processor = 213.0", "", 'missing key workers."cheap processors".processor: expected'),
            ("[workers.V100]", "[workers.V100", "expected TOML, got "),
            ("ports = 20 ", "ports = 200 ", "network.pbox.switch_ports=128, of which 64 lead to"),
        ],
    )
    def test_a_wrong_file_is_told_by_the_key(
        self, old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert old in example_text()
        config = tmp_path / "prices.toml"
        config.write_text(example_text().replace(old, new))
        error = error_of(capsys, "cost --config", str(config))
        assert error.startswith("phub plan cost: [plan] ")
        assert message in error

    def test_no_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        error = error_of(capsys, "cost --config", str(tmp_path / "none.toml"))
        assert "expected a TOML file to read, got [Errno 2]" in error

    def test_the_example_computes_nothing(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "--json: expected with --config" in error_of(capsys, "cost --example --json x")


class TestScale:
    def test_the_papers_120_workers(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "scale.json"
        lines = shown(capsys, "scale --json", str(path))
        assert lines[-1] == "# up to 120 workers; memory is the limit"
        _, memory, network = table(lines)
        assert memory == ["memory", "6", "90", "120", "yes"]
        assert network == ["network", "4", "140", "280", "no"]
        header, rows = document(path)
        assert header == {"measured_workers": 8}
        assert [(row["workers"], row["binds"]) for row in rows] == [(120, True), (280, False)]

    def test_a_newer_platform(self, capsys: pytest.CaptureFixture[str]) -> None:
        lines = shown(capsys, "scale --memory-factor 1.4")
        assert lines[-1] == "# up to 168 workers; memory is the limit"

    def test_where_the_network_binds(self, capsys: pytest.CaptureFixture[str]) -> None:
        lines = shown(capsys, "scale --network 20 --network-limit 50 --workers 16")
        assert lines[-1] == "# up to 40 workers; network is the limit"

    def test_numbers_must_be_above_0(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "got 0 GB/s of memory at 8 workers" in error_of(capsys, "scale --memory 0")
