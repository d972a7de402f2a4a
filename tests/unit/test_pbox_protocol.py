"""Messages of the control protocol that carry errors."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from phub_collective.backends.pbox import protocol
from phub_collective.errors import CODES, PeerLost, PeerTimeout, PhubError, ProtocolError


@pytest.mark.parametrize(
    "error",
    [
        *(kind("[x] text") for kind in CODES.values()),
        PeerLost("lost", 3),
        PeerTimeout("late", (2,)),
        PeerTimeout("late", (1, 2)),
    ],
)
def test_an_error_arrives_as_it_was(error: PhubError) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        protocol.send(ours, protocol.error_message(error))
        message = protocol.receive(theirs)
    with pytest.raises(type(error)) as caught:
        protocol.raise_error(message)
    assert type(caught.value) is type(error)
    assert (str(caught.value), vars(caught.value)) == (str(error), vars(error))


@pytest.mark.parametrize(
    "changes",
    [{"error": None}, {"error": "x"}, {"rank": []}, {"rank": "x"}, {"ranks": 5}, {"ranks": ["x"]}],
)
def test_a_malformed_error_is_an_error_too(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="malformed error"):
        protocol.raise_error({**protocol.error_message(PeerLost("lost", 3)), **changes})
