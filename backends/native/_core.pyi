"""Types of the native core. Arrays are C-contiguous and never converted; numbers of DType,
ReduceOp and ErrorCode are those of phub_collective.backends.base and .errors. What blocks
releases the GIL."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

ALL_KEYS: int  # as a key: all of them
NO_GRAD: int  # flags of a push
INIT: int
MAX_PAYLOAD: int  # bytes of a frame, on any lane
MAX_WORKERS: int  # of a job
NO_CORE: int  # of a chunk that another shard owns

_Bytes = NDArray[np.uint8]

# --- memory and lanes ---

class Access:
    """What those may do who get the descriptor of shared memory."""

    __members__: dict[str, Access]
    READ_WRITE: Access
    READ_ONLY: Access
    COPY_ON_WRITE: Access
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

class Memory:
    """Mapped memory; a buffer of bytes. See memory.h."""

    @staticmethod
    def anonymous(bytes: int) -> Memory: ...
    @staticmethod
    def shared(bytes: int, others: Access) -> Memory: ...
    @staticmethod
    def attach(fd: int, bytes: int, access: Access) -> Memory: ...
    def revert(self) -> None: ...
    def release_fd(self) -> None: ...
    @property
    def fd(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class TcpOptions:
    def __init__(
        self,
        congestion: str = "",
        buffer_bytes: int = 0,
        keepalive_s: int = 30,
        unsent_bytes: int = 0,
    ) -> None: ...

class LaneCounters:
    @property
    def bytes_sent(self) -> int: ...
    @property
    def bytes_received(self) -> int: ...
    @property
    def wakeups(self) -> int: ...

class Engine:
    """Moves a worker's lanes. See engine.h."""

    def __init__(self, spin_us: int = 0) -> None: ...
    def bell(self) -> int: ...

def make_ring_memory(ring_bytes: int) -> int: ...
def congestion_control(fd: int) -> str: ...
def choose_congestion(fd: int, wanted: str) -> None: ...

# --- PBox ---

class Hyper:
    """A rule and its values, as on the wire. See HyperWire in wire.h."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...  # refuses: use these
    @staticmethod
    def sgd(
        *,
        lr: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
        maximize: bool,
    ) -> Hyper: ...
    @staticmethod
    def adam(
        *,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        amsgrad: bool,
        decoupled: bool,
        maximize: bool,
    ) -> Hyper: ...

class TableInfo:
    """The keys of a table, its chunks and their cores. See table.h."""

    def __init__(
        self,
        *,
        id: int,
        first_key: int,
        first_chunk: int,
        bytes: int,
        key_offsets: NDArray[np.uint64],
        key_bytes: NDArray[np.uint64],
        key_dtypes: NDArray[np.uint8],
        key_groups: NDArray[np.uint32],
        chunk_offsets: NDArray[np.uint64],
        chunk_bytes: NDArray[np.uint32],
        chunk_keys: NDArray[np.uint32],
        chunk_cores: NDArray[np.uint16],
        op: int,
        prescale: float,
        postscale: float,
        divisor: int,
        arena: bool,
        shared_answers: bool,
        server: bool,
        states: int,
        shared: bool,
        deterministic: bool,
        staleness: int | None,
        first_keys_first: bool,
        packing: int,
        packing_parameter: float,
    ) -> None: ...

class Table:
    """The server's memory of a table; None where it has none of a kind."""

    @property
    def arenas(self) -> list[Memory]: ...
    @property
    def answers(self) -> list[Memory | None]: ...
    @property
    def weights(self) -> list[Memory | None]: ...

class JobEvent:
    """What ended a job."""

    @property
    def job(self) -> int: ...
    @property
    def code(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def text(self) -> str: ...

class Server:
    """The cores of a PBox. See server.h."""

    def __init__(self, cores: int, spin_us: int = 0) -> None: ...
    def add_job(self, job: int, workers: int) -> None: ...
    def drop_job(self, job: int) -> None: ...
    def fail_job(self, job: int, code: int, rank: int, text: str) -> None: ...
    def add_table(self, job: int, info: TableInfo, workers: int) -> Table: ...
    def end_table(self, job: int, table: int, code: int, rank: int, text: str) -> None: ...
    def drop_table(self, job: int, table: int) -> None: ...
    def attach_tcp(
        self, job: int, rank: int, core: int, fd: int, options: TcpOptions, max_payload: int
    ) -> None: ...
    def attach_shm(
        self,
        job: int,
        rank: int,
        core: int,
        socket: int,
        memory: int,
        peer_bell: int,
        max_payload: int,
    ) -> None: ...
    def stalled(self, job: int) -> list[tuple[int, list[int]]]: ...
    def next_event(self, timeout_s: float) -> JobEvent | None: ...
    def close_events(self) -> None: ...

class PboxClient:
    """A worker's end of a PBox. See pbox_client.h."""

    def __init__(self, engine: Engine, rank: int, cores: int = 0) -> None: ...
    def attach_tcp(self, core: int, fd: int, options: TcpOptions, max_payload: int) -> None: ...
    def attach_shm(
        self, core: int, socket: int, memory: int, peer_bell: int, max_payload: int
    ) -> None: ...
    def add(
        self,
        info: TableInfo,
        answers: Sequence[Memory],
        servers: Sequence[tuple[int, int, int]],
    ) -> None: ...
    def drop(self, table: int) -> None: ...
    def push(self, table: int, key: int, flags: int, memory: _Bytes) -> None: ...
    def pull(self, table: int, key: int, memory: _Bytes) -> None: ...
    def read_state(self, table: int, key: int, array: int, memory: _Bytes) -> None: ...
    def taken(self, table: int, key: int) -> int: ...
    def write_state(self, table: int, key: int, array: int, taken: int, memory: _Bytes) -> None: ...
    def set_hyper(self, table: int, group: int, hyper: Hyper) -> None: ...
    def done(self, table: int, key: int) -> bool: ...
    def wait(self, table: int, key: int, timeout_s: float) -> bool: ...
    def fail(self, code: int, rank: int, text: str) -> None: ...
    def close(self) -> None: ...
    def failed(self) -> bool: ...
    def counters(self) -> LaneCounters: ...

# --- collectives between workers ---

class Plan:
    """The steps of one rank: send to, begin and end, receive from, begin and end, reduce."""

    def __init__(
        self, count: int, steps: Sequence[tuple[int, int, int, int, int, int, bool]], reduces: bool
    ) -> None: ...

class MeshSpec:
    """What an operation is; compared between ranks. See operation.h."""

    def __init__(
        self,
        *,
        kind: int,
        dtype: int,
        op: int,
        root: int,
        count: int,
        part_count: int,
        algorithm: int,
        prescale: float,
        postscale: float,
    ) -> None: ...

class MeshOperation: ...

class Mesh:
    """Lanes to all other workers, and the operations on them. See mesh.h."""

    def __init__(
        self, engine: Engine, rank: int, size: int, frame_bytes: int, window: int
    ) -> None: ...
    def attach_tcp(self, peer: int, fd: int, options: TcpOptions, max_payload: int) -> None: ...
    def attach_shm(
        self, peer: int, socket: int, memory: int, peer_bell: int, first: bool, max_payload: int
    ) -> None: ...
    def submit(
        self, name: str, spec: MeshSpec, memory: _Bytes, whole: Plan | None, last: Plan | None
    ) -> MeshOperation: ...
    def done(self, operation: MeshOperation) -> bool: ...
    def wait(self, operation: MeshOperation, timeout_s: float) -> bool: ...
    def missing(self, operation: MeshOperation) -> list[int]: ...
    def close(self, timeout_s: float) -> None: ...
    def counters(self) -> LaneCounters: ...

# --- kernels ---

class _Isa:
    BASELINE: _Isa
    AVX2: _Isa
    AVX512: _Isa
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class _Scale:
    def __init__(self, pre: float = 1.0, post: float = 1.0, divisor: int = 1) -> None: ...

class _Execution:
    def __init__(self, isa: _Isa | None = None, streaming: bool = False) -> None: ...

class _AdamParams:
    def __init__(
        self,
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        decoupled: bool = False,
        maximize: bool = False,
    ) -> None: ...
    @property
    def lr(self) -> float: ...
    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def amsgrad(self) -> bool: ...
    @property
    def decoupled(self) -> bool: ...
    @property
    def maximize(self) -> bool: ...

class _SgdParams:
    def __init__(
        self,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None: ...
    @property
    def lr(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def dampening(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def nesterov(self) -> bool: ...
    @property
    def maximize(self) -> bool: ...

class _Walk:
    READ: _Walk
    COPY: _Walk
    TRIAD: _Walk
    REDUCE: _Walk
    SGD: _Walk
    ADAM: _Walk
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class _Way:
    TALL: _Way
    WIDE: _Way
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class _Kernels(Protocol):
    """The submodule `kernels`: the arithmetic of a core (see kernels/cpu.h), and walks over
    memory that are timed (see kernels/bench.h). A stub file has no place for submodules."""

    Isa: type[_Isa]
    Scale: type[_Scale]
    Execution: type[_Execution]
    SgdParams: type[_SgdParams]
    AdamParams: type[_AdamParams]
    Walk: type[_Walk]
    Way: type[_Way]
    WALK_SGD: _SgdParams
    WALK_ADAM: _AdamParams
    WALK_TAKEN: int

    def has_isa(self, isa: _Isa) -> bool: ...
    def best_isa(self) -> _Isa: ...
    def reduce(
        self,
        dtype: int,
        op: int,
        outs: Sequence[_Bytes],
        inputs: Sequence[_Bytes],
        scale: _Scale = ...,
        execution: _Execution = ...,
    ) -> None: ...
    def fold(
        self,
        dtype: int,
        op: int,
        acc: _Bytes,
        input: _Bytes,
        first: bool,
        scale: _Scale = ...,
        execution: _Execution = ...,
    ) -> None: ...
    def finish(
        self,
        dtype: int,
        op: int,
        out: _Bytes,
        acc: _Bytes,
        scale: _Scale = ...,
        execution: _Execution = ...,
    ) -> None: ...
    def step(
        self,
        dtype: int,
        update: _SgdParams | _AdamParams,
        weights_in: _Bytes,
        weights_out: _Bytes,
        state: Sequence[_Bytes],
        outs: Sequence[_Bytes],
        acc: _Bytes,
        scale: _Scale,
        taken: int,
        execution: _Execution = ...,
    ) -> None: ...
    def reduce_step(
        self,
        dtype: int,
        update: _SgdParams | _AdamParams,
        weights_in: _Bytes,
        weights_out: _Bytes,
        state: Sequence[_Bytes],
        outs: Sequence[_Bytes],
        inputs: Sequence[_Bytes],
        scale: _Scale,
        taken: int,
        execution: _Execution = ...,
    ) -> None: ...
    def packed_bytes(self, packing: int, parameter: float, count: int) -> int: ...
    def pack(
        self,
        packing: int,
        parameter: float,
        out: _Bytes,
        residual: _Bytes,
        gradient: _Bytes,
    ) -> None: ...
    def fold_packed(
        self,
        packing: int,
        parameter: float,
        acc: _Bytes,
        form: _Bytes,
        first: bool,
        pre: float,
    ) -> bool: ...
    def walk(
        self,
        what: _Walk,
        dtype: int,
        inputs: Sequence[_Bytes],
        out: _Bytes | None,
        weights: _Bytes | None,
        state: Sequence[_Bytes],
        chunk_bytes: int,
        slice: int,
        threads: int,
        streaming: bool,
    ) -> list[list[float]]: ...
    def aggregate(
        self,
        way: _Way,
        inputs: Sequence[_Bytes],
        out: _Bytes,
        weights: _Bytes,
        momentum: _Bytes,
        merged: _Bytes,
        keys: Sequence[int],
        chunk_bytes: int,
        threads: int,
        streaming: bool,
        rounds: int,
    ) -> list[float]: ...

kernels: _Kernels
