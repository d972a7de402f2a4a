"""The selector: the cheapest backend by size, the same on every rank, and what may go wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fakes import FakeModule, install
from ranks import ThreadRanks, run_threads

from phub_collective import backends
from phub_collective.backends.base import Context
from phub_collective.errors import ConfigError, MismatchError
from phub_collective.selection.explain import report
from phub_collective.selection.selector import Selector, Table
from phub_collective.sizes import size_text, time_text

KIB, MIB = 1 << 10, 1 << 20


class Fakes(NamedTuple):
    """1 ms and 1 GB/s against 10 ms at any size: 9 MB take both as long."""

    ring: FakeModule
    pbox: FakeModule


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Fakes:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = Fakes(FakeModule("ring", 1e-3, 1e9), FakeModule("pbox", 10e-3, 1e15))
    install(monkeypatch, found.pbox, found.ring)
    return found


def prepared(context: Context, fresh: bool = False) -> Selector:
    selector = Selector(context)
    selector.prepare(lambda name: backends.create(name, context), fresh)
    return selector


def test_the_cheapest_is_chosen_by_size_on_every_rank(fakes: Fakes) -> None:
    selectors = run_threads(3, prepared)
    for selector in selectors:
        assert [selector.choose(n) for n in (0, 4 * KIB, MIB)] == ["ring"] * 3
        assert [selector.choose(n) for n in (32 * MIB, 1 << 40)] == ["pbox"] * 2
        assert selector.table.to_json() == selectors[0].table.to_json()
    (_, small), (turn, large) = selectors[0].table.rows
    assert (small, large) == ("ring", "pbox")
    assert 4 * MIB < turn < 20 * MIB


def test_measurements_are_kept_for_the_next_job(fakes: Fakes) -> None:
    first = run_threads(2, prepared)[0].table
    measured = fakes.ring.used
    second = run_threads(2, prepared)[0].table
    assert fakes.ring.used == measured
    assert second.rows == first.rows
    assert (first.source, second.source.split()[0]) == ("measured now", "cached")
    run_threads(2, prepared, True)  # fresh
    assert fakes.ring.used > measured
    run_threads(3, prepared)  # another number of ranks is another measurement
    assert len(list(Path(second.source.removeprefix("cached in ")).parent.iterdir())) == 2


def test_a_broken_cache_is_measured_again(fakes: Fakes) -> None:
    run_threads(2, prepared)
    cached = run_threads(2, prepared)[0].table.source.removeprefix("cached in ")
    Path(cached).write_text("{not json")
    assert run_threads(2, prepared)[0].table.source == "measured now"
    assert run_threads(2, prepared)[0].table.source.startswith("cached")


@pytest.mark.parametrize("text", ["pbox", "ring:<64KiB,pbox"])
def test_forced_backends_are_not_measured(fakes: Fakes, text: str) -> None:
    selector = run_threads(2, prepared, backend=text)[0]
    assert selector.choose(MIB) == "pbox"
    assert fakes.pbox.used == fakes.ring.used == 0


def test_one_candidate_is_not_measured(fakes: Fakes) -> None:
    fakes.pbox.reason = "not today"
    selector = run_threads(2, prepared)[0]
    assert selector.choose(1 << 40) == "ring"
    assert fakes.ring.used == 0
    assert selector.table.reasons == {"pbox": "not today"}


def test_one_rank_starts_no_server(fakes: Fakes) -> None:
    assert run_threads(1, prepared)[0].choose(1 << 40) == "ring"
    assert fakes.pbox.made == []


def test_excluded_backends_are_no_candidates(fakes: Fakes) -> None:
    selector = run_threads(2, prepared, backend="^ring")[0]
    assert selector.choose(0) == "pbox"
    assert selector.table.reasons == {"ring": "excluded by PHUB_BACKEND=^ring"}


def test_a_baseline_is_used_only_where_it_is_named(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = backends.BASELINES
    baseline = FakeModule(name, 1e-6, 1e15)
    install(monkeypatch, fakes.pbox, fakes.ring, baseline)
    selector = run_threads(2, prepared)[0]
    assert name not in {selector.choose(size) for size in (0, MIB, 1 << 30)}
    assert "a baseline to compare with" in selector.table.reasons[name]
    assert baseline.made == []
    assert run_threads(2, prepared, backend=f"{name}:<1MiB,ring")[0].choose(0) == name
    with pytest.raises(ConfigError, match="a baseline to compare with"):
        run_threads(2, prepared, backend="^pbox,ring")


def test_what_cannot_be_connected_on_one_rank_is_no_candidate_on_any(fakes: Fakes) -> None:
    fakes.ring.broken_on = 1
    for selector in run_threads(3, prepared):
        assert selector.choose(0) == "pbox"
        assert selector.table.reasons == {"ring": "[ring] broken on rank 1"}


def test_nothing_usable_is_an_error_with_all_reasons(fakes: Fakes) -> None:
    fakes.ring.reason, fakes.pbox.reason = "no lanes", "no server"
    with pytest.raises(ConfigError, match="pbox: no server; ring: no lanes"):
        run_threads(2, prepared)


def test_different_rules_are_an_error_on_every_rank(fakes: Fakes) -> None:
    def other_text_on_rank_1(context: Context, texts: list[str]) -> str:
        with ThreadRanks(1, backend=texts[context.rank]) as own:
            config = own.contexts[0].config
        selector = Selector(Context(context.rank, 3, 0, 3, context.rendezvous, config))
        with pytest.raises(MismatchError) as caught:
            selector.prepare(lambda name: backends.create(name, context))
        return str(caught.value)

    for rank, text in enumerate(run_threads(3, other_text_on_rank_1, ["auto", "ring", "auto"])):
        assert "'auto'" in text
        assert "rank 1 has 'ring'" in text
        assert f"rank {rank} has" in text


def test_a_table_survives_the_wire(fakes: Fakes) -> None:
    table = run_threads(2, prepared)[0].table
    again = Table.from_json(table.to_json(), 2)
    assert again == table
    assert again.curves["ring"].seconds(3 * MIB) == table.curves["ring"].seconds(3 * MIB)


def test_explain_prints_the_table_and_why(fakes: Fakes) -> None:
    def lines(context: Context) -> list[str]:
        return list(report(prepared(context), 2, 2, context.config))

    text = run_threads(2, lines, backend="ring:<1KiB,auto")[0]
    rows = [line.split() for line in text if line.endswith(("ring", "pbox"))]
    assert rows[0][0] == "0B"
    assert [row[-1] for row in rows[:2]] == ["ring", "pbox"]
    assert any(row[0] == "100MiB" and row[-1] == "pbox" for row in rows)
    assert any("1.00 GB/s" in line or "GB/s" in line for line in text)


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0B"), (1023, "1023B"), (65536, "64KiB"), (3 << 29, "1.5GiB")]
)
def test_sizes_are_readable(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(1.25e-5, "12.5 us"), (4.5e-3, "4.5 ms"), (1.5, "1.5 s")]
)
def test_times_are_readable(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({}, "pbox"),
        ({"shards": "rank"}, "pshard"),
        ({"pbox": "elsewhere:4000"}, "pshard"),
        ({"backend": "^pbox"}, "pshard"),
    ],
)
def test_a_pshard_that_would_be_a_pbox_is_no_candidate(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], chosen: str
) -> None:
    """One shard beside all ranks, where pbox starts the same."""
    pshard = FakeModule("pshard", 1e-3, 1e15)
    install(monkeypatch, fakes.pbox, fakes.ring, pshard)
    selector = run_threads(2, prepared, **settings)[0]
    assert selector.choose(1 << 40) == chosen
    assert bool(pshard.made) == (chosen == "pshard")
    assert ("pshard" in selector.table.reasons) == (chosen == "pbox")
