"""`DistributedOptimizer`: a torch optimizer whose gradients are exchanged between all ranks.

The optimizer that is passed in is the one that comes back: its class becomes a subclass, made
here, of its own class. So `isinstance` holds, schedulers and scalers made before or after see the
same `param_groups`, and attributes of unusual optimizers stay. The subclass cannot be pickled by
name, so a pickle holds the optimizer under its own class, and how it was wrapped; it is wrapped
again when it is loaded, and joins the job at its first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from phub_collective.backends.base import ReduceOp
from phub_collective.errors import ConfigError, DuplicateName
from phub_collective.torch.compression import Compression, checked
from phub_collective.torch.ops import Average, Sum
from phub_collective.torch.options import ExchangeCounters, Options
from phub_collective.torch.places import check_server_optimizer
from phub_collective.torch.reducer import Reducer

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
Closure = Callable[[], Any]


class Distributed(Optimizer):
    """What a wrapped optimizer can do beyond its own class. Never instantiated by itself."""

    _reducer: Reducer
    _skip = False  # inside skip_synchronize()

    def step(self, closure: Closure | None = None, *args: Any, **kwargs: Any) -> Any:
        """Wait for the exchange, then step: with the reduced gradients, or, where the server
        runs the optimizer, by taking the new weights from it."""
        self._opt_called = True  # what schedulers look at
        if self._reducer.options.on_server:
            return self._server_step(closure)
        if self._skip:
            self._reducer.require_settled()
        elif closure is None:
            self._reducer.synchronize()
        else:
            closure = self._synchronized(closure)
        call = args if closure is None and not args else (closure, *args)
        result = super().step(*call, **kwargs)
        self._reducer.stepped()
        return result

    # Schedulers replace the `step` of an instance, to see whether it was called, unless it says
    # that it tells them. `hooked`: torch shall not add the calls of step hooks, the class below
    # makes them.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    step.hooked = True  # type: ignore[attr-defined]

    @Optimizer.profile_hook_step
    def _server_step(self, closure: Closure | None = None) -> Any:
        if self._skip:
            raise ConfigError(
                "[torch] skip_synchronize() with optimizer_place='server', where gradients cannot "
                "be changed before they are applied; use optimizer_place='worker'"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._reducer.synchronize()
        self._reducer.stepped()
        return loss

    def _synchronized(self, closure: Closure) -> Closure:
        """`closure`, which runs backward, followed by the exchange of its gradients."""

        def evaluate() -> Any:
            loss = closure()
            self._reducer.synchronize()
            return loss

        return evaluate

    def synchronize(self) -> None:
        """Finish the exchange of this step's gradients, so that they can be changed before
        `step`, which will not exchange them again. With wait_in_forward: wait for the results of
        the last step.

        Raises:
            ConfigError: the optimizer runs on the server.
            PeerLost, PeerTimeout, MismatchError, ProtocolError
        """
        if self._reducer.options.wait_in_forward:
            return self._reducer.settle()
        if self._reducer.options.on_server:
            raise ConfigError(
                "[torch] synchronize() with optimizer_place='server', where gradients are applied "
                "as they come; use optimizer_place='worker' to clip or unscale them"
            )
        self._reducer.synchronize()
        return None

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` does not exchange: you have called `synchronize`."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; between backward and step, an exchange is finished first and its
        results are dropped. With set_to_none=False autograd accumulates right in the arena,
        which is cheaper for large models than a copy to it."""
        self._reducer.drop()
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Exchange gradients after this many backward passes. They are summed, not averaged, over
        the passes; a step after fewer passes exchanges what is there."""
        self._reducer.passes = _checked_passes(passes)
        self._reducer.options = dataclasses.replace(self._reducer.options, passes=passes)

    def state_dict(self) -> dict[str, Any]:
        """As the wrapped optimizer's. With optimizer_place="server" its state is read from there;
        16-bit parameters have their weights in float32 in it, too. Not collective.

        Raises:
            ConfigError: the server has begun to apply this step's gradients.
            PeerLost, PeerTimeout: see `synchronize`.
        """
        if not self._reducer.options.on_server:
            return super().state_dict()
        self.state.update(self._reducer.state())
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the wrapped optimizer's; begins a new step. With optimizer_place="server" all ranks
        must call it before the same step, in which the server takes the state of rank 0."""
        self._reducer.drop()
        if not self._reducer.options.on_server:
            return super().load_state_dict(state_dict)
        super().load_state_dict({**state_dict, "state": {}})
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = _parameters(self)
        entries = state_dict["state"]
        if entries or self._reducer.counters.steps:  # else the server has none either
            self._reducer.load_state(
                {p: entries[i] for p, i in zip(parameters, saved, strict=True) if i in entries}
            )
        return None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's; its parameters are exchanged from the next step on."""
        super().add_param_group(param_group)
        group = len(self.param_groups) - 1
        first = sum(len(one["params"]) for one in self.param_groups[:-1])
        added = [
            (_made_up_name(group, index), first + index)
            for index in range(len(self.param_groups[-1]["params"]))
        ]
        options = self._reducer.options
        self._reducer.options = dataclasses.replace(options, named=(*options.named, *added))

    def exchange_counters(self) -> ExchangeCounters:
        """Bytes exchanged so far, in all and before backward ended."""
        return self._reducer.counters

    def exchange_backend(self) -> str:
        """Name of the backend that carries the exchange, also where the selector chose it."""
        return self._reducer.backend

    @property
    def state_on_server(self) -> bool:
        """Whether the optimizer's state is on the server, from where `state_dict` reads it."""
        return self._reducer.options.on_server

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step asks for this right before it looks at the gradients, which must then
        be the reduced ones: all ranks must find the same infinities."""
        if self._reducer.options.on_server:
            raise ConfigError(
                "[torch] GradScaler with optimizer_place='server', which applies gradients before "
                "they could be unscaled; use optimizer_place='worker'"
            )
        self._reducer.synchronize()
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = object.__new__(_own_class(self))
        hidden = ("_reducer", "_skip", "_opt_called", "step")
        plain.__dict__.update({k: v for k, v in self.__dict__.items() if k not in hidden})
        return _wrap, (plain, self._reducer.options)


def _own_class(optimizer: Distributed) -> type[Optimizer]:
    """The class that the user's optimizer had."""
    own: type[Optimizer] = type(optimizer).__mro__[2]
    return own


def _distributed_class(own: type[Optimizer]) -> type[Optimizer]:
    """The subclass of `own` that exchanges."""
    return type(own.__name__, (Distributed, own), {"__module__": own.__module__})


def _wrap(optimizer: AnyOptimizer, options: Options) -> AnyOptimizer:
    """Give `optimizer` its distributed class; its exchange is opened at its first step."""
    return _dress(optimizer, Reducer(optimizer, options))


def _dress(optimizer: AnyOptimizer, reducer: Reducer) -> AnyOptimizer:
    vars(optimizer).pop("step", None)  # a scheduler's, see Distributed.step
    own: type[Optimizer] = type(optimizer)
    optimizer.__class__ = _distributed_class(own)  # type: ignore[assignment]
    vars(optimizer)["_reducer"] = reducer
    return optimizer


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: AnyOptimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: object = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    *,
    optimizer_place: str = "worker",
    shared_model: bool = False,
    backend: str | None = None,
    deterministic: bool = False,
    staleness: float = 0,
    wait_in_forward: bool = False,
    hold: bool = False,
) -> AnyOptimizer:
    """Make `optimizer` exchange its gradients with all ranks; returns it. Collective.

    Gradients are sent while backward goes on. With the optimizer on the server, all ranks start
    from the weights and the optimizer's state of rank 0, the state lives on the server
    (`state_dict()` reads it), and a parameter that no rank has a gradient for keeps its weights
    and state.

    Args:
        optimizer: any torch optimizer; with optimizer_place="server" SGD, Adam or AdamW.
        named_parameters: `model.named_parameters()`; None: names are made from positions.
        compression: one of Compression: how gradients are packed before they are sent. What was
            not sent is added to the next step's gradients, and is not in `state_dict()`.
        backward_passes_per_step: see `set_backward_passes_per_step`.
        op: Average or Sum.
        gradient_predivide_factor: with Average: gradients are divided by it before they are
            added, and by the number of ranks over it afterwards.
        num_groups: deprecated; use groups.
        groups: a number: buckets of about that part of the model are sent together, by backends
            that work on buckets. Lists of parameters are checked and have no other effect.
        sparse_as_dense: exchange sparse gradients as dense ones; else they are refused.
        optimizer_place: "worker", or "server": the PBox runs it.
        shared_model: the parameters become views of the PBox's memory on this host.
        backend: name of a backend; None: the selector's choice.
        deterministic: the same bits in every run: gradients are added in the order of the ranks.
        staleness: with optimizer_place="server": 0: synchronous. Else each rank's gradients are
            applied when they come, and a rank waits when it is this many steps ahead of the slowest
            one; math.inf: it never waits (asynchronous).
        wait_in_forward: with optimizer_place="server", without a shared model: `step` returns at
            once, and each module waits for its own new weights in its next forward. The weights of
            the first layers travel first. A module's state_dict() waits too; who reads a parameter
            otherwise calls `synchronize` before.
        hold: not available.

    Raises:
        ConfigError: an argument is wrong, or the server cannot run this optimizer.
        DuplicateName: two parameters have one name.
        MismatchError: the ranks' parameters differ; both sides are named.
    """
    if isinstance(optimizer, Distributed):
        raise ConfigError("[torch] this optimizer is distributed already; wrap it once")
    _check_place(optimizer, optimizer_place, shared_model, hold)
    if not staleness >= 0 or (staleness > 0 and optimizer_place != "server"):
        raise ConfigError(
            f"[torch] staleness={staleness}; expected 0, or with optimizer_place='server' a number "
            "of steps or math.inf"
        )
    if wait_in_forward and (optimizer_place != "server" or shared_model):
        raise ConfigError(
            "[torch] wait_in_forward=True needs optimizer_place='server' and shared_model=False: "
            "the worker's optimizer needs all gradients, and a shared model changes as a whole"
        )
    predivide = _checked_predivide(gradient_predivide_factor, op)
    options = Options(
        named=_named(optimizer, named_parameters),
        passes=_checked_passes(backward_passes_per_step),
        op=op,
        prescale=1.0 / predivide,
        postscale=predivide,
        bucket_bytes=_bucket_bytes(optimizer, num_groups, groups),
        sparse_as_dense=sparse_as_dense,
        on_server=optimizer_place == "server",
        shared_model=shared_model,
        deterministic=deterministic,
        staleness=staleness,
        wait_in_forward=wait_in_forward,
        backend=backend,
        compression=checked(compression).form,
    )
    reducer = Reducer(optimizer, options)
    if options.on_server and optimizer.state:  # of a checkpoint: it goes to the server
        reducer.load_state(dict(optimizer.state))
        optimizer.state.clear()
    reducer.lay()
    return _dress(optimizer, reducer)


def _check_place(optimizer: Optimizer, place: str, shared_model: bool, hold: bool) -> None:
    if place not in ("worker", "server"):
        raise ConfigError(f"[torch] optimizer_place={place!r}; expected 'worker' or 'server'")
    if shared_model and place != "server":
        raise ConfigError("[torch] shared_model=True needs optimizer_place='server'")
    if hold:
        raise ConfigError(
            "[torch] hold=True is not available; use optimizer_place='worker' to clip gradients, "
            "skip steps or change hyperparameters before step()"
        )
    if place == "server":
        check_server_optimizer(optimizer)


def _checked_passes(passes: int) -> int:
    if passes < 1:
        raise ConfigError(f"[torch] backward_passes_per_step={passes}; expected at least 1")
    return passes


def _checked_predivide(factor: float, op: ReduceOp) -> float:
    if op not in (Average, Sum):
        raise ConfigError(f"[torch] op={op!r}; gradients are exchanged by hvd.Average or hvd.Sum")
    if factor != 1.0 and op is not Average:
        raise ConfigError(f"[torch] gradient_predivide_factor={factor} needs op=hvd.Average")
    if factor <= 0:
        raise ConfigError(f"[torch] gradient_predivide_factor={factor}; expected more than 0")
    return float(factor)


def _made_up_name(group: int, index: int) -> str:
    return f"group{group}.parameter{index}"


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _named(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> tuple[tuple[str, int], ...]:
    """See `Options.named`."""
    if named_parameters is None:
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        names = [_made_up_name(g, i) for g, size in enumerate(sizes) for i in range(size)]
        return tuple(zip(names, range(len(names)), strict=True))
    positions = {p: position for position, p in enumerate(_parameters(optimizer))}
    found: dict[str, int] = {}
    seen: set[str] = set()
    for name, parameter in named_parameters:
        if name in seen:
            raise DuplicateName(
                f"[torch] named_parameters has {name!r} twice; expected different names: when you "
                "join several models' parameters, put each model's name in front of them"
            )
        seen.add(name)
        position = positions.pop(parameter, None)
        if position is not None:
            found[name] = position
    if positions:
        missing = [f"{position} of shape {tuple(p.shape)}" for p, position in positions.items()]
        raise ConfigError(
            f"[torch] {len(missing)} parameters of the optimizer are not in named_parameters (the "
            f"first is number {missing[0]}); pass all of them, or named_parameters=None"
        )
    return tuple(found.items())


def _bucket_bytes(
    optimizer: Optimizer, num_groups: int, groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> int:
    """The size of buckets that a number of groups comes to; 0: as the session has it."""
    if num_groups:
        warnings.warn("num_groups is deprecated; pass groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if groups is None:
        return 0
    parameters = _parameters(optimizer)
    if isinstance(groups, int):
        if groups < 0:
            raise ConfigError(f"[torch] groups={groups}; expected a number of groups, or lists")
        total = sum(parameter.nbytes for parameter in parameters)
        return -(-total // groups) if groups else 0
    members = [id(parameter) for group in groups for parameter in group]
    if len(set(members)) < len(members) or not set(members) <= {id(p) for p in parameters}:
        raise ConfigError(
            "[torch] groups: expected lists of the optimizer's parameters, each in at most one"
        )
    return 0
