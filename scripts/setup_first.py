"""For scripts that are run as they are, on a fresh checkout too."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SET_UP = 'back=$PWD; cd "$1"; shift; source scripts/_setup; cd "$back"; exec "$python" "$@"'


def require(*modules: str) -> None:
    """Go on where this Python has all modules; else run the script again with the checkout's own
    virtual environment, which is made first. Call it before anything else is imported."""
    if all(importlib.util.find_spec(name) for name in modules):
        return
    if os.environ.get("PHUB_SET_UP"):
        sys.exit(f"{sys.argv[0]}: {', '.join(modules)} are missing after the set-up")
    environment = {**os.environ, "PHUB_SET_UP": "1"}
    words = ["bash", "-euc", SET_UP, "bash", str(ROOT), *sys.argv]
    sys.stdout.flush()
    os.execvpe("bash", words, environment)
