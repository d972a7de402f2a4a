"""Compression of what is sent; so far the choice is none."""

from __future__ import annotations

from typing import NoReturn

from phub_collective.errors import ConfigError


class NoCompression:
    """Tensors travel as they are."""


class _Choices(type):
    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(
            f"Compression.{name} is not in phub_collective.torch; use Compression.none, or "
            "exchange what you have cast to float16 yourself"
        )


class Compression(metaclass=_Choices):
    """The choices for the `compression` argument."""

    none = NoCompression


def check_compression(compression: object) -> None:
    """Raise ConfigError for anything but `Compression.none`."""
    if compression is not Compression.none:
        raise ConfigError(
            f"[torch] compression={compression!r} is not available; expected Compression.none"
        )
