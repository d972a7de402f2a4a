"""How a rank waits: in slices, with one warning, and with an error that names the missing."""

from __future__ import annotations

import logging
import time

import pytest

from phub_collective.backends.waiting import NAMING_S, SLICE_S, Missing, Waiter
from phub_collective.config import Config
from phub_collective.errors import PeerTimeout


def waiter(**settings: float) -> Waiter:
    return Waiter("toy", 3, Config(**settings))  # type: ignore[arg-type]


def never(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def test_a_step_gets_a_slice_at_most() -> None:
    given: list[float] = []

    def step(seconds: float) -> bool:
        given.append(seconds)
        return len(given) == 3

    waiter().wait(step, "x", lambda _: Missing())
    assert given == [SLICE_S] * 3


def test_the_error_names_who_waits_for_what_and_whom() -> None:
    expected = r"\[toy\] rank 3 has waited 0\.\d s for 'grad'; missing: ranks 1, 2"
    with pytest.raises(PeerTimeout, match=expected) as caught:
        waiter().wait(never, "'grad'", lambda _: Missing((1, 2)), 0.1)
    assert caught.value.ranks == (1, 2)


def test_the_stall_timeout_is_the_limit_without_another() -> None:
    begin = time.monotonic()
    with pytest.raises(PeerTimeout, match="has every rank submitted it"):
        waiter(stall_timeout=0.2).wait(never, "x", lambda _: Missing())
    assert 0.2 <= time.monotonic() - begin < 2.0


@pytest.mark.parametrize(("timeout", "granted"), [(0.0, 0.0), (0.05, 0.05), (2.5, NAMING_S)])
def test_naming_the_missing_takes_no_longer_than_the_wait(timeout: float, granted: float) -> None:
    seconds: list[float] = []

    def missing(patience: float) -> Missing:
        seconds.append(patience)
        return Missing()

    with pytest.raises(PeerTimeout):
        waiter().wait(never, "x", missing, timeout)
    assert seconds == [granted]


def test_one_warning_before_the_error(caplog: pytest.LogCaptureFixture) -> None:
    seconds: list[float] = []

    def missing(patience: float) -> Missing:
        seconds.append(patience)
        return Missing((0,), "missing: w from ranks [0]")

    with caplog.at_level(logging.WARNING), pytest.raises(PeerTimeout):
        waiter(stall_warning=0.1).wait(never, "'late'", missing, 0.4, slice_s=0.03)
    (record,) = caplog.records
    assert (
        "for 'late'; missing: w from ranks [0]; this becomes an error after 0.4 s in all"
        in record.message
    )
    assert seconds[0] < 0.31  # what was left of the wait
    assert len(seconds) == 2


def test_no_warning_when_it_comes_in_time(caplog: pytest.LogCaptureFixture) -> None:
    waiter(stall_warning=30.0).wait(lambda _: True, "x", lambda _: Missing())
    assert not caplog.records
