"""Compression of what is sent; so far the choice is none."""

from __future__ import annotations

from phub_collective.errors import ConfigError


class NoCompression:
    """Tensors travel as they are."""


class Compression:
    """The choices for the `compression` argument."""

    none = NoCompression


def check_compression(compression: object) -> None:
    """Raise ConfigError for anything but `Compression.none`."""
    if compression is not Compression.none:
        raise ConfigError(
            f"[torch] compression={compression!r} is not available; expected Compression.none"
        )
