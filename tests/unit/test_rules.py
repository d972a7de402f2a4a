"""The text of PHUB_BACKEND."""

from __future__ import annotations

import pytest

from phub_collective.errors import ConfigError
from phub_collective.selection.rules import AUTO, parse
from phub_collective.sizes import parse_size

KNOWN = ["pbox", "ring", "gloo"]


@pytest.mark.parametrize(
    ("text", "picks"),
    [
        ("auto", {0: AUTO, 1 << 30: AUTO}),
        ("gloo", {0: "gloo", 1 << 30: "gloo"}),
        (" ring : <64KiB , pbox ", {0: "ring", 65535: "ring", 65536: "pbox"}),
        ("ring:<1KiB,gloo:<1MiB,pbox", {1023: "ring", 1024: "gloo", 1 << 20: "pbox"}),
        ("pbox:>=1MiB,ring", {(1 << 20) - 1: "ring", 1 << 20: "pbox"}),
        ("ring:<4096,auto", {4095: "ring", 4096: AUTO}),
        ("ring:<0.5GiB,pbox", {(1 << 29) - 1: "ring", 1 << 29: "pbox"}),
        ("^gloo", {0: AUTO}),
    ],
)
def test_the_first_rule_that_fits_decides(text: str, picks: dict[int, str]) -> None:
    rules = parse(text, KNOWN)
    assert {nbytes: rules.pick(nbytes) for nbytes in picks} == picks


def test_what_is_excluded_is_no_candidate() -> None:
    assert parse("^gloo,ring", KNOWN).candidates == ("pbox",)
    assert parse("auto", KNOWN).candidates == ("pbox", "ring", "gloo")


def test_forced_backends_are_known_beforehand() -> None:
    rules = parse("ring:<1KiB,gloo:<1MiB,ring", KNOWN)
    assert rules.forced == ["ring", "gloo"]
    assert not rules.uses_auto
    assert parse("ring:<1KiB,auto", KNOWN).uses_auto


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "there is no backend ''"),
        ("horovud", r"there is no backend 'horovud' \(there are pbox, ring, gloo\)"),
        ("^nccl", "there is no backend 'nccl'"),
        ("^pbox,ring,gloo", "nothing is left"),
        ("ring:<64KB,pbox", "'64KB' is no size"),
        ("ring:64KiB,pbox", "'64KiB' is no limit"),
        ("ring:<64KiB", "the last rule must have no size"),
        ("ring,pbox", "'ring' fits every size, so nothing after it counts"),
        ("ring:<,pbox", "'' is no size"),
        ("auto,^gloo", "there is no backend"),
    ],
)
def test_a_wrong_text_is_shown_with_the_grammar(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        parse(text, KNOWN)
    assert f"PHUB_BACKEND={text!r}" in str(caught.value)
    assert "ring:<64KiB,pbox" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("0", 0), ("17 B", 17), ("1.5KiB", 1536), ("2MiB", 1 << 21)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes
