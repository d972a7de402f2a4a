"""Who measures with whom, and when: a round-robin tournament. Pure.

Words:
    pair   two hosts, the lower one first
    round  pairs that have no host in common
    turn   what runs at the same time: (sender, receiver) of each pair, in one direction
"""

from __future__ import annotations

Pair = tuple[int, int]
Turn = list[Pair]


def rounds(count: int) -> list[list[Pair]]:
    """Every pair of `count` hosts once, in as few rounds as there can be: count - 1 of them, or
    count where that is odd and one host has to rest in each. None for fewer than two hosts.

    The circle method: the first place is fixed, all others move on by one after each round, and
    who stands opposite is met.
    """
    places = list(range(count + count % 2))  # of an odd number, the last place is the rest
    found = []
    for _ in places[1:] if count > 1 else ():
        opposite = zip(places, reversed(places), strict=True)
        pairs = [(min(pair), max(pair)) for pair in list(opposite)[: len(places) // 2]]
        found.append(sorted(pair for pair in pairs if pair[1] < count))
        places = [places[0], places[-1], *places[1:-1]]
    return found


def turns(count: int, alone: bool) -> list[Turn]:
    """Both directions of every pair, one after the other.

    Args:
        count: hosts.
        alone: one pair at a time, not all pairs of a round.
    """
    together = [[pair] for one in rounds(count) for pair in one] if alone else rounds(count)
    found: list[Turn] = []
    for pairs in together:
        found += [pairs, [(higher, lower) for lower, higher in pairs]]
    return found
