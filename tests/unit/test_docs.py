"""What the documents say: their commands parse, and their files and settings exist."""

from __future__ import annotations

import dataclasses
import re
import shlex
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from phub_collective import cli
from phub_collective.config import Config
from phub_collective.launch.cli import parser as phubrun_parser
from phub_collective.rendezvous.identity import LAUNCH_VARIABLES

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("phub_collective", "backends", "kernels", "tests", "docs", "scripts", "results")
SUFFIXES = (".py", ".h", ".cpp", ".md", ".toml", ".json")
# Variables that are no settings of Config, but of the build and of scripts.
OTHER_VARIABLES = {"PHUB_NATIVE", "PHUB_SANITIZE", "PHUB_VENV", "PHUB_PYTHON"}

WITH_COMMANDS = [
    *DOCUMENTS,
    *sorted((ROOT / "docs").rglob("*.py")),
    ROOT / "scripts/train_digits.py",
]

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def spans(text: str) -> list[str]:
    """What stands in backticks, outside of blocks of code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


def command_lines(text: str) -> list[str]:
    """The calls of phub and phubrun, in backticks and on lines of their own in blocks."""
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines()]
    return [one for one in (*spans(text), *lines) if re.match(r"phub(run)? \S", one)]


def is_command(line: str) -> bool:
    """Whether the real parsers take it; the name of a group of commands (`phub bench`) is good."""
    program, *words = shlex.split(line)
    try:
        if program == "phubrun":
            args = phubrun_parser().parse_args(words)
            return bool(args.command or args.check_build or words[0].startswith("--"))
        name = cli.command_in(words)
        if name is None:
            return any(one.split()[: len(words)] == words for one in cli.COMMANDS)
        cli.parser_of(name).parse_args(words[len(name.split()) :])
    except SystemExit:
        return False
    return True


@cache
def files() -> list[str]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return [str(path.relative_to(ROOT)) for path in (*found, *ROOT.iterdir())]


def is_path(word: str) -> bool:
    """Whether it looks like a file or folder of ours."""
    if not re.fullmatch(r"[\w.*-]+(/[\w.*-]*)*", word):
        return False
    return word.endswith(SUFFIXES) or word.split("/")[0] in FOLDERS and "/" in word


@pytest.mark.parametrize("document", WITH_COMMANDS, ids=lambda path: path.name)
def test_commands_parse(document: Path) -> None:
    wrong = [line for line in command_lines(document.read_text()) if not is_command(line)]
    assert not wrong


@each_document
def test_paths_exist(document: Path) -> None:
    """From the root, or from any folder down to the file (`torch/arena.py`, `placement.py`)."""
    missing = [
        word
        for word in filter(is_path, spans(document.read_text()))
        if not any(fnmatch(f"/{one}", f"*/{word.rstrip('/')}") for one in files())
    ]
    assert not missing


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text()):
        assert target.startswith("https://") or (document.parent / target).exists(), target


@each_document
def test_settings_exist(document: Path) -> None:
    known = {field.metadata["variable"] for field in dataclasses.fields(Config)}
    known |= OTHER_VARIABLES | set(LAUNCH_VARIABLES)
    assert set(re.findall(r"\bPHUB_[A-Z_]+", document.read_text())) <= known


def test_there_is_something_to_check() -> None:
    """And these checks can fail."""
    everything = "\n".join(document.read_text() for document in DOCUMENTS)
    assert len(set(command_lines(everything))) > 15
    assert len(set(filter(is_path, spans(everything)))) > 30
    for wrong in ("phub serve --prot 1", "phub bench exchnage", "phubrun -np x a", "phubrun -np 2"):
        assert not is_command(wrong), wrong
    assert is_path("backends/gone.py")
    assert not is_path("out of here.py")
