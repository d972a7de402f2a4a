"""The parts of phubrun that need no processes: reading -H, handing on to mpirun, output lines."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from phub_collective import backends
from phub_collective.errors import BackendUnavailable, ConfigError
from phub_collective.launch import check_build, cli, delegate
from phub_collective.launch.output import Forwarder


def test_hosts_are_read_in_order_with_their_slots() -> None:
    assert list(delegate.parse_hosts("b:2, a,c:10").items()) == [("b", 2), ("a", 1), ("c", 10)]


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:-1", "a:2:3", "a,,b", "a:1,a:2", ":3"])
def test_hosts_that_do_not_read_so_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST"):
        delegate.parse_hosts(text)


def stand_in(folder: Path, version: str) -> str:
    """A program that answers --version as some MPI's mpirun does, and else prints its arguments."""
    program = folder / "mpirun"
    program.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" || echo "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_each_mpi_gets_its_own_flags_and_no_values_of_variables(tmp_path: Path) -> None:
    settings = {"PATH": "/bin", "PHUB_TOKEN": "secret", "PHUB_LANE": "tcp"}
    where, command = {"a": 2, "b": 2}, ["python", "train.py"]
    mpich = stand_in(tmp_path, "HYDRA build details")
    words = delegate.mpirun_command(mpich, where, 4, settings, command)
    assert words[1:] == ["-n", "4", "-hosts", "a:2,b:2", "-prepend-rank", *command]
    open_mpi = stand_in(tmp_path, "mpirun (Open MPI) 5.0.1")
    words = delegate.mpirun_command(open_mpi, where, 4, settings, command)
    exported = ["-x", "PHUB_LANE", "-x", "PHUB_TOKEN"]
    assert words[1:] == ["-n", "4", "-H", "a:2,b:2", "--tag-output", *exported, *command]


def test_several_hosts_become_mpirun_with_the_settings_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = stand_in(tmp_path, "HYDRA")
    became: list[object] = []
    monkeypatch.setattr(delegate, "require_mpirun", lambda: program)
    monkeypatch.setenv("PHUB_RENDEZVOUS", "of a job around us")
    monkeypatch.setattr(os, "execvpe", lambda *call: became.extend(call))
    monkeypatch.setenv("PHUB_LOG_LEVEL", "debug")
    flags = ["-np", "3", "-H", "far:2,away:2", "--backend", "ring", "--verbose"]
    cli.main([*flags, "python", "x.py"])
    path, words, environment = became
    assert path == program
    assert isinstance(words, list)
    assert words[-2:] == ["python", "x.py"]
    assert isinstance(environment, dict)
    assert environment["PHUB_BACKEND"] == "ring"
    assert environment["PHUB_LOG_LEVEL"] == "debug"  # --verbose asks for no less than was set
    assert "PHUB_RENDEZVOUS" not in environment  # ranks shall find each other through MPI


def test_without_an_mpirun_the_other_ways_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BackendUnavailable, match="srun python .*torchrun"):
        delegate.require_mpirun()


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ([b"one\ntwo\n"], b"[3]<stdout>:one\n[3]<stdout>:two\n"),
        ([b"ha", b"lf\n"], b"[3]<stdout>:half\n"),
        ([b"no end"], b"[3]<stdout>:no end\n"),
        ([b"10%\r20%\r", b"done\n"], b"[3]<stdout>:10%\r[3]<stdout>:20%\r[3]<stdout>:done\n"),
        ([b"\n", b""], b"[3]<stdout>:\n"),
        ([bytes(range(128, 256)) + b"\n"], b"[3]<stdout>:" + bytes(range(128, 256)) + b"\n"),
    ],
)
def test_each_line_gets_its_prefix(
    written: list[bytes], shown: bytes, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    read, write = os.pipe()
    with open(read, "rb") as pipe:
        forwarder = Forwarder()
        forwarder.add(pipe, 3, 4, "stdout")
        forwarder.start()
        for piece in written:
            os.write(write, piece)
        os.close(write)
        assert forwarder.finish(10)
    assert capfdbinary.readouterr().out == shown


def test_check_build_answers_from_the_table_of_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"pbox": None, "mpi": "no mpi4py", "other": None}
    monkeypatch.setattr(backends, "available", lambda: answers)
    lines = check_build.report().splitlines()
    assert lines[0].startswith("phub_collective v")
    assert lines[2] == "Available Frameworks:"
    assert lines[lines.index("Available Controllers:") + 1] == "    [X] phubrun"
    at = lines.index("Available Tensor Operations:")
    assert lines[at + 1 :] == ["    [X] PBox", "    [ ] MPI (no mpi4py)", "    [X] other"]
