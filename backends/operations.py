"""What all backends ask of an operation: is it valid, and how is it described to the others."""

from __future__ import annotations

from collections.abc import Sequence

from phub_collective.backends.base import DType, ExchangeSpec, Kind, Operation, ReduceOp
from phub_collective.errors import ConfigError


def check(operation: Operation, size: int, backend: str) -> None:
    """Raise ConfigError when no backend can do this operation in a job of `size` ranks."""
    name, buffer = operation.name, operation.buffer
    if operation.kind is Kind.BARRIER:
        return
    if buffer is None:
        raise ConfigError(f"[{backend}] {operation.kind.value} {name!r} needs a buffer, got none")
    if operation.kind is Kind.BROADCAST:
        if not 0 <= operation.root < size:
            raise ConfigError(
                f"[{backend}] broadcast {name!r}: expected a root in 0..{size - 1}, "
                f"got {operation.root}"
            )
        return
    if buffer.dtype is DType.BOOL and operation.op is ReduceOp.AVERAGE:
        raise ConfigError(
            f"[{backend}] allreduce {name!r}: booleans have no average; use SUM (or) or "
            "PRODUCT (and)"
        )
    scaled = operation.prescale != 1.0 or operation.postscale != 1.0
    if scaled and not buffer.dtype.is_floating:
        raise ConfigError(
            f"[{backend}] allreduce {name!r}: only floating types are scaled, got "
            f"{buffer.dtype.name.lower()}; scale it before or after"
        )


def check_compression(spec: ExchangeSpec, backend: str) -> None:
    """Raise ConfigError when no backend can compress what this exchange sends."""
    if not spec.compression.packs:
        return
    if spec.shared_model:
        raise ConfigError(
            f"[{backend}] compression {spec.compression} with shared_model=True, where gradients "
            "are read in place and nothing is sent; use one of the two"
        )
    for key in spec.keys:
        if key.dtype is not DType.FLOAT32:
            raise ConfigError(
                f"[{backend}] compression {spec.compression} takes float32 gradients; "
                f"{key.name!r} is of {key.dtype.name.lower()}: exchange it in an optimizer of its "
                "own with Compression.none"
            )


def describe(operation: Operation) -> str:
    """What all ranks must have in common for this operation, readable in an error."""
    if operation.buffer is None:
        return operation.kind.value
    shape = f"{operation.buffer.dtype.name.lower()}[{operation.buffer.count}]"
    if operation.kind is Kind.BROADCAST:
        return f"broadcast {shape} from rank {operation.root}"
    text = f"allreduce {shape} {operation.op.name.lower()}"
    if operation.prescale != 1.0 or operation.postscale != 1.0:
        text += f" scaled {operation.prescale} and {operation.postscale}"
    return text


def first_difference(mine: Sequence[str], theirs: Sequence[str], me: str, them: str) -> str:
    """A sentence naming the first line in which two descriptions differ."""
    for index in range(max(len(mine), len(theirs))):
        left = mine[index] if index < len(mine) else "nothing"
        right = theirs[index] if index < len(theirs) else "nothing"
        if left != right:
            return f"entry {index}: {me} has {left}, {them} has {right}"
    return "no difference"
