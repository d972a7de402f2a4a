"""TOML files that describe something to a command: read, and checked against a dataclass.

Each field of the dataclass is a key. Its type says what may stand there: for a value an
`Annotated[type, Rule]` (which has a name in its module: a lambda right inside of a field's type
would not find the module's names), for a table a dataclass, and for tables that the file names
itself `dict[str, dataclass]`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from phub_collective.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")


@dataclass(frozen=True)
class Rule:
    """What the value of a key may be.

    Attributes:
        expected: in words, for messages: "expected ...".
        accepts: the test; it is given whatever TOML can hold, so it looks at the type first.
    """

    expected: str
    accepts: Callable[[Any], bool]


def is_number(value: Any, whole: bool = False) -> bool:
    """A number (`whole`: an integer) of TOML; not a truth value, which Python counts as one."""
    return isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)


def load(path: Path, kind: type[T], component: str) -> T:
    """The `kind` that a file describes. `component` begins the message of an error.

    Raises:
        ConfigError: it cannot be read, is no TOML, or a key is missing, unknown or wrong.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"[{component}] expected a TOML file to read, got {error}") from None
    return parse(text, kind, f"[{component}] {path}")


def parse(text: str, kind: type[T], origin: str) -> T:
    """The `kind` that a text describes. `origin` begins the message of an error.

    Raises:
        ConfigError: it is no TOML, or a key is missing, unknown or wrong.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{origin}: expected TOML, got {error}") from None
    built: T = _build(kind, document, origin, "")
    return built


def _build(kind: Any, value: Any, origin: str, key: str) -> Any:
    """`value`, which stands at the dotted `key`, as what `kind` asks for."""
    rule = _rule(kind)
    if rule is not None:
        if not rule.accepts(value):
            raise ConfigError(f"{origin}: {key}: expected {rule.expected}, got {value!r}")
        return value
    if not isinstance(value, dict):
        raise ConfigError(f"{origin}: {key}: expected {_expected(kind)}, got {value!r}")
    if get_origin(kind) is dict:
        if not value:
            raise ConfigError(f"{origin}: {key}: expected at least one table [{key}.NAME]")
        kinds = dict.fromkeys(value, get_args(kind)[1])
    else:
        kinds = get_type_hints(kind, include_extras=True)
        _check_names(kinds, value, origin, key)
    built = {name: _build(kinds[name], value[name], origin, _dotted(key, name)) for name in kinds}
    return built if get_origin(kind) is dict else kind(**built)


def _check_names(kinds: dict[str, Any], table: dict[str, Any], origin: str, key: str) -> None:
    for name in table:
        if name not in kinds:
            known = ", ".join(kinds)
            raise ConfigError(f"{origin}: unknown key {_dotted(key, name)}: expected {known}")
    for name, kind in kinds.items():
        if name not in table:
            raise ConfigError(
                f"{origin}: missing key {_dotted(key, name)}: expected {_expected(kind)}"
            )


def _rule(kind: Any) -> Rule | None:
    """The rule of an annotated type; None for a table."""
    return next(
        (note for note in getattr(kind, "__metadata__", ()) if isinstance(note, Rule)), None
    )


def _expected(kind: Any) -> str:
    rule = _rule(kind)
    return "a table" if rule is None else rule.expected


def _dotted(key: str, name: str) -> str:
    """A key as TOML writes it: `workers."future GPUs".gpu`."""
    bare = re.fullmatch(r"[A-Za-z0-9_-]+", name)
    return ".".join(filter(None, (key, name if bare else json.dumps(name))))
