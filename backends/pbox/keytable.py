"""A key table on the control connection, and as the native core wants it. Both ends compute the
placement of chunks from it, so only keys travel."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from phub_collective.backends.base import DType, Key, ReduceOp, layout
from phub_collective.backends.compression import NO_COMPRESSION, Compression, Packing
from phub_collective.backends.native import load
from phub_collective.backends.operations import first_difference
from phub_collective.backends.pbox.placement import Placement, place
from phub_collective.errors import ConfigError, MismatchError, ProtocolError


@dataclass(frozen=True)
class TableSpec:
    """What a worker registers; equal on all ranks.

    Attributes:
        model: True for a model's exchange (placed by LPT, its gradients in an arena), False for
            one ad-hoc tensor (placed by the hash of its name, its memory given at each use).
        server, shared: the core runs the optimizer; workers read the core's weights in place.
        states: arrays of state that its rules keep at most.
        deterministic, staleness, first_keys_first: see `ExchangeSpec`; staleness None: no limit.
        compression: of gradients that are pushed.
    """

    name: str
    keys: tuple[Key, ...]
    op: ReduceOp
    prescale: float
    postscale: float
    chunk_bytes: int
    model: bool
    server: bool = False
    shared: bool = False
    states: int = 0
    deterministic: bool = False
    staleness: int | None = 0
    first_keys_first: bool = False
    compression: Compression = NO_COMPRESSION

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: object) -> TableSpec:
        """Raises ProtocolError when `value` is not what `to_json` makes."""
        try:
            fields = dict(value)  # type: ignore[call-overload]
            keys = tuple(
                Key(
                    str(k["name"]),
                    tuple(int(n) for n in k["shape"]),
                    DType(k["dtype"]),
                    tuple(int(n) for n in k["strides"]),
                    int(k["group"]),
                )
                for k in fields["keys"]
            )
            spec = TableSpec(
                str(fields["name"]),
                keys,
                ReduceOp(fields["op"]),
                float(fields["prescale"]),
                float(fields["postscale"]),
                int(fields["chunk_bytes"]),
                bool(fields["model"]),
                bool(fields["server"]),
                bool(fields["shared"]),
                int(fields["states"]),
                bool(fields["deterministic"]),
                None if fields["staleness"] is None else int(fields["staleness"]),
                bool(fields["first_keys_first"]),
                compression=Compression(
                    Packing(fields["compression"]["packing"]),
                    float(fields["compression"]["parameter"]),
                ),
            )
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise ProtocolError(f"[pbox] a malformed key table: {error!r}") from None
        sizes = (n for key in keys for n in (*key.shape, key.group))
        if min(sizes, default=0) < 0 or spec.chunk_bytes < 64 or spec.states < 0:
            raise ProtocolError("[pbox] a key table with a negative size or group")
        if spec.staleness is not None and not 0 <= spec.staleness < 1 << 31:
            raise ProtocolError(f"[pbox] a key table with staleness {spec.staleness}")
        return spec

    def describe(self) -> list[str]:
        """One comparable line per fact that all ranks must share."""
        head = (
            f"op {self.op.name.lower()}, prescale {self.prescale:g}, "
            f"postscale {self.postscale:g}, chunk_bytes {self.chunk_bytes}, "
            f"server optimizer {self.server} with {self.states} arrays of state, "
            f"shared model {self.shared}, deterministic {self.deterministic}, "
            f"staleness {'without limit' if self.staleness is None else self.staleness}, "
            f"compression {self.compression}"
        )
        return [head, *(describe_key(key) for key in self.keys)]

    def in_place(self, local: bool) -> bool:
        """Whether a core reads gradients where workers wrote them: they are a model's, stand in
        shared memory (`local`), and are not packed, which would be a copy in any case."""
        return local and self.model and not self.compression.packs

    @property
    def groups(self) -> int:
        """Number of parameter groups."""
        return 1 + max((key.group for key in self.keys), default=0)


def describe_key(key: Key) -> str:
    """A key as it is shown in errors."""
    strides = f" strides {list(key.strides)}" if key.strides else ""
    return f"{key.name!r} {key.dtype.name.lower()} {list(key.shape)}{strides} group {key.group}"


def require_equal(mine: TableSpec, rank: int, theirs: TableSpec, other: int) -> None:
    """Raise MismatchError naming both ranks and the first entry in which they differ."""
    if mine == theirs:
        return
    where = first_difference(mine.describe(), theirs.describe(), f"rank {rank}", f"rank {other}")
    raise MismatchError(
        f"[pbox] {mine.name!r} was registered differently: {where}; make them equal"
    )


@dataclass(frozen=True)
class TableIds:
    """The job's numbers for a table, given by the server."""

    id: int
    first_key: int
    first_chunk: int
    first_group: int


def placement_of(spec: TableSpec, cores: int, interfaces: int, shards: int = 1) -> Placement:
    """The chunks of a table and their cores, the same on both ends."""
    placed = place(spec.keys, spec.chunk_bytes, cores, interfaces, shards)
    if not spec.model:  # else the first core of the first shard would get every small tensor
        turn = zlib.crc32(spec.name.encode())
        placed.shard[:] = (placed.shard + turn % shards) % shards
        placed.core[:] = (placed.core + turn // shards % cores) % cores
    return placed


def native_table(
    spec: TableSpec,
    ids: TableIds,
    workers: int,
    cores: int,
    interfaces: int,
    local: bool,
    shards: int = 1,
    shard: int | None = None,
) -> Any:
    """The table as a native TableInfo.

    Args:
        cores, interfaces: of each shard.
        local: all workers share memory with the (one) server.
        shard: which one this is, whose table has no cores for the chunks of others; None: a
            worker, whose cores are those of shard 0, then of shard 1, and so on.
    """
    placed = placement_of(spec, cores, interfaces, shards)
    if shard is None:
        owners = placed.shard * cores + placed.core
    else:
        owners = np.where(placed.shard == shard, placed.core, load().NO_CORE)
    offsets, size = layout(spec.keys)
    # A step of a single rank has that rank's gradient as the average.
    average = spec.op is ReduceOp.AVERAGE and spec.staleness == 0
    return load().TableInfo(
        id=ids.id,
        first_key=ids.first_key,
        first_chunk=ids.first_chunk,
        bytes=size,
        key_offsets=np.array(offsets, np.uint64),
        key_bytes=np.array([key.nbytes for key in spec.keys], np.uint64),
        key_dtypes=np.array([key.dtype for key in spec.keys], np.uint8),
        key_groups=np.array([ids.first_group + key.group for key in spec.keys], np.uint32),
        chunk_offsets=np.array([chunk.offset for chunk in placed.chunks], np.uint64),
        chunk_bytes=np.array([chunk.nbytes for chunk in placed.chunks], np.uint32),
        chunk_keys=np.array([chunk.key for chunk in placed.chunks], np.uint32),
        chunk_cores=owners.astype(np.uint16),
        op=int(spec.op),
        prescale=spec.prescale,
        postscale=spec.postscale / workers if average else spec.postscale,
        divisor=workers if average else 1,
        arena=spec.in_place(local),
        shared_answers=local and not spec.model,
        server=spec.server,
        states=spec.states,
        shared=spec.shared,
        deterministic=spec.deterministic,
        staleness=spec.staleness,
        first_keys_first=spec.first_keys_first,
        packing=int(spec.compression.packing),
        packing_parameter=spec.compression.parameter,
    )


def chunk_count(keys: Sequence[Key], chunk_bytes: int) -> int:
    """Number of chunks of these keys."""
    return sum(-(-key.nbytes // chunk_bytes) for key in keys)
