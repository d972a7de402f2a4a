"""The documented NumPy example, as a user runs it; and that no torch is needed for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pbox_jobs import SOON, box

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "numpy_service.py"


def test_the_example_fits_the_line() -> None:
    with box() as pbox:
        command = [sys.executable, str(EXAMPLE), pbox.address]
        run = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=False)
    assert run.returncode == 0, run.stderr
    errors = run.stdout.split("largest errors: [")[1].rstrip("]\n").split(", ")
    assert len(errors) == 2
    assert all(float(error) < 1e-6 for error in errors)


def test_the_service_imports_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; "
        "import phub_collective.backends.pbox.service, phub_collective.backends.pbox.serve"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SOON)
