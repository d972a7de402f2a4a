"""_core.pyi tells the truth about the native core."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from phub_collective.backends.native import load

MODULE = "phub_collective.backends.native._core"
ROOT = Path(__file__).parents[2]
STUB = ast.parse((ROOT / "backends" / "native" / "_core.pyi").read_text())
# What no stub can say about a class of pybind11.
ALLOWED = """
# its metaclass
.*\\._core\\.[A-Z]\\w+
# it cannot be made by calling it
.*\\._core\\.(JobEvent|LaneCounters|Memory|MeshOperation|Table)\\.__init__
# before Python 3.12 the buffer protocol is invisible
.*\\._core\\.Memory\\.__buffer__
"""


def public(names: object) -> set[str]:
    return {name for name in names if not name.startswith("_")}  # type: ignore[attr-defined]


def stub_class(name: str) -> ast.ClassDef:
    (found,) = [n for n in STUB.body if isinstance(n, ast.ClassDef) and n.name == name]
    return found


def members(found: ast.ClassDef) -> dict[str, ast.FunctionDef | None]:
    """Functions and, as None, variables."""
    functions = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
    variables = {n.target.id for n in found.body if isinstance(n, ast.AnnAssign)}  # type: ignore[union-attr]
    return {**dict.fromkeys(variables), **functions}


def test_the_stub_is_what_is_there(tmp_path: Path) -> None:
    allowlist = tmp_path / "allowed"
    allowlist.write_text(ALLOWED)
    command = [sys.executable, "-m", "mypy.stubtest", MODULE, "--allowlist", str(allowlist)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=110, check=False, cwd=ROOT
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_no_class_is_missing_or_too_much() -> None:
    """The allowlist above hides that."""
    core = load()
    classes = {name for name, value in vars(core).items() if inspect.isclass(value)}
    stubbed = {node.name for node in STUB.body if isinstance(node, ast.ClassDef)}
    assert public(classes) == public(stubbed)


def test_the_kernels_are_what_is_there() -> None:
    """stubtest does not look into a submodule."""
    kernels = load().kernels
    stubbed = members(stub_class("_Kernels"))
    assert public(vars(kernels)) == public(stubbed)
    for name, value in vars(kernels).items():
        if inspect.isclass(value):
            assert public(vars(value)) == public(members(stub_class(f"_{name}")))


@pytest.mark.parametrize(
    "owner", ["_Kernels", *public(n.name for n in STUB.body if isinstance(n, ast.ClassDef))]
)
def test_arguments_have_the_names_of_the_binding(owner: str) -> None:
    """stubtest cannot see the parameters of pybind11's functions; their docstrings name them."""
    runtime = load().kernels if owner == "_Kernels" else getattr(load(), owner)
    for name, node in members(stub_class(owner)).items():
        document = getattr(vars(runtime).get(name), "__doc__", None) or ""
        if node is None or not document.startswith(f"{name}("):
            continue
        signature = document.splitlines()[0].split("(", 1)[1].rsplit(") ->", 1)[0]
        bound = [n for n in re.findall(r"(?:^|, |\()(\*?\w+)(?=:)", signature) if n != "self"]
        given = [a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg != "self"]
        assert bound == given, f"{owner}.{name}"
