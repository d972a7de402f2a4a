"""Key tables of the networks in the PHub paper, as MXNet defines them (its example symbols).

``paper_models.json`` maps a network to ``[tensor name, shape]`` for every tensor that is
exchanged. GoogleNet stands there for 299 x 299 images, the only size its classifier fits.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files

from phub_collective.backends.base import DType, Key
from phub_collective.errors import ConfigError


def model_names() -> list[str]:
    """Networks that `model_keys` knows."""
    return list(_shapes())


def model_keys(name: str, dtype: DType = DType.FLOAT32) -> list[Key]:
    """The key table of a network, in the order of its layers.

    Raises:
        ConfigError: there is no such network.
    """
    shapes = _shapes()
    if name not in shapes:
        raise ConfigError(f"[models] unknown model {name!r}; expected one of {', '.join(shapes)}")
    return [Key(tensor, tuple(shape), dtype) for tensor, shape in shapes[name]]


@cache
def _shapes() -> dict[str, list[tuple[str, list[int]]]]:
    text = files(__package__).joinpath("paper_models.json").read_text(encoding="utf-8")
    shapes: dict[str, list[tuple[str, list[int]]]] = json.loads(text)
    return shapes
