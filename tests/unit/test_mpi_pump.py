"""The thread that calls MPI while nobody waits: it ends when it is told to, whatever the moment."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from phub_collective.backends import mpi
from phub_collective.backends.mpi import MpiRequest, Pump

LIMIT_S = 10.0


class FakeRequest:
    """Completes at the third look, or fails."""

    def __init__(self, error: str = "") -> None:
        self._left, self._error = 3, error

    def Test(self) -> bool:
        self._left -= 1
        if self._error:
            raise RuntimeError(self._error)
        return self._left <= 0


def test_a_close_at_the_last_moment_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pump is held where it is about to rest, until it has been told to end."""
    reached, go_on = threading.Event(), threading.Event()

    class Gate(threading.Condition):
        def __enter__(self) -> bool:
            if threading.current_thread().name == "phub-mpi-pump":
                reached.set()
                assert go_on.wait(LIMIT_S)
            return super().__enter__()

        def notify(self, n: int = 1) -> None:
            super().notify(n)
            go_on.set()

    fake: Any = SimpleNamespace(Condition=Gate, Thread=threading.Thread, Lock=threading.Lock)
    with monkeypatch.context() as patch:
        patch.setattr(mpi, "threading", fake)
        pump = Pump(crowded=False)
    assert reached.wait(LIMIT_S)
    closer = threading.Thread(target=pump.close, daemon=True)
    closer.start()
    closer.join(mpi.CLOSE_S / 2)
    assert not closer.is_alive()


@pytest.mark.parametrize("error", ["", "communicator is broken"])
def test_what_nobody_waits_for_is_completed(error: str) -> None:
    pump, ended = Pump(crowded=False), threading.Event()
    request = MpiRequest(FakeRequest(error), pump)
    pump.watch(request, ended.set)
    assert ended.wait(LIMIT_S)
    if error:
        with pytest.raises(RuntimeError, match=error):
            request.check()
    else:
        request.check()
    pump.close()


def test_who_waits_calls_mpi_alone_and_the_pump_goes_on_afterwards() -> None:
    pump, ended = Pump(crowded=True), threading.Event()
    left, waited = FakeRequest(), FakeRequest()
    with pump.paused():
        pump.watch(MpiRequest(left, pump), ended.set)
        request = MpiRequest(waited, pump)
        assert request.wait(LIMIT_S)
        assert not ended.wait(10 * mpi.PUMP_S)
        assert left._left == 3  # nobody has looked
    assert ended.wait(LIMIT_S)
    pump.close()


def test_a_wait_has_its_limit() -> None:
    class Never(FakeRequest):
        def Test(self) -> bool:
            return False

    pump = Pump(crowded=True)
    assert not MpiRequest(Never(), pump).wait(0.02)
    pump.close()
