"""What setup.py builds: every module once under its installed name, and clear words otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = (".py", ".pyi", ".json", ".toml", ".typed")

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not in a checkout")


def setup(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", *words]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )


def test_a_wheel_holds_each_module_once(tmp_path: Path) -> None:
    apart = ["build", "--build-base", str(tmp_path), "egg_info", "--egg-base", str(tmp_path)]
    done = setup(*apart, "bdist_wheel", "--dist-dir", str(tmp_path), PHUB_NATIVE="0")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert max(Counter(names).values()) == 1
    for folder in ("phub_collective", "backends", "kernels"):
        inside = "" if folder == "phub_collective" else "phub_collective/"
        shipped = [p for p in (ROOT / folder).rglob("*") if p.suffix in SHIPPED]
        missing = {inside + str(path.relative_to(ROOT)) for path in shipped} - set(names)
        assert not missing
    assert not [name for name in names if name.endswith((".cpp", ".h", ".so"))]


def test_without_a_compiler_the_message_says_what_to_install(tmp_path: Path) -> None:
    done = setup("build_ext", "--build-temp", str(tmp_path), CXX="", PATH="/nowhere")
    assert done.returncode != 0
    assert "apt-get install g++" in done.stderr
    assert "Traceback" not in done.stderr
