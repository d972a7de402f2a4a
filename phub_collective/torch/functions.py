"""State that all ranks shall share: parameters, optimizer state, and objects."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phub_collective.backends.operations import first_difference
from phub_collective.errors import ConfigError, MismatchError
from phub_collective.torch.context import face
from phub_collective.torch.ops import Sum, allreduce_, broadcast_, broadcast_group_
from phub_collective.torch.optimizer import Distributed
from phub_collective.torch.tensors import check_host, short_name

GROUP_BYTES = 25 << 20  # small tensors travel together, up to this size


def _dumps(value: Any) -> bytes:
    """Pickled; by cloudpickle where that is installed, which also knows lambdas and classes of
    the main script. Reading takes plain pickle (and cloudpickle, for those)."""
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        return pickle.dumps(value)
    data: bytes = cloudpickle.dumps(value)
    return data


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's `obj`, on every rank (the root gets its own back). Collective.

    It is pickled, so it must come from a job you trust; every rank of ours does.
    """
    label = f"{name or 'broadcast_object'}"
    is_root = face().session.rank == root_rank
    data = _dumps(obj) if is_root else b""
    length = broadcast_(torch.tensor([len(data)]), root_rank, f"{label}.length")
    payload = torch.empty(int(length), dtype=torch.uint8)
    if is_root:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    broadcast_(payload, root_rank, f"{label}.data")
    return obj if is_root else pickle.loads(payload.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Every rank's `obj`, in rank order, on every rank. Collective."""
    session, label = face().session, name or "allgather_object"
    data = _dumps(obj)
    lengths = torch.zeros(session.size, dtype=torch.int64)
    lengths[session.rank] = len(data)
    ends = allreduce_(lengths, op=Sum, name=f"{label}.lengths").cumsum(0).tolist()
    begins = [0, *ends[:-1]]
    # Where one rank has its bytes all others have zeros: the sum is everybody's.
    joined = torch.zeros(ends[-1], dtype=torch.uint8)
    begin = begins[session.rank]
    joined[begin : begin + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everything = allreduce_(joined, op=Sum, name=f"{label}.data").numpy()
    return [pickle.loads(everything[b:e].tobytes()) for b, e in zip(begins, ends, strict=True)]


Parameters = Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor]


def broadcast_parameters(params: Parameters, root_rank: int = 0) -> None:
    """Overwrite every rank's parameters by the root's, in place. Collective.

    Args:
        params: a state_dict, named parameters, or parameters; the same on every rank.
        root_rank: whose values.

    Raises:
        MismatchError: a rank's parameters differ from the root's in name, dtype or shape; all
            ranks get it.
    """
    named = _named_tensors(params)
    mine = [f"{name!r} {short_name(t.dtype)} {tuple(t.shape)}" for name, t in named]
    theirs = broadcast_object(mine, root_rank, "broadcast_parameters")
    _compare(mine, theirs, root_rank, "broadcast_parameters")
    tensors = [tensor for _, tensor in named]
    _broadcast_all(tensors, root_rank)
    for tensor in tensors:
        parameter = face().parameter_of_copy.get(tensor, None)
        if parameter is not None:
            with torch.no_grad():
                parameter.copy_(tensor)


def _named_tensors(params: Parameters) -> list[tuple[str, torch.Tensor]]:
    items = params.items() if isinstance(params, Mapping) else params
    named = []
    for index, item in enumerate(items):
        name, tensor = item if isinstance(item, tuple) else (str(index), item)
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(
                f"[torch] broadcast_parameters: {name!r} is a {type(tensor).__name__}; expected "
                "tensors: leave it out and use broadcast_object for it"
            )
        check_host(tensor, f"parameter {name!r}")
        named.append((name, tensor))
    return named


def _compare(mine: Sequence[str], theirs: Sequence[str], root: int, what: str) -> None:
    """Raise MismatchError on every rank when the description `mine` of any of them is not the
    root's (`theirs`). Collective; `what` is the function that the user called."""
    where = ""
    if mine != theirs:
        me = f"rank {face().session.rank}"
        where = first_difference(mine, theirs, me, f"rank {root} (the root)")
    for found in allgather_object(where, f"{what}.compared"):
        if found:
            raise MismatchError(f"[torch] {what}: {found}; build the same model everywhere")


def _broadcast_all(tensors: Sequence[torch.Tensor], root: int) -> None:
    """Broadcast in place, small tensors in groups, so that there are few operations and only
    about GROUP_BYTES of extra memory."""
    group: list[torch.Tensor] = []
    total = 0
    for tensor in tensors:
        if group and total + tensor.nbytes > GROUP_BYTES:
            broadcast_group_(group, root)
            group, total = [], 0
        group.append(tensor)
        total += tensor.nbytes
    broadcast_group_(group, root)


@dataclass(frozen=True)
class _Hole:
    """Stands for a tensor in a structure that is sent without its tensors."""

    index: int


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with a hole for each tensor; the tensors are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _Hole(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _take_out(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_take_out(one, tensors) for one in value])
    return value


def _put_back(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of `_take_out`."""
    if isinstance(value, _Hole):
        return tensors[value.index]
    if isinstance(value, dict):
        return {key: _put_back(one, tensors) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_put_back(one, tensors) for one in value])
    return value


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the root's optimizer state and hyperparameters. Collective.

    What travels is `state_dict()`: the root's optimizer is only read, no step is made to create
    state, and a fresh optimizer's (empty) state works as well as a loaded one's.

    Args:
        model: ignored; Horovod has it.

    Raises:
        ConfigError: LBFGS.
        MismatchError: a rank's parameter groups differ from the root's; all ranks get it.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError(
            "[torch] broadcast_optimizer_state: the state of LBFGS belongs to one rank's line "
            "search and its lists have other lengths on other ranks; make a new LBFGS on every "
            "rank after broadcast_parameters"
        )
    is_root = face().session.rank == root_rank
    tensors: list[torch.Tensor] = []
    structure = _take_out(optimizer.state_dict(), tensors) if is_root else None
    kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    groups = [f"a group of {len(group['params'])}" for group in optimizer.param_groups]
    structure, kinds, theirs = broadcast_object(
        (structure, kinds, groups), root_rank, "broadcast_optimizer_state"
    )
    _compare(groups, theirs, root_rank, "broadcast_optimizer_state")
    if not is_root:
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in kinds]
    _broadcast_all(tensors, root_rank)
    # A state that a server has is everybody's: all ranks must set it in the same step.
    on_server = isinstance(optimizer, Distributed) and optimizer.state_on_server
    if not is_root or on_server:
        optimizer.load_state_dict(_put_back(structure, tensors))
