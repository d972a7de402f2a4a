"""Names of unnamed operations."""

from itertools import cycle, islice

import numpy as np
import pytest

from phub_collective.backends.base import Buffer, Kind, Operation, Work
from phub_collective.errors import MismatchError, PeerTimeout
from phub_collective.torch.names import LONGEST, MOST, OperationNames, UnnamedWork


def use(names: OperationNames, *descriptions: str) -> list[str]:
    """The names of operations that are submitted and synchronized one by one."""
    used = []
    for description in descriptions:
        used.append(names.take())
        names.release(used[-1], description)
    return used


def test_a_loop_uses_the_same_name_again() -> None:
    assert set(use(OperationNames(), *["a"] * 5)) == {"unnamed operation 0"}


def test_those_in_flight_are_numbered() -> None:
    names = OperationNames()
    first = [names.take() for _ in range(3)]
    assert first == [f"unnamed operation {i}" for i in range(3)]
    names.release(first[1], "b")
    assert names.take() == first[1]
    assert names.take() == "unnamed operation 3"


@pytest.mark.parametrize(
    "loop", ["ab", "aab", "abcd", "a" * 30 + "b", "abcabcabd" * 5 + "x", "aabbab" * 20 + "c"]
)
def test_in_a_loop_each_name_soon_means_one_operation(loop: str) -> None:
    names = OperationNames()
    use(names, *islice(cycle(loop), 12 * len(loop)))
    meant = dict(zip(use(names, *loop), loop, strict=True))
    for _ in range(3):
        assert all(meant[name] == one for name, one in zip(use(names, *loop), loop, strict=True))


def test_a_name_does_not_depend_on_its_operation() -> None:
    """So that ranks whose operations differ meet; and an error leaves them in step."""
    ranks = [OperationNames() for _ in range(2)]
    for names in ranks:
        use(names, *"abcabc")
    assert ranks[0].take() == (name := ranks[1].take())
    for names in ranks:
        names.release(name, None)
    assert use(ranks[0], *"abcabc") == use(ranks[1], *"abcabc")


def test_there_is_an_end_to_names() -> None:
    names = OperationNames()
    assert len(set(use(names, *map(str, range(4 * MOST))))) <= MOST
    assert len(names.take()) < LONGEST


class Target:
    """Takes operations; waiting raises `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.seen: list[str] = []

    def submit(self, operation: Operation) -> Work:
        self.seen.append(operation.name)
        return self

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        if self.error is not None:
            raise self.error


SUM = Operation(Kind.ALLREDUCE, "", Buffer.of(np.zeros(3, np.float32)))


def test_a_failed_operation_gives_its_name_back() -> None:
    names = OperationNames()
    work = UnnamedWork(names, Target(MismatchError("differs")), SUM)
    for _ in range(2):  # waiting again is no second release
        with pytest.raises(MismatchError):
            work.wait()
    target = Target()
    UnnamedWork(names, target, SUM).wait()
    assert target.seen == ["unnamed operation 0"]


def test_an_operation_that_could_not_be_submitted_gives_its_name_back() -> None:
    class Refuses(Target):
        def submit(self, operation: Operation) -> Work:
            raise MismatchError("refused")

    names = OperationNames()
    with pytest.raises(MismatchError):
        UnnamedWork(names, Refuses(), SUM)
    assert names.take() == "unnamed operation 0"


def test_an_operation_that_still_runs_keeps_its_name() -> None:
    names = OperationNames()
    with pytest.raises(PeerTimeout):
        UnnamedWork(names, Target(PeerTimeout("slow")), SUM).wait(0.1)
    assert names.take() == "unnamed operation 1"
