"""The package's log: the application chooses where it goes; standard error where it does not."""

from __future__ import annotations

import logging

PACKAGE = "phub_collective"


def set_level(level: str) -> None:
    """Log from `level` ("debug", "info", "warning", "error") on; to standard error, unless the
    application has handlers of its own. Loggers are Python's, one set for the whole process."""
    logger = logging.getLogger(PACKAGE)
    logger.setLevel(level.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("phub: %(message)s"))
        logger.addHandler(handler)
