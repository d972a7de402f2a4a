"""Plans of collectives: who sends which elements to whom, in which order. Pure arithmetic.

Words:
    count    elements of the buffer
    range    (begin, end) in elements
    step     at most one send and one receive of one rank
    segment  the range that one rank of a power-of-two block owns after reduce-scatter

Rules for whoever runs a plan:
    * Receives are applied in the order of the steps.
    * A step's send may start when the receives of all earlier steps have been applied, and reads
      the buffer itself: no plan here writes a range while a send of it may still be on its way,
      because every such write is caused by the other side having received that send.
    * Between one pair of ranks messages flow in the order of the steps, so they need no tag.
    * Empty ranges do not appear, on either side.

Costs for n ranks and S bytes:
    ring              2(n - 1) steps, each rank sends 2(n - 1)/n S
    halving_doubling  2 lg n steps and 2(n - 1)/n S for n = 2^k; for other n see there
    broadcast         ceil(lg n) rounds, the root sends ceil(lg n) S
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

Range = tuple[int, int]

NOBODY = -1
NOTHING: Range = (0, 0)


class Step(NamedTuple):
    """One step of one rank; the peer is NOBODY where nothing is sent or received."""

    send_to: int
    send: Range
    recv_from: int
    recv: Range
    reduce: bool  # fold what is received into the buffer, else overwrite


def ring(rank: int, size: int, count: int) -> list[Step]:
    """Allreduce around a ring: n - 1 steps of reduce-scatter, n - 1 of allgather.

    The buffer is cut into n pieces. In step s a rank passes on the piece it received in step
    s - 1, starting with its own; after reduce-scatter it holds the whole sum of piece rank + 1.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    steps = [
        Step(
            right,
            _piece((rank + gather - s) % size, size, count),
            left,
            _piece((rank + gather - s - 1) % size, size, count),
            not gather,
        )
        for gather in (0, 1)
        for s in range(size - 1)
    ]
    return _without_empty(steps)


def halving_doubling(rank: int, size: int, count: int) -> list[Step]:
    """Allreduce by recursive halving and doubling, with binary blocks for any number of ranks.

    The ranks are cut into blocks of falling powers of two (13 = 8 + 4 + 1). Each block runs
    reduce-scatter by halving; the smallest block folds its segments into the next larger one, and
    so on up; the largest then holds the result, which flows back down the same way; each block
    runs allgather by doubling. A rank of a block of b ranks, below a block of B and above a
    smaller one, takes 2 lg b + 2 B/b + 2 steps and sends 2(b - 1)/b S + S/b + S/b bytes.

    After Rabenseifner and Traeff, "More Efficient Reduction Algorithms for Non-Power-of-Two
    Number of Processors in Message-Passing Parallel Systems" (EuroPVM/MPI 2004).
    """
    blocks = _binary_blocks(size)
    index = next(i for i, (begin, width) in enumerate(blocks) if rank < begin + width)
    begin, width = blocks[index]
    own = _piece(rank - begin, width, count)
    halving = list(_halving(rank - begin, width, begin, count))
    steps = [Step(peer, given, peer, kept, True) for peer, given, kept in halving]

    if index + 1 < len(blocks):
        below = _owner(rank - begin, width, *blocks[index + 1])
        steps.append(Step(NOBODY, NOTHING, below, own, True))
    if index > 0:
        pieces = list(_pieces_above(rank - begin, width, *blocks[index - 1], count))
        steps += [Step(peer, piece, NOBODY, NOTHING, False) for peer, piece in pieces]
        steps += [Step(NOBODY, NOTHING, peer, piece, False) for peer, piece in pieces]
    if index + 1 < len(blocks):
        steps.append(Step(below, own, NOBODY, NOTHING, False))

    steps += [Step(peer, kept, peer, given, False) for peer, given, kept in reversed(halving)]
    return _without_empty(steps)


def broadcast(rank: int, size: int, count: int, root: int = 0) -> list[Step]:
    """Binomial tree: with ranks counted from the root, rank v receives from v without its lowest
    set bit, then sends to v + 2^k for every smaller bit k, the largest subtree first."""
    virtual, whole = (rank - root) % size, (0, count)
    bit = virtual & -virtual if virtual else 1 << (size - 1).bit_length()
    steps = []
    if virtual:
        steps.append(Step(NOBODY, NOTHING, (virtual - bit + root) % size, whole, False))
    while bit := bit >> 1:
        if virtual + bit < size:
            steps.append(Step((virtual + bit + root) % size, whole, NOBODY, NOTHING, False))
    return _without_empty(steps)


def _piece(index: int, parts: int, count: int) -> Range:
    """Piece `index` of `count` elements cut into `parts`. Cuts nest: piece i of b is exactly
    pieces i B/b .. (i + 1) B/b - 1 of B, when b divides B."""
    return index * count // parts, (index + 1) * count // parts


def _binary_blocks(size: int) -> list[tuple[int, int]]:
    """(first rank, width) of each block, widest first."""
    widths = [1 << bit for bit in reversed(range(size.bit_length())) if size >> bit & 1]
    begins = [0]
    for width in widths:
        begins.append(begins[-1] + width)
    return [(begin, end - begin) for begin, end in pairwise(begins)]


def _halving(member: int, width: int, first: int, count: int) -> Iterator[tuple[int, Range, Range]]:
    """(peer, range given away, range kept) of each halving step in a block. The farthest peer
    comes first, so that member i ends with segment i, in the order of the ranks."""
    begin, end = 0, width  # segments this member is still responsible for
    while end - begin > 1:
        middle = (begin + end) // 2
        lower = (begin * count // width, middle * count // width)
        upper = (middle * count // width, end * count // width)
        distance = (end - begin) // 2
        if member < middle:
            yield first + member + distance, upper, lower
            end = middle
        else:
            yield first + member - distance, lower, upper
            begin = middle


def _owner(member: int, width: int, begin: int, smaller: int) -> int:
    """The rank of the next smaller block whose segment contains this member's."""
    return begin + member * smaller // width


def _pieces_above(
    member: int, width: int, begin: int, larger: int, count: int
) -> Iterator[tuple[int, Range]]:
    """(rank, its segment) in the next larger block, for each segment inside this member's."""
    ratio = larger // width
    for above in range(member * ratio, (member + 1) * ratio):
        yield begin + above, _piece(above, larger, count)


def _without_empty(steps: list[Step]) -> list[Step]:
    """Drop empty transfers. Both sides of a transfer name the same range, so both drop it."""
    kept = []
    for send_to, send, recv_from, recv, reduce in steps:
        if send[0] == send[1]:
            send_to, send = NOBODY, NOTHING
        if recv[0] == recv[1]:
            recv_from, recv = NOBODY, NOTHING
        if send_to != NOBODY or recv_from != NOBODY:
            kept.append(Step(send_to, send, recv_from, recv, reduce))
    return kept
