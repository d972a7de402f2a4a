"""Rows between runs: results/<experiment>.json, each row stamped with the code it measured."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from experiments.base import Row

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("phub_collective", "backends", "kernels", "scripts/lab")  # what makes the numbers
SUFFIX = ".json"


def code_stamp() -> dict[str, str]:
    """The commit, and a mark of the measured sources that other commits may share."""
    trees = [_git("rev-parse", f"HEAD:{folder}")[:10] for folder in MEASURED]
    changed = _git("status", "--porcelain", "--", *MEASURED)
    mark = "-".join(trees) + ("-changed" if changed else "")
    today = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m-%d")
    return {"commit": _git("rev-parse", "--short", "HEAD"), "code": mark, "date": today}


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


class Store:
    """The files of a folder. `stamp`: of what is measured now."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.stamp = code_stamp()

    def keep(self, experiment: str, rows: Sequence[Row]) -> None:
        """Replace the rows of an experiment."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{experiment}{SUFFIX}"
        lines = ",\n".join(json.dumps(row) for row in rows)
        path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")

    def rows(self, experiment: str) -> list[Row]:
        """The rows of an experiment; empty: it was not run."""
        path = self._folder / f"{experiment}{SUFFIX}"
        if not path.exists():
            return []
        rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))
        return rows

    def known(self) -> dict[str, Row]:
        """By its key, what is measured already of the code as it is now."""
        found: dict[str, Row] = {}
        if self.stamp["code"].endswith("-changed"):
            return found
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            for row in self.rows(path.stem):
                if row["code"] == self.stamp["code"]:
                    found[row["key"]] = row
        return found
