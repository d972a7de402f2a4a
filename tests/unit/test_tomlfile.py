"""TOML files against dataclasses: what is built, and the key that an error names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest

from phub_collective import tomlfile
from phub_collective.errors import ConfigError
from phub_collective.tomlfile import Rule, is_number

Inches = Annotated[float, Rule("inches", lambda value: is_number(value))]
Name = Annotated[str, Rule("a name", lambda value: isinstance(value, str))]


@dataclass(frozen=True)
class Wheel:
    inches: Inches


@dataclass(frozen=True)
class Cart:
    name: Name
    front: Wheel
    wheels: dict[str, Wheel]


GOOD = 'name = "x"\nfront.inches = 1\nwheels.left.inches = 2.5\nwheels."far left".inches = 3\n'


def test_tables_become_dataclasses() -> None:
    left, far = Wheel(2.5), Wheel(3)
    assert tomlfile.parse(GOOD, Cart, "test") == Cart(
        "x", Wheel(1), {"left": left, "far left": far}
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "x"', "name = 5", "test: name: expected a name, got 5"),
        ('name = "x"', "", "test: missing key name: expected a name"),
        ('name = "x"', 'name = "x"\ncolor = 5', "test: unknown key color: expected name, front"),
        ("front.inches = 1", "", "test: missing key front: expected a table"),
        ("front.inches = 1", "front = 1", "test: front: expected a table, got 1"),
        ("front.inches = 1", "front = {}", "test: missing key front.inches: expected inches"),
        (
            "front.inches = 1",
            "front.inches = true",
            "test: front.inches: expected inches, got True",
        ),
        (
            "inches = 3",
            'inches = "3"',
            "test: wheels.\"far left\".inches: expected inches, got '3'",
        ),
        ("front.inches", "= front", "test: expected TOML, got "),
    ],
)
def test_an_error_names_the_key(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        tomlfile.parse(GOOD.replace(old, new, 1), Cart, "test")
    assert str(raised.value).startswith(message)


def test_named_tables_must_be_some_and_tables() -> None:
    start = 'name = "x"\nfront.inches = 1\n'
    for wheels, message in (
        ("{}", r"wheels: expected at least one table \[wheels.NAME\]"),
        ("[]", "wheels: expected a table, got"),
        ("{ left = 1 }", "wheels.left: expected a table, got 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            tomlfile.parse(f"{start}wheels = {wheels}", Cart, "test")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    for path in (tmp_path / "none", tmp_path, binary):
        with pytest.raises(ConfigError, match=r"\[test\] expected a TOML file to read, got"):
            tomlfile.load(path, Cart, "test")
    good = tmp_path / "good"
    good.write_text(GOOD)
    assert tomlfile.load(good, Cart, "test").front == Wheel(1)


@pytest.mark.parametrize(
    ("value", "number", "whole"),
    [(1, True, True), (1.5, True, False), (True, False, False), ("1", False, False)],
)
def test_numbers(value: Any, number: bool, whole: bool) -> None:
    assert (is_number(value), is_number(value, whole=True)) == (number, whole)
