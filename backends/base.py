"""The contract of a backend: what every way of exchanging gradients offers.

A backend is a module with two functions, ``is_available() -> str | None`` (None, or the reason why
not) and ``create(context) -> Backend``, and one row in `phub_collective.backends.TABLE` (or an
entry point of the group ``phub_collective.backends``). ``RUNS_OPTIMIZER = True`` in it says that
``ExchangeSpec.place == "server"`` is possible, ``FOLDS_PACKED = True`` that compressions with a
residual are. An operation is an argument (`Operation`), not a
method, so the contract stays small.
"""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from phub_collective.backends.compression import NO_COMPRESSION, Compression

if TYPE_CHECKING:
    from phub_collective.config import Config
    from phub_collective.rendezvous import Rendezvous


class DType(enum.IntEnum):
    """Element types on the wire; the numbers are those of `DType` in kernels/types.h."""

    FLOAT32 = 0
    FLOAT64 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    INT32 = 4
    INT64 = 5
    UINT8 = 6
    INT8 = 7
    BOOL = 8

    @property
    def stored(self) -> np.dtype:
        """NumPy's type of the elements; of bfloat16, which NumPy lacks, that of its bits."""
        return _STORED[self]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _STORED[self].itemsize

    @property
    def is_floating(self) -> bool:
        return self <= DType.BFLOAT16


_STORED = [np.dtype("uint16" if dtype is DType.BFLOAT16 else dtype.name.lower()) for dtype in DType]


class ReduceOp(enum.IntEnum):
    """Reductions; the numbers are those of `ReduceOp` in kernels/types.h.

    On BOOL: SUM and MAX are OR, PRODUCT and MIN are AND. AVERAGE of integers divides the sum by
    the world size, rounding towards minus infinity; of BOOL it is refused.
    """

    SUM = 0
    AVERAGE = 1
    MIN = 2
    MAX = 3
    PRODUCT = 4


class Kind(enum.Enum):
    """What an operation does."""

    ALLREDUCE = "allreduce"
    BROADCAST = "broadcast"
    BARRIER = "barrier"


@dataclass(frozen=True)
class Buffer:
    """A contiguous piece of host memory; the result replaces the input in the same place.

    Attributes:
        bytes: 1-D uint8 view of the memory, writable, C-contiguous (it keeps the memory alive).
        dtype: element type; ``bytes.size`` is a multiple of its item size.
    """

    bytes: np.ndarray
    dtype: DType

    @property
    def count(self) -> int:
        """Number of elements."""
        return int(self.bytes.size) // self.dtype.itemsize

    @staticmethod
    def of(array: np.ndarray) -> Buffer:
        """Wrap a writable C-contiguous NumPy array without a copy.

        Raises:
            ConfigError: not contiguous, not writable, or of a dtype that is not exchanged
                (bfloat16 has no NumPy dtype: build the Buffer from its bytes).
        """
        from phub_collective.errors import ConfigError

        name = array.dtype.name.upper()
        if name not in DType.__members__:
            raise ConfigError(
                f"[buffer] dtype {array.dtype} is not exchanged; "
                f"expected one of {', '.join(d.name.lower() for d in DType)}"
            )
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise ConfigError(
                "[buffer] expected a writable C-contiguous array, got "
                f"strides {array.strides} writable={array.flags.writeable}; "
                "pass numpy.ascontiguousarray(a)"
            )
        return Buffer(array.reshape(-1).view(np.uint8), DType[name])

    def array(self) -> np.ndarray:
        """1-D NumPy view of the elements (bfloat16 as uint16)."""
        return self.bytes.view(self.dtype.stored)


@dataclass(frozen=True)
class Operation:
    """One collective, in place on `buffer` (None for a barrier).

    Matched between ranks by (name, how many times that name was used before), so ranks may submit
    different names in different orders. A second use of a name waits until the first is finished.
    The result is ``reduce(prescale * x over ranks) * postscale`` (scales on floating types only).
    """

    kind: Kind
    name: str
    buffer: Buffer | None = None
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    prescale: float = 1.0
    postscale: float = 1.0


class Work(Protocol):
    """A submitted operation."""

    def done(self) -> bool:
        """True when finished (also when it failed); never blocks."""
        ...

    def wait(self, timeout: float | None = None) -> None:
        """Block until finished. Raises the operation's PhubError, or PeerTimeout after `timeout`
        seconds (None: config.stall_timeout). Releases the GIL."""
        ...


@dataclass(frozen=True)
class Key:
    """One parameter of a model: the unit of registration. All keys of a model, in one order on
    every rank, make its key table; keys and their order are compared between ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    strides: tuple[int, ...] = ()  # in elements; () = C order. Compared, since views are laid so.
    group: int = 0  # index of the optimizer's parameter group

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize


ALIGNMENT = 64  # bytes; every key starts at a multiple of it in the arena


def layout(keys: Sequence[Key]) -> tuple[list[int], int]:
    """Byte offset of each key in the flat arena, and the arena's size in bytes."""
    offsets, end = [], 0
    for key in keys:
        offsets.append(end)
        end += -(-key.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


@dataclass
class SGD:
    """Hyperparameters of one parameter group, as in torch.optim.SGD; they travel with the step, so
    schedulers work."""

    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    @property
    def state_arrays(self) -> int:
        """Arrays of state, of the weights' size, that the rule keeps: the momentum. One that has
        none now may get it from a scheduler, so it always has a place."""
        return 1


@dataclass
class Adam:
    """As in torch.optim.Adam, and with ``decoupled_weight_decay`` as in torch.optim.AdamW."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False
    maximize: bool = False
    decoupled_weight_decay: bool = False

    @property
    def state_arrays(self) -> int:
        """First and second moment; with amsgrad the largest second moment so far."""
        return 3 if self.amsgrad else 2


Hyper = SGD | Adam


@dataclass
class KeyState:
    """An optimizer's state of one key, as a server has it.

    Attributes:
        taken: steps that it has in it; 0: there is none yet.
        arrays: of ``Key.count`` elements in the type in which gradients are added (float32 for
            16-bit floats), laid as the key is in the arena. SGD: momentum. Adam: first and second
            moment, and with amsgrad the largest second moment.
        weights: of 16-bit keys: the weights in float32, which the server steps.
    """

    taken: int
    arrays: list[np.ndarray]
    weights: np.ndarray | None = None


@dataclass(frozen=True)
class ExchangeSpec:
    """What a model's exchange shall do.

    Attributes:
        name: name of the exchange, unique in the job (two optimizers are two exchanges).
        keys: the key table.
        op: SUM or AVERAGE of the gradients.
        place: "worker": the result is the reduced gradient. "server": the backend runs the
            optimizer and the result is the new weights (only where `backends.runs_optimizer`).
        shared_model: (place="server", one host) workers read weights where the core wrote them.
        state_arrays: (place="server") the most that the rule of a group keeps.
        deterministic: the same bits in every run, whenever ranks' gradients come: they are added
            in the order of the ranks.
        staleness: (place="server") 0: a step is one with all ranks' gradients. Else each rank's
            gradients are a step of their own, and a rank waits for the slowest one when it is this
            many steps ahead of it; math.inf: never (asynchronous).
        first_keys_first: of what waits to be sent, keys leave in the order of the table, not of
            their pushes: for who waits for the first ones first. A wish: not all backends can.
        bucket_bytes: gradients are sent in groups of this size by backends that work on buckets.
        prescale, postscale: as in `Operation`.
        compression: how gradients (of float32) are packed before they are sent; compressions with
            a residual only where `backends.folds_packed`. Weights are never packed.
    """

    name: str
    keys: Sequence[Key]
    op: ReduceOp = ReduceOp.AVERAGE
    place: str = "worker"
    shared_model: bool = False
    bucket_bytes: int = 25 << 20
    prescale: float = 1.0
    postscale: float = 1.0
    state_arrays: int = 1
    deterministic: bool = False
    staleness: float = 0
    first_keys_first: bool = False
    compression: Compression = NO_COMPRESSION


@dataclass
class Counters:
    """What an exchange moved since it was opened, in bytes of payload."""

    pushed: int = 0  # handed to the transport (on shm: published to the core)
    steps: int = 0


class Exchange(abc.ABC):
    """The repeated exchange of one model by one worker.

    Per step: write each key's gradient into ``arena`` at ``offsets[key]``, `push` it (in any
    order, also while backward goes on), then `wait`. After `wait` the results stand in ``result``
    at the same offsets (``result is arena`` unless the model is shared).
    """

    backend: str  # name of the backend that carries it
    arena: np.ndarray  # uint8, writable: gradients go here
    result: np.ndarray  # uint8: reduced gradients or new weights stand here after wait()
    offsets: list[int]
    counters: Counters

    @abc.abstractmethod
    def initialize(self, root: int = 0, state: Sequence[KeyState] | None = None) -> None:
        """Make everyone hold root's weights: each rank has its weights in ``arena``; on return
        root's stand in ``result`` of every rank (and on the server, with a server optimizer).
        Collective; also adopts weights loaded later, at a step boundary.

        `state`: (server optimizer) of each key, what root's say is the server's from now on; None:
        it is left alone. KeyState.weights count in synchronous exchanges only."""

    @abc.abstractmethod
    def push(self, key: int, no_grad: bool = False) -> None:
        """Send key's gradient, which stands in the arena and must not change until `wait`.
        `no_grad`: this rank has none in this step; it counts as zeros, and when no rank has one
        a server optimizer leaves weights and state of the key alone."""

    @abc.abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Block until all keys of the step are answered. Every key must have been pushed.

        Raises:
            PeerLost, PeerTimeout, ProtocolError, MismatchError
        """

    def wait_key(self, key: int, timeout: float | None = None) -> None:
        """Block until `key` is answered (backends that answer by bucket wait for its bucket)."""
        self.wait(timeout)

    def set_hyper(self, groups: Sequence[Hyper]) -> None:
        """Hyperparameters for the coming steps (server optimizer). Call before the step's first
        push; all ranks must agree, else MismatchError."""
        from phub_collective.errors import ConfigError

        raise ConfigError(f"[{type(self).__name__}] runs no optimizer; use place='worker'")

    def read_state(self, timeout: float | None = None) -> list[KeyState]:
        """The server optimizer's state of each key. Not collective; between two steps."""
        from phub_collective.errors import ConfigError

        raise ConfigError(f"[{type(self).__name__}] runs no optimizer; its state is the worker's")

    @abc.abstractmethod
    def close(self) -> None:
        """Retire the keys and free the memory; views of the arena stay valid until dropped."""


class Backend(abc.ABC):
    """One way of exchanging, connected to all ranks of the job. Thread-safe."""

    name: str

    @abc.abstractmethod
    def submit(self, operation: Operation) -> Work:
        """Start an operation; the buffer belongs to the backend until the work is done.

        Raises:
            DuplicateName: the name is in flight on this rank already.
            ConfigError: this backend cannot do it (the message says which can).
        """

    def open_exchange(self, spec: ExchangeSpec) -> Exchange:
        """Register a model. Collective; compares the key tables of all ranks.

        Raises:
            MismatchError: key tables differ; both ranks and both entries are named.
        """
        from phub_collective.backends.buckets import BucketExchange

        return BucketExchange(self, self.context, spec)

    @abc.abstractmethod
    def close(self) -> None:
        """Finish and disconnect; idempotent."""

    context: Context


@dataclass(frozen=True)
class Context:
    """What a backend gets to connect itself: who we are, how to find the others, the settings."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    rendezvous: Rendezvous
    config: Config
