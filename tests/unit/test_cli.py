"""The phub command: its table, its exit codes, and the two commands that live beside it."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

import phub_collective
from phub_collective import cli
from phub_collective.errors import PeerLost


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"phub {phub_collective.__version__}\n"


@pytest.mark.parametrize("words", [[], ["nothing"], ["bench"], ["bench", "nothing"]])
def test_anything_else_is_wrong_usage(words: list[str]) -> None:
    assert cli.main(words) == 2


def test_a_typed_error_is_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("failing")

    def fail(args: object) -> int:
        raise PeerLost("[ring] rank 2 died", 2)

    module.__dict__.update(add_arguments=lambda parser: None, main=fail)
    monkeypatch.setitem(sys.modules, "failing", module)
    monkeypatch.setitem(cli.COMMANDS, "fail", cli.Command("fail", "failing"))
    assert cli.main(["fail"]) == 1
    assert capsys.readouterr().err == "phub fail: [ring] rank 2 died\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_of_the_table_has_help(name: str) -> None:
    command = [sys.executable, "-m", "phub_collective", *name.split(), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: phub {name}")


def test_config_shows_what_is_set_but_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHUB_TIMEOUT", "7")
    for variable in ("PHUB_TOKEN", "PHUB_ADMIN_TOKEN"):
        monkeypatch.setenv(variable, "0123456789abcdef")
    assert cli.main(["config"]) == 0
    shown = capsys.readouterr().out
    assert "PHUB_TIMEOUT=7.0  (set; default 30.0)" in shown
    assert "PHUB_LANE=auto  (default; default 'auto')" in shown
    assert "0123456789abcdef" not in shown


def test_doctor_looks_at_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor"])
    findings = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert findings["phub_collective"] == phub_collective.__version__
    assert findings["python"].endswith(f"({sys.executable})")
    assert code == (1 if "cannot be imported" in findings["native"] else 0)


def test_the_service_is_at_hand_in_the_package() -> None:
    from phub_collective.backends.pbox import service

    assert phub_collective.create_service is service.create_service
    assert phub_collective.connect_service is service.connect_service
    assert phub_collective.SGD(lr=0.5).lr == 0.5
    with pytest.raises(AttributeError, match="has no attribute 'serve'"):
        phub_collective.serve  # noqa: B018


def test_importing_the_package_imports_no_framework() -> None:
    code = "import sys, phub_collective.cli, phub_collective.launch.cli; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert not {"torch", "numpy", "mpi4py"} & set(loaded.split())
