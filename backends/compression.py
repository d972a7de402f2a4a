"""How gradients are packed before they are sent. What the forms are stands in kernels/packed.h."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from phub_collective.errors import ConfigError


class Packing(enum.IntEnum):
    """Forms of a gradient; the numbers are those of `Packing` in kernels/packed.h."""

    NONE = 0
    FP16 = 1
    BF16 = 2
    TWO_BIT = 3
    ONE_BIT = 4
    TOPK = 5


# What the parameter of a packing is, its default, and its bounds.
_PARAMETERS = {
    Packing.TWO_BIT: ("threshold", 0.5, 1e-30, 1e30),
    Packing.TOPK: ("ratio", 0.01, 1e-9, 0.5),
}


@dataclass(frozen=True)
class Compression:
    """A packing and its parameter: the threshold of TWO_BIT, the share of elements that TOPK sends.

    Raises:
        ConfigError: the parameter is out of bounds.
    """

    packing: Packing = Packing.NONE
    parameter: float = 0.0

    def __post_init__(self) -> None:
        name, _, least, most = _PARAMETERS.get(self.packing, ("parameter", 0.0, 0.0, 0.0))
        if not least <= self.parameter <= most:
            raise ConfigError(
                f"[compression] {self.packing.name.lower()}: expected a {name} from {least:g} to "
                f"{most:g}, got {self.parameter!r}"
            )

    @staticmethod
    def of(text: str) -> Compression:
        """What a command line says: "none", "fp16", "bf16", "two_bit[:THRESHOLD]", "one_bit" or
        "topk[:RATIO]".

        Raises:
            ConfigError: it says something else.
        """
        name, colon, value = text.partition(":")
        try:
            packing = Packing[name.upper()]
            _, default, *_ = _PARAMETERS.get(packing, ("", 0.0))
            parameter = float(value) if colon else default
        except (KeyError, ValueError):
            raise ConfigError(
                f"[compression] {text!r}: expected none, fp16, bf16, two_bit[:threshold], one_bit "
                "or topk[:ratio]"
            ) from None
        return Compression(packing, parameter)

    @property
    def packs(self) -> bool:
        """Whether anything is packed at all."""
        return self.packing is not Packing.NONE

    @property
    def has_residual(self) -> bool:
        """Whether what was not sent is kept and added to the next gradient. The sum of such forms
        has not their form, so only a server can add them up."""
        return self.packing >= Packing.TWO_BIT

    @property
    def is_elementwise(self) -> bool:
        """Whether each element is packed by itself; the others look at a whole chunk."""
        return self.packing <= Packing.TWO_BIT

    def __str__(self) -> str:
        parameter = f":{self.parameter!r}" if self.packing in _PARAMETERS else ""
        return self.packing.name.lower() + parameter


NO_COMPRESSION = Compression()
