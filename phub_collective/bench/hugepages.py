"""Huge pages for shared memory, switched on for the length of a benchmark and then put back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phub_collective.errors import ConfigError
from phub_collective.machine import SHMEM_HUGE_PAGES


@contextmanager
def allowed(setting: Path = SHMEM_HUGE_PAGES) -> Iterator[None]:
    """Let shared memory that asks for huge pages have them while the block runs.

    Raises:
        ConfigError: this user may not change the kernel's setting, or it does not exist.
    """
    try:
        chosen = re.search(r"\[(\w+)\]", setting.read_text())
        before = chosen[1] if chosen else setting.read_text().strip()
        setting.write_text("advise")
    except OSError as error:
        raise ConfigError(
            f"[bench] --allow-hugepages writes {setting}, which failed ({error.strerror}); "
            "run as root on a kernel with transparent huge pages, or leave the option out"
        ) from error
    try:
        yield
    finally:
        setting.write_text(before)
