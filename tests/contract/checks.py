"""What every backend must do: one function per promise, run on every rank of a job.

They are called on threads (test_backends.py), in processes (test_loss.py) and under mpirun
(tests/mpi), so they use nothing but the backend, its context and what all ranks are given.
"""

from __future__ import annotations

import dataclasses
import random
import re
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from contract.cases import LARGE, Case, buffer_of, grid, wrong_elements

from phub_collective.backends.base import (
    Backend,
    Buffer,
    DType,
    Kind,
    Operation,
    ReduceOp,
)
from phub_collective.errors import (
    ConfigError,
    DuplicateName,
    MismatchError,
    PeerLost,
    PeerTimeout,
    PhubError,
)

WAIT_S = 60.0  # no correct operation here takes as long, also on a loaded machine
SOON_S = 3.0  # nor does the news that a rank has left


def allreduce(backend: Backend, name: str, array: np.ndarray, op: ReduceOp = ReduceOp.SUM) -> None:
    backend.submit(Operation(Kind.ALLREDUCE, name, Buffer.of(array), op)).wait(WAIT_S)


def barrier(backend: Backend, name: str = "barrier") -> None:
    backend.submit(Operation(Kind.BARRIER, name)).wait(WAIT_S)


def reductions_are_exact(backend: Backend, uses: int = 3) -> None:
    """The whole grid in flight at once, names in another order on each rank, several uses."""
    rank, size = backend.context.rank, backend.context.size
    shuffle = random.Random(rank)
    cases = list(grid(size))
    for step in range(uses):
        shuffle.shuffle(cases)
        buffers = {case: buffer_of(case, rank, size, step) for case in cases}
        works = [(case, backend.submit(case.operation(buffers[case]))) for case in cases]
        shuffle.shuffle(works)
        for case, work in works:
            work.wait(WAIT_S)
            assert work.done()
            wrong = wrong_elements(case, buffers[case], size, step)
            assert not wrong.size, f"{case} use {step}: wrong at {wrong[:5]}"


def broadcasts_are_exact(backend: Backend) -> None:
    rank, size = backend.context.rank, backend.context.size
    for root in range(size):
        for count in (0, 1, 1000, LARGE if root == size - 1 else 3):
            for dtype in (np.float32, np.uint8, np.bool_):
                array = (np.arange(count) % 7 + rank).astype(dtype)
                name = f"broadcast.{root}.{count}.{np.dtype(dtype)}"
                operation = Operation(Kind.BROADCAST, name, Buffer.of(array), root=root)
                backend.submit(operation).wait(WAIT_S)
                assert np.array_equal(array, (np.arange(count) % 7 + root).astype(dtype)), name


def barrier_waits_for_everyone(backend: Backend, entered: list[int]) -> None:
    """`entered` is one list for all ranks (threads)."""
    for use in range(3):
        entered[backend.context.rank] = use + 1
        barrier(backend)
        assert min(entered) >= use + 1
        barrier(backend, "before the next use")


def late_submission_does_not_block(backend: Backend) -> None:
    """Rank 0 submits a large X, then Y; the others wait for Y before they submit X."""
    rank, size = backend.context.rank, backend.context.size
    for use in range(3):
        x, y = np.full(2_000_000, rank + use, np.float32), np.full(3, rank, np.int32)
        first = backend.submit(Operation(Kind.ALLREDUCE, "X", Buffer.of(x))) if rank == 0 else None
        allreduce(backend, "Y", y)
        if first is None:
            first = backend.submit(Operation(Kind.ALLREDUCE, "X", Buffer.of(x)))
        first.wait(WAIT_S)
        total = size * (size - 1) // 2
        assert (y == total).all()
        assert (x == total + size * use).all()


def finishes_without_a_wait(backend: Backend) -> None:
    array = np.full(100_000, 1, np.float32)
    work = backend.submit(Operation(Kind.ALLREDUCE, "unwaited", Buffer.of(array)))
    deadline = time.monotonic() + WAIT_S
    while not work.done():
        assert time.monotonic() < deadline, "done() stayed False without a wait()"
        time.sleep(0.001)
    assert (array == backend.context.size).all()
    barrier(backend)


def several_threads_submit(backend: Backend) -> None:
    failures: list[BaseException] = []

    def body(index: int) -> None:
        try:
            for use in range(5):
                array = np.full(1000, use + index, np.float32)
                allreduce(backend, f"thread{index}", array)
                assert (array == backend.context.size * (use + index)).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT_S)
    if failures:
        raise failures[0]


def shape_may_change_on_all_ranks(backend: Backend) -> None:
    for count in (4, 4, 4, 9, 9, 0, 5):
        array = np.full(count, backend.context.rank, np.int64)
        allreduce(backend, "changing", array)
        assert (array == sum(range(backend.context.size))).all()


def invalid_operations_are_refused(backend: Backend) -> None:
    size = backend.context.size
    ints, bools = Buffer.of(np.ones(3, np.int32)), Buffer.of(np.ones(3, np.bool_))
    for operation, word in [
        (Operation(Kind.BROADCAST, "a", ints, root=size), "root"),
        (Operation(Kind.BROADCAST, "b", ints, root=-1), "root"),
        (Operation(Kind.ALLREDUCE, "c", bools, ReduceOp.AVERAGE), "average"),
        (Operation(Kind.ALLREDUCE, "d", ints, prescale=0.5), "scale"),
        (Operation(Kind.ALLREDUCE, "e"), "buffer"),
    ]:
        with pytest.raises(ConfigError, match=word):
            backend.submit(operation)
    barrier(backend)


def duplicate_names_are_refused(backend: Backend) -> None:
    """Rank 0 is alone with the name until it has tried it again."""
    rendezvous = backend.context.rendezvous
    array = np.ones(5, np.float32)
    operation = Operation(Kind.ALLREDUCE, "twice", Buffer.of(array))
    if backend.context.rank == 0:
        work = backend.submit(operation)
        with pytest.raises(DuplicateName, match="twice"):
            backend.submit(operation)
        rendezvous.all_gather("tried", b"")
    else:
        rendezvous.all_gather("tried", b"")
        work = backend.submit(operation)
    work.wait(WAIT_S)
    assert (array == backend.context.size).all()


def a_missing_rank_is_a_timeout(backend: Backend) -> None:
    """At a name's first use and later: the wait ends, names whom it waited for, and the operation
    still succeeds when the last rank comes."""
    rank, size, rendezvous = backend.context.rank, backend.context.size, backend.context.rendezvous
    for use in range(4):
        array = np.full(5, use, np.float32)
        operation = Operation(Kind.ALLREDUCE, "late", Buffer.of(array))
        if rank == size - 1:
            rendezvous.all_gather("waited", b"")
            work = backend.submit(operation)
        else:
            work = backend.submit(operation)
            begin = time.monotonic()
            with pytest.raises(PeerTimeout, match="late") as caught:
                work.wait(0.3)
            assert 0.3 <= time.monotonic() - begin < 3.0
            # Whom it waited for: the missing rank, or a neighbour who waits for it.
            assert caught.value.ranks
            assert rank not in caught.value.ranks
            rendezvous.all_gather("waited", b"")
        work.wait(WAIT_S)
        assert (array == size * use).all()


def a_rank_that_left_is_an_error(backend: Backend) -> None:
    """The last rank closes in good order; what the others submit then, and what they had submitted
    before, must not wait for it."""
    rank, size, rendezvous = backend.context.rank, backend.context.size, backend.context.rendezvous
    for _ in range(3):
        allreduce(backend, "used", np.ones(10, np.float32))
    if rank == size - 1:
        rendezvous.barrier("submitted")
        backend.close()
        return
    array = np.ones(10, np.float32)
    names = ["new", "used"]
    works = [backend.submit(Operation(Kind.ALLREDUCE, n, Buffer.of(array.copy()))) for n in names]
    rendezvous.barrier("submitted")
    for work in works:
        with pytest.raises(PeerLost) as caught:
            work.wait(SOON_S)
        assert caught.value.rank == size - 1
    for name in ("new", "used", "other"):
        with pytest.raises(PeerLost) as caught:
            backend.submit(Operation(Kind.ALLREDUCE, name, Buffer.of(array))).wait(SOON_S)
        assert caught.value.rank == size - 1


MISMATCHES = {
    "count": (Case(DType.FLOAT32, ReduceOp.SUM, 41), Case(DType.FLOAT32, ReduceOp.SUM, 43)),
    "dtype": (Case(DType.FLOAT32, ReduceOp.SUM, 8), Case(DType.INT32, ReduceOp.SUM, 8)),
    "op": (Case(DType.FLOAT32, ReduceOp.MIN, 8), Case(DType.FLOAT32, ReduceOp.MAX, 8)),
    "scale": (
        Case(DType.FLOAT32, ReduceOp.SUM, 8, prescale=0.25),
        Case(DType.FLOAT32, ReduceOp.SUM, 8, prescale=0.125),
    ),
}
SIDES = {
    "count": ("41", "43"),
    "dtype": ("float32", "int32"),
    "op": ("min", "max"),
    "scale": ("0.25", "0.125"),
    "root": ("root 0|rank 0", "root 1|rank 1"),
    "kind": ("allreduce", "broadcast"),
}


def mismatch_names_both_sides(backend: Backend, what: str, uses_before: int) -> None:
    """Rank 1 differs from the others in `what`, at the name's first or a later use."""
    rank, size = backend.context.rank, backend.context.size
    ours, theirs = _sides(what, rank, size)
    for _ in range(uses_before):
        backend.submit(ours).wait(WAIT_S)
    if uses_before and ours.kind is Kind.BROADCAST and rank != 1:
        # Once its name is known, a broadcast may be over here before rank 1 has begun.
        with suppress(MismatchError):
            backend.submit(ours).wait(WAIT_S)
        return
    with pytest.raises(MismatchError) as caught:
        backend.submit(theirs if rank == 1 else ours).wait(WAIT_S)
    text = str(caught.value).lower()
    for pattern in (*SIDES[what], r"\brank 1\b", "same"):
        assert re.search(pattern, text), f"{pattern!r} is not in: {text}"


def _sides(what: str, rank: int, size: int) -> tuple[Operation, Operation]:
    if what in MISMATCHES:
        ours, theirs = MISMATCHES[what]
        return _named_same(ours, rank, size), _named_same(theirs, rank, size)
    buffer = Buffer.of(np.ones(6, np.float32))
    if what == "root":
        a, b = (Operation(Kind.BROADCAST, "same", buffer, root=root) for root in (0, 1))
    else:
        a, b = (Operation(kind, "same", buffer) for kind in (Kind.BROADCAST, Kind.ALLREDUCE))
    return a, b


def _named_same(case: Case, rank: int, size: int) -> Operation:
    return dataclasses.replace(case.operation(buffer_of(case, rank, size)), name="same")


def nothing_works_after_close(backend: Backend) -> None:
    barrier(backend)
    backend.close()
    backend.close()
    with pytest.raises(PhubError):
        backend.submit(Operation(Kind.BARRIER, "too late"))
