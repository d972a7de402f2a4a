"""The service API of the paper, on NumPy arrays: CreateService, ConnectService, InitService, Push,
Pull, PushPull. No torch needed.

    token = create_service("127.0.0.1:4000", "digits", workers=2)
    with connect_service("127.0.0.1:4000", "digits", token, rank) as service:
        weights = service.init({"w": w, "b": b}, optimizer=SGD(lr=0.1, momentum=0.9))
        weights["w"] = service.push_pull("w", gradient)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import numpy as np

from phub_collective.backends.base import Buffer, ExchangeSpec, Hyper, Key, ReduceOp
from phub_collective.backends.pbox.connection import Connection
from phub_collective.backends.pbox.exchange import PboxExchange
from phub_collective.backends.pbox.handshake import create_job, invitations, split_list
from phub_collective.backends.pbox.quota import JobSpec
from phub_collective.config import Config
from phub_collective.errors import ConfigError, DuplicateName, MismatchError


def create_service(
    address: str,
    job: str,
    workers: int,
    chunk_bytes: int = Config.chunk_bytes,
    admin_token: str | None = None,
) -> str:
    """Make a job on a PBox (the paper's CreateService) and return its token.

    Args:
        address: HOST:PORT of the PBox, or HOST:PORT,... of its shards: then they get the job's
            chunks in this order, and their tokens are returned in it, too, as TOKEN,...
        workers: number of ranks of the job.
        chunk_bytes: largest chunk that its ranks will use.
        admin_token: proved when the server asks (None: PHUB_ADMIN_TOKEN).

    Raises:
        ConfigError: the name is taken or a number out of range. PeerLost: no PBox there.
        AuthError: the server wants an admin token.
    """
    if admin_token is None:
        admin_token = Config.from_environment().admin_token
    addresses = split_list(address)
    return ",".join(
        create_job(one, JobSpec(job, workers, chunk_bytes, shard, len(addresses)), admin_token)
        for shard, one in enumerate(addresses)
    )


def connect_service(
    address: str, job: str, token: str, rank: int, config: Config | None = None
) -> Service:
    """Join a job as `rank` (ConnectService): proves the token, opens a lane to every core.
    `address` and `token`: as given to, and by, `create_service`.

    Raises:
        AuthError: wrong token. PeerLost: no PBox there. ConfigError: the rank is taken.
    """
    invited = invitations(address, job, token)
    return Service(Connection(invited, rank, config or Config.from_environment()))


class Service:
    """One rank of a job on a PBox. Arrays keep their shape and dtype; a key is a name."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._exchange: PboxExchange | None = None
        self._keys: dict[str, int] = {}
        self._specs: list[Key] = []
        self._in_flight: set[str] = set()
        self._optimizes = False  # the server does

    @property
    def workers(self) -> int:
        """World size of the job."""
        return self._connection.workers

    def init(
        self,
        arrays: Mapping[str, np.ndarray],
        optimizer: Hyper | None = None,
        op: ReduceOp = ReduceOp.AVERAGE,
        root: int = 0,
        staleness: float = 0,
    ) -> dict[str, np.ndarray]:
        """Register the model and make everyone start from root's values (InitService). Collective.

        Args:
            arrays: name -> initial weights, any shape; the same names, shapes and dtypes, in the
                same order, on every rank.
            optimizer: the server runs SGD or Adam with these and answers with new weights; None:
                it answers with the reduced gradient.
            staleness: (with an optimizer) steps that a rank may be ahead of the slowest one, each
                rank's push being a step of its own; math.inf: asynchronous; 0: synchronous.

        Returns:
            root's weights, as new arrays.

        Raises:
            MismatchError: ranks registered different keys; both sides are named.
        """
        if self._exchange is not None:
            raise ConfigError(
                "[pbox] init was called before; connect a second service for a second model"
            )
        self._specs = [
            Key(n, a.shape, Buffer.of(np.empty(a.shape, a.dtype)).dtype) for n, a in arrays.items()
        ]
        self._keys = {key.name: index for index, key in enumerate(self._specs)}
        place = "worker" if optimizer is None else "server"
        states = 0 if optimizer is None else optimizer.state_arrays
        spec = ExchangeSpec(
            "service", self._specs, op, place, state_arrays=states, staleness=staleness
        )
        self._exchange = PboxExchange(self._connection, spec, self._connection.chunk_bytes)
        self._optimizes = optimizer is not None
        if optimizer is not None:
            self._exchange.set_hyper([optimizer])
        for name, array in arrays.items():
            self._view(name)[...] = array
        self._exchange.initialize(root)
        return {name: self._view(name).copy() for name in arrays}

    def set_optimizer(self, optimizer: Hyper) -> None:
        """New hyperparameters for the coming pushes; all ranks must give the same."""
        self._ready().set_hyper([optimizer])

    def push(self, name: str, gradient: np.ndarray) -> None:
        """Send a gradient (Push); returns at once. The answer waits for `pull`.

        Raises:
            MismatchError: another shape or dtype than registered.
            DuplicateName: the last push of this key was not pulled yet.
        """
        exchange, key = self._ready(), self._key(name)
        if name in self._in_flight:
            raise DuplicateName(f"[pbox] {name!r} was pushed and not pulled; pull it first")
        view = self._view(name)
        if gradient.shape != view.shape or gradient.dtype != view.dtype:
            raise MismatchError(
                f"[pbox] {name!r} was registered as {view.dtype} {list(view.shape)}, "
                f"got {gradient.dtype} {list(gradient.shape)}"
            )
        view[...] = gradient
        exchange.push(key)
        self._in_flight.add(name)

    def pull(self, name: str, timeout: float | None = None) -> np.ndarray:
        """The answer to this rank's push of `name` (Pull), when it has come: the reduced gradient
        or the new weights, as a new array. Without a push: the server's current weights.

        Raises:
            ConfigError: there was no push, and the server runs no optimizer.
            PeerTimeout, PeerLost: see `Exchange.wait`.
        """
        exchange, key = self._ready(), self._key(name)
        if name in self._in_flight:
            exchange.wait_key(key, timeout)
            self._in_flight.discard(name)
            exchange.finish_key(key)
        elif self._optimizes:
            exchange.pull(key, timeout)
        else:
            raise ConfigError(
                f"[pbox] pull of {name!r} without a push; only with optimizer=... at init does the "
                "server have weights"
            )
        return self._view(name).copy()

    def push_pull(
        self, name: str, gradient: np.ndarray, timeout: float | None = None
    ) -> np.ndarray:
        """`push` and `pull` in one exchange (PushPull)."""
        self.push(name, gradient)
        return self.pull(name, timeout)

    def _ready(self) -> PboxExchange:
        if self._exchange is None:
            raise ConfigError("[pbox] call init first: it registers the model's keys")
        return self._exchange

    def _key(self, name: str) -> int:
        if name not in self._keys:
            raise ConfigError(f"[pbox] unknown key {name!r}; registered are {list(self._keys)[:8]}")
        return self._keys[name]

    def _view(self, name: str) -> np.ndarray:
        """The key's place in the arena."""
        exchange, key = self._ready(), self._key(name)
        spec = self._specs[key]
        begin = exchange.offsets[key]
        data = exchange.arena[begin : begin + spec.nbytes]
        return Buffer(data, spec.dtype).array().reshape(spec.shape)

    def close(self) -> None:
        """Leave the job in good order."""
        if self._exchange is not None:
            self._exchange.close()
        self._connection.close()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
