"""What all backends ask of an operation: is it valid, and how is it described to the others."""

from __future__ import annotations

from collections.abc import Sequence

from phub_collective.backends.base import DType, Kind, Operation, ReduceOp
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
