"""Which backend does an operation: the user's rules, and the cheapest one where they leave it open.

All ranks hold one table. Rank 0 makes it from measurements that are equal everywhere (or from a
cached file), and every rank compares a hash of what it was given and of its own rules.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phub_collective import backends
from phub_collective.backends.base import Backend, Context
from phub_collective.errors import ConfigError, MismatchError, PhubError
from phub_collective.selection import cache, costmodel
from phub_collective.selection.costmodel import Curve, Point
from phub_collective.selection.probe import probe
from phub_collective.selection.rules import AUTO, parse
from phub_collective.sizes import size_text

log = logging.getLogger(__name__)

# Where the table may change: eight sizes per doubling, from 1 byte to 4 GiB.
GRID = sorted({int(2 ** (step / 8)) for step in range(8 * 32 + 1)})
ALONE = ("ring", "halving_doubling", "gloo", "mpi")  # for one rank: what starts no server

BackendOf = Callable[[str], Backend]


@dataclass(frozen=True)
class Table:
    """What `auto` chooses, and why.

    Attributes:
        rows: (first size in bytes, backend), by rising size; empty: auto is not used.
        curves: predicted times of the candidates; empty: there was nothing to choose.
        reasons: for each backend that is no candidate, why.
        source: where the curves come from.
    """

    rows: tuple[tuple[int, str], ...]
    curves: Mapping[str, Curve]
    reasons: Mapping[str, str]
    source: str

    def choose(self, nbytes: int) -> str:
        return next(name for first, name in reversed(self.rows) if first <= nbytes)

    def to_json(self) -> str:
        return json.dumps(
            {
                "rows": self.rows,
                "points": {name: curve.points for name, curve in self.curves.items()},
                "reasons": dict(self.reasons),
                "source": self.source,
            }
        )

    @staticmethod
    def from_json(text: str, size: int) -> Table:
        fields = json.loads(text)
        return Table(
            tuple((first, name) for first, name in fields["rows"]),
            curves_of(fields["points"], size),
            fields["reasons"],
            fields["source"],
        )


class Selector:
    """The decisions of one rank. `prepare` before anything else."""

    def __init__(self, context: Context) -> None:
        """
        Raises:
            ConfigError: PHUB_BACKEND is wrong.
        """
        self._context = context
        rules = parse(context.config.backend, backends.names())
        candidates = tuple(name for name in rules.candidates if name not in backends.BASELINES)
        self.rules = dataclasses.replace(rules, candidates=candidates)
        self.table = Table((), {}, {}, "")

    def prepare(self, backend_of: BackendOf, fresh: bool = False) -> list[str]:
        """Agree on the table; the backends that may be chosen from now on. Collective.

        Args:
            backend_of: makes a backend, or gives the one there is. Collective.
            fresh: measure, whatever is cached.

        Raises:
            MismatchError: ranks have different rules.
            ConfigError: no backend is left to choose from.
        """
        self._compare("PHUB_BACKEND", self.rules.text)
        if self.rules.uses_auto:
            table = self._make(backend_of, fresh)
            text = self._context.rendezvous.all_gather("selector.table", table.to_json().encode())
            self.table = Table.from_json(text[0].decode(), self._context.size)
            digest = hashlib.sha256(self.table.to_json().encode()).hexdigest()
            self._compare("the hash of the decision table", digest)
        if self._context.rank == 0:
            rows = ", ".join(f"{name} from {size_text(first)}" for first, name in self.table.rows)
            auto = f"; auto ({self.table.source}): {rows}" if rows else ""
            log.info("[selector] PHUB_BACKEND=%s%s", self.rules.text, auto)
        return list(dict.fromkeys([*self.rules.forced, *(name for _, name in self.table.rows)]))

    def choose(self, nbytes: int) -> str:
        """The backend for an operation on so many bytes."""
        name = self.rules.pick(nbytes)
        return self.table.choose(nbytes) if name == AUTO else name

    def _make(self, backend_of: BackendOf, fresh: bool) -> Table:
        context = self._context
        reasons = self._reasons()
        candidates = [name for name in self.rules.candidates if name not in reasons]
        if not candidates:
            raise ConfigError(f"[selector] no backend can be used: {_join(reasons)}")
        if context.size == 1:
            alone = next((name for name in ALONE if name in candidates), candidates[0])
            return Table(((0, alone),), {}, reasons, "one rank: any backend will do")
        if len(candidates) == 1:
            return Table(((0, candidates[0]),), {}, reasons, "only one candidate")
        key = cache.key(context, candidates)
        points, source = (None, "") if fresh else cache.load(context, key)
        if points is None:
            opened, failed = self._open(candidates, backend_of)
            reasons = {**reasons, **failed}
            if not opened:
                raise ConfigError(f"[selector] no backend can be used: {_join(reasons)}")
            points, source = probe(opened, context.rendezvous), "measured now"
            if not failed:  # else the next job shall try it again
                cache.store(context, key, points)
        curves = curves_of(points, context.size)
        rows = costmodel.decisions(curves, GRID)
        return Table(((0, rows[0][1]), *rows[1:]), curves, reasons, source)

    def _reasons(self) -> dict[str, str]:
        """Why a backend is no candidate: excluded, or unavailable on some rank."""
        mine = json.dumps(self._available()).encode()
        ranks = self._context.rendezvous.all_gather("selector.available", mine)
        reasons: dict[str, str] = {}
        for rank, found in enumerate(map(json.loads, ranks)):
            for name in backends.names():
                reason = found.get(name, "it is not installed")
                if name in backends.BASELINES:
                    reasons[name] = "a baseline to compare with; PHUB_BACKEND must name it"
                elif name not in self.rules.candidates:
                    reasons[name] = f"excluded by PHUB_BACKEND={self.rules.text}"
                elif reason is not None and name not in reasons:
                    everywhere = all(other == ranks[0] for other in ranks)
                    reasons[name] = reason if everywhere else f"rank {rank}: {reason}"
        return reasons

    def _available(self) -> dict[str, str | None]:
        """`backends.available`, without a pshard that would be what pbox is: one server beside
        all ranks."""
        found, context = backends.available(), self._context
        is_alone = context.local_size == context.size and context.config.shards == "host"
        has_pbox = "pbox" in self.rules.candidates and not context.config.pbox
        if is_alone and has_pbox and found.get("pshard", "") is None:
            found["pshard"] = "all ranks share one host, where its only shard is a PBox: see pbox"
        return found

    def _open(
        self, candidates: Sequence[str], backend_of: BackendOf
    ) -> tuple[dict[str, Backend], dict[str, str]]:
        """The candidates that all ranks can connect, and why the others are none."""
        opened: dict[str, Backend] = {}
        failed: dict[str, str] = {}
        for name in candidates:
            error = ""
            try:
                opened[name] = backend_of(name)
            except PhubError as failure:
                error = str(failure)
            errors = self._context.rendezvous.all_gather("selector.open", error.encode())
            if any(errors):
                failed[name] = next(one.decode() for one in errors if one)
                opened.pop(name, None)
        return opened, failed

    def _compare(self, what: str, mine: str) -> None:
        ranks = self._context.rendezvous.all_gather("selector.compare", mine.encode())
        for rank, theirs in enumerate(ranks):
            if theirs.decode() != mine:
                raise MismatchError(
                    f"[selector] {what} differs: rank {self._context.rank} has {mine!r}, "
                    f"rank {rank} has {theirs.decode()!r}; set it alike on all ranks"
                )


def curves_of(points: Mapping[str, Sequence[Point]], size: int) -> dict[str, Curve]:
    return {
        name: Curve.through(name, size, [(nbytes, seconds) for nbytes, seconds in measured])
        for name, measured in points.items()
    }


def _join(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
