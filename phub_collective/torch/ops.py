"""Collectives on tensors, with Horovod's names and arguments.

An operation without a name gets one (see names.py): ranks must then submit and synchronize such
operations in the same order. In-place forms end in an underscore; `_async` forms return a handle
for `poll` and `synchronize`; the synchronous out-of-place forms are differentiable.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from phub_collective.backends.base import DType, Kind, Operation, ReduceOp
from phub_collective.errors import ConfigError
from phub_collective.torch.compression import Compression, checked
from phub_collective.torch.context import face
from phub_collective.torch.handles import Handle, synchronize
from phub_collective.torch.staging import Stage, by_dtype
from phub_collective.torch.tensors import (
    DTYPES,
    buffer_of,
    check_host,
    exchanged_dtype,
    short_name,
)

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def _check(tensors: Sequence[torch.Tensor], what: str, plan: Operation) -> None:
    """Raise ConfigError for a tensor that `plan` cannot be done with."""
    for tensor in tensors:
        check_host(tensor, what)
        if plan.kind is Kind.ALLREDUCE:
            exchanged_dtype(tensor, what)
            if not tensor.is_floating_point() and (plan.prescale, plan.postscale) != (1.0, 1.0):
                raise ConfigError(
                    f"[torch] {what} is {short_name(tensor.dtype)}; only floating types are scaled"
                )


def _start(
    tensors: Sequence[torch.Tensor], in_place: bool, name: str | None, plan: Operation
) -> Handle:
    """Submit `plan` for `tensors`, those of one dtype together; results come in their order."""
    here = face()
    _check(tensors, f"tensor of {plan.kind.value} {name or '(unnamed)'}", plan)
    groups = by_dtype(tensors)
    stages = {d: Stage([tensors[i] for i in found], in_place) for d, found in groups.items()}
    works = []
    for dtype, one in stages.items():
        full = name
        if name is not None and len(stages) > 1:
            full = f"{name}.{short_name(dtype)}"
        # A broadcast moves bytes, so it can move types that are never reduced.
        buffer = buffer_of(one.flat, DTYPES.get(dtype, DType.UINT8))
        works.append(here.submit(replace(plan, name=full or "", buffer=buffer)))

    def finish() -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for dtype, one in stages.items():
            found.update(zip(groups[dtype], one.results(), strict=True))
        return [found[index] for index in range(len(tensors))]

    return Handle(works, finish)


def _single(handle: Handle) -> Handle:
    """The handle of a group of one, with its only result."""
    return handle.then(lambda results: results[0])


def _reduction(
    average: bool | None, op: ReduceOp | None, prescale_factor: float, postscale_factor: float
) -> Operation:
    """What the arguments ask for, as an operation without name and buffer."""
    if average is not None:
        warnings.warn(
            "average is deprecated; pass op=hvd.Average or op=hvd.Sum",
            DeprecationWarning,
            stacklevel=3,
        )
        if op is not None:
            raise ConfigError(f"[torch] got average={average} and op={op!r}; expected only op")
        op = Average if average else Sum
    op = Average if op is None else op
    if not isinstance(op, ReduceOp):
        known = ", ".join(one.name.title() for one in ReduceOp)
        raise ConfigError(f"[torch] op={op!r}; expected one of hvd.{{{known}}}")
    return Operation(
        Kind.ALLREDUCE,
        "",
        op=op,
        prescale=float(prescale_factor),
        postscale=float(postscale_factor),
    )


def _from_root(root_rank: int) -> Operation:
    if not 0 <= root_rank < face().session.size:
        raise ConfigError(
            f"[torch] root_rank={root_rank}; expected a rank of 0..{face().session.size - 1}"
        )
    return Operation(Kind.BROADCAST, "", root=root_rank)


class _Reduce(torch.autograd.Function):
    """Differentiable allreduce: a sum's gradient is the sum of all ranks' gradients."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, plan: Operation, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.name, ctx.plan = name, plan
        return tuple(_start(tensors, False, name, plan).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        if ctx.plan.op not in (Sum, Average):
            raise ConfigError(
                f"[torch] allreduce with op={ctx.plan.op.name.title()} has no gradient; use Sum or "
                "Average, or detach its result"
            )
        name = None if ctx.name is None else f"{ctx.name}.backward"
        return (None, None, *_reduced(name, ctx.plan, gradients))


def _reduced(
    name: str | None, plan: Operation, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    results: tuple[torch.Tensor, ...] = _Reduce.apply(  # type: ignore[no-untyped-call]
        name, plan, *tensors
    )
    return results


class _Broadcast(torch.autograd.Function):
    """Differentiable broadcast: the root gets the mean of all gradients, the others zeros, as in
    Horovod."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, plan: Operation, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.name, ctx.plan = name, plan
        return tuple(_start(tensors, False, name, plan).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        name = None if ctx.name is None else f"{ctx.name}.backward"
        mean = _reduced(name, _reduction(None, Average, 1.0, 1.0), gradients)
        is_root = face().session.rank == ctx.plan.root
        return (None, None, *(one if is_root else torch.zeros_like(one) for one in mean))


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start an allreduce into a new tensor; see `allreduce`."""
    plan = _reduction(average, op, prescale_factor, postscale_factor)
    return _single(_start([tensor], False, name, plan))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start an allreduce in `tensor` itself, which must be left alone until synchronized."""
    plan = _reduction(average, op, prescale_factor, postscale_factor)
    return _single(_start([tensor], True, name, plan))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: object = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """``op over ranks(prescale_factor * tensor) * postscale_factor``; differentiable.

    Args:
        tensor: same shape and dtype on every rank; left alone.
        average: deprecated; True means op=Average, False op=Sum.
        name: same on every rank; None: one is made.
        compression: Compression.fp16 or bf16: floats are cast for the way and back.
        op: Average (default; of integers rounded down), Sum, Min, Max or Product.

    Raises:
        MismatchError: ranks differ in the number of elements, dtype or arguments; both sides are
            named.
        ConfigError, PeerLost, PeerTimeout
    """
    compressor = checked(compression)
    plan = _reduction(average, op, prescale_factor, postscale_factor)
    packed, dtype = compressor.compress(tensor)
    return compressor.decompress(_reduced(name, plan, [packed])[0], dtype)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Allreduce in place; returns `tensor`. See `allreduce`."""
    plan = _reduction(average, op, prescale_factor, postscale_factor)
    result: torch.Tensor = synchronize(_start([tensor], True, name, plan))[0]
    return result


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start an allreduce of all `tensors` together, those of one dtype as one operation."""
    plan = _reduction(average, op, prescale_factor, postscale_factor)
    return _start(tensors, False, name, plan)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """As `grouped_allreduce_async`, in place."""
    plan = _reduction(average, op, prescale_factor, postscale_factor)
    return _start(tensors, True, name, plan)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: object = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Allreduce all `tensors` together; differentiable. See `allreduce`."""
    compressor = checked(compression)
    plan = _reduction(average, op, prescale_factor, postscale_factor)
    packed, dtypes = compressor.compress_all(tensors)
    return compressor.decompress_all(_reduced(name, plan, packed), dtypes)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Allreduce all `tensors` together in place; returns them."""
    plan = _reduction(average, op, prescale_factor, postscale_factor)
    results: list[torch.Tensor] = synchronize(_start(tensors, True, name, plan))
    return results


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start a broadcast into a new tensor; see `broadcast`."""
    return _single(_start([tensor], False, name, _from_root(root_rank)))


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """Start a broadcast in `tensor` itself, which must be left alone until synchronized."""
    return _single(_start([tensor], True, name, _from_root(root_rank)))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """A new tensor with the root's values, on every rank; differentiable.

    Args:
        tensor: same shape and dtype on every rank (any dtype); left alone.
        root_rank: whose values.
        name: same on every rank; None: one is made.
    """
    results: tuple[torch.Tensor, ...] = _Broadcast.apply(  # type: ignore[no-untyped-call]
        name, _from_root(root_rank), tensor
    )
    return results[0]


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Broadcast in place; returns `tensor`. See `broadcast`."""
    result: torch.Tensor = synchronize(_start([tensor], True, name, _from_root(root_rank)))[0]
    return result


def broadcast_group_(tensors: Sequence[torch.Tensor], root_rank: int) -> None:
    """Broadcast all `tensors` in place, those of one dtype as one operation."""
    synchronize(_start(tensors, True, None, _from_root(root_rank)))


def barrier() -> None:
    """Wait until every rank has come here."""
    face().submit(Operation(Kind.BARRIER, "")).wait()
