"""The typed errors and their numbers, which the native core and the wire carry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phub_collective import errors
from phub_collective.errors import CODES, InternalError, PeerLost, PeerTimeout, PhubError

ERROR_H = Path(__file__).parents[2] / "backends" / "native" / "error.h"


@pytest.mark.parametrize("code", sorted(CODES))
def test_a_code_survives_the_way_to_another_rank(code: int) -> None:
    error = errors.from_code(code, "[x] text", rank=3)
    assert type(error) is CODES[code]
    assert str(error) == "[x] text"
    assert errors.to_code(error) == code


def test_the_rank_comes_along() -> None:
    lost, late = errors.from_code(4, "", rank=3), errors.from_code(5, "", rank=3)
    assert isinstance(lost, PeerLost)
    assert lost.rank == 3
    assert isinstance(late, PeerTimeout)
    assert late.ranks == (3,)


def test_an_unknown_code_and_a_foreign_exception_are_internal() -> None:
    assert type(errors.from_code(99, "")) is InternalError
    assert CODES[errors.to_code(KeyError("k"))] is InternalError


def test_errors_can_be_caught_as_the_builtin_kind() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.PeerTimeout, TimeoutError)
    assert all(issubclass(kind, PhubError) for kind in CODES.values())


def test_codes_are_those_of_the_native_core() -> None:
    body = re.search(r"enum class ErrorCode[^{]*\{([^}]*)\}", ERROR_H.read_text())
    assert body is not None
    native = {int(number): name for name, number in re.findall(r"(\w+) = (\d+)", body[1])}
    spelled = {"config": "ConfigError", "mismatch": "MismatchError", "duplicate": "DuplicateName",
               "peer_lost": "PeerLost", "timeout": "PeerTimeout", "auth": "AuthError",
               "protocol": "ProtocolError", "internal": "InternalError"}  # fmt: skip
    python_only = {errors.BackendUnavailable}
    assert {code: spelled[name] for code, name in native.items()} == {
        code: kind.__name__ for code, kind in CODES.items() if kind not in python_only
    }


def test_every_error_has_a_code() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type)}
    assert set(CODES.values()) == {k for k in kinds if issubclass(k, PhubError)} - {PhubError}


@pytest.mark.parametrize(
    ("error", "rank"),
    [
        (PeerLost("", 3), 3),
        (PeerLost(""), -1),
        (PeerTimeout("", (2,)), 2),
        (PeerTimeout("", (1, 2)), -1),
        (InternalError(""), -1),
    ],
)
def test_the_rank_that_an_error_is_about(error: PhubError, rank: int) -> None:
    assert errors.rank_of(error) == rank
