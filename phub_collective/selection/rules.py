"""The text of PHUB_BACKEND: which backend may be used for which size. Pure.

text  := "auto" | "^" names | rule ("," rule)*
names := NAME ("," NAME)*                     auto, without these
rule  := NAME [":<" SIZE | ":>=" SIZE]        the first rule that fits decides; NAME may be
                                              auto; the last one must have no size
SIZE  := number ["B" | "KiB" | "MiB" | "GiB"]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from phub_collective.errors import ConfigError
from phub_collective.sizes import parse_size

AUTO = "auto"
GRAMMAR = (
    "expected auto, NAME, ^NAME,NAME (auto without these), or rules by size such as "
    "ring:<64KiB,pbox (units B, KiB, MiB, GiB; < or >=; the last rule without a size)"
)


@dataclass(frozen=True)
class Rule:
    """Use `name` where ``begin <= bytes < end``."""

    name: str
    begin: int = 0
    end: int | None = None

    def fits(self, nbytes: int) -> bool:
        return self.begin <= nbytes and (self.end is None or nbytes < self.end)


@dataclass(frozen=True)
class Rules:
    """A parsed PHUB_BACKEND.

    Attributes:
        text: as it was written.
        rules: the first that fits decides; the last fits always.
        candidates: the backends that `auto` may choose.
    """

    text: str
    rules: tuple[Rule, ...]
    candidates: tuple[str, ...]

    def pick(self, nbytes: int) -> str:
        """A backend, or AUTO."""
        return next(rule.name for rule in self.rules if rule.fits(nbytes))

    @property
    def forced(self) -> list[str]:
        """The backends that some rule names."""
        return list(dict.fromkeys(rule.name for rule in self.rules if rule.name != AUTO))

    @property
    def uses_auto(self) -> bool:
        return any(rule.name == AUTO for rule in self.rules)


def parse(text: str, known: Sequence[str]) -> Rules:
    """Read the text of PHUB_BACKEND; `known` are all backends.

    Raises:
        ConfigError: with the part that is wrong, and the grammar.
    """
    stripped = text.strip()
    if stripped.startswith("^"):
        excluded = [_name(part, text, known) for part in stripped[1:].split(",")]
        candidates = tuple(name for name in known if name not in excluded)
        if not candidates:
            raise _error(text, "nothing is left")
        return Rules(text, (Rule(AUTO),), candidates)
    rules = tuple(_rule(part.strip(), text, known) for part in stripped.split(","))
    for rule in rules[:-1]:
        if rule == Rule(rule.name):
            raise _error(text, f"{rule.name!r} fits every size, so nothing after it counts")
    if rules[-1] != Rule(rules[-1].name):
        raise _error(text, "the last rule must have no size, so that every size has a backend")
    return Rules(text, rules, tuple(known))


def _rule(part: str, text: str, known: Sequence[str]) -> Rule:
    name, colon, limit = part.partition(":")
    name = AUTO if name.strip() == AUTO else _name(name, text, known)
    if not colon:
        return Rule(name)
    match = re.fullmatch(r"\s*(<|>=)(.*)", limit)
    try:
        if match is None:
            raise ValueError(f"{limit!r} is no limit")
        nbytes = parse_size(match[2])
    except ValueError as error:
        raise _error(text, f"in {part!r}, {error}") from None
    return Rule(name, end=nbytes) if match[1] == "<" else Rule(name, begin=nbytes)


def _name(part: str, text: str, known: Sequence[str]) -> str:
    name = part.strip()
    if name not in known:
        raise _error(text, f"there is no backend {name!r} (there are {', '.join(known)})")
    return name


def _error(text: str, what: str) -> ConfigError:
    return ConfigError(f"[selector] PHUB_BACKEND={text!r}: {what}; {GRAMMAR}")
