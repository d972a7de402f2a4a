"""Somebody else's backend: one short file and an entry point, and the whole contract holds."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from contract import checks
from contract.jobs import Job
from contract.test_backends import PROMISES

from phub_collective import backends
from phub_collective.backends.base import Context
from phub_collective.errors import BackendUnavailable, ConfigError

TOY = Path(__file__).with_name("toy_backend.py")


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """What pip would leave in site-packages for a project with such an entry point."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{backends.ENTRY_POINT_GROUP}]\n{name} = {module}\n")
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    shutil.copy(TOY, tmp_path / "phub_toy.py")
    install(tmp_path, monkeypatch, "phub_toy", "toy")
    return "toy"


def test_a_backend_is_one_short_file() -> None:
    lines = [line for line in TOY.read_text().splitlines() if line.strip()]
    assert len(lines) < 60


def test_an_entry_point_is_a_row_of_the_table(toy: str) -> None:
    assert backends.names()[-1] == toy
    assert backends.available()[toy] is None


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_promise(
    toy: str, fresh_job: Callable[..., Job], promise: Callable[..., None], size: int
) -> None:
    fresh_job(toy, "auto", size).check(promise)


def test_its_errors(toy: str, fresh_job: Callable[..., Job]) -> None:
    job = fresh_job(toy, "auto", 2)
    job.check(checks.duplicate_names_are_refused)
    job.check(checks.mismatch_names_both_sides, "dtype", 0)


def test_an_unknown_name_lists_the_known_ones(toy: str, alone: Context) -> None:
    known = "pbox, pshard, ring, halving_doubling, mpi, gloo, zmq_ps, toy"
    with pytest.raises(ConfigError, match=f"'carrier_pigeon'; expected one of {known}"):
        backends.create("carrier_pigeon", alone)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such_library", "no_such_library"),
        ("raise OSError('no such device')", "no such device"),
        ("def is_available():\n    raise ValueError('a bad setting')", "a bad setting"),
        ("", "is_available"),
    ],
)
def test_a_broken_module_is_a_reason_and_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Context, source: str, why: str
) -> None:
    monkeypatch.delitem(sys.modules, "phub_broken", raising=False)
    (tmp_path / "phub_broken.py").write_text(source)
    install(tmp_path, monkeypatch, "phub_broken", "broken")
    reason = backends.available()["broken"]
    assert reason is not None
    assert why in reason
    assert not backends.runs_optimizer("broken")
    with pytest.raises(BackendUnavailable, match=rf"\[broken\].*rank 0.*{why}"):
        backends.create("broken", alone)


def test_mpi_is_unavailable_without_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(variable, raising=False)
    assert backends.available()["mpi"] == "not started by mpirun"
