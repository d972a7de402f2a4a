"""Where gradients stand: parameters as keys of an exchange, and tensors that are views of its
arena."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import numpy as np
import torch

from phub_collective.backends.base import Key
from phub_collective.errors import ConfigError
from phub_collective.torch.tensors import (
    check_host,
    dense_strides,
    exchanged_dtype,
    short_name,
)


def key_of(name: str, parameter: torch.Tensor, group: int) -> Key:
    """The key of a parameter; ConfigError when its gradient cannot be exchanged."""
    what = f"parameter {name!r}"
    check_host(parameter, what)
    return Key(
        name,
        tuple(parameter.shape),
        exchanged_dtype(parameter, what),
        dense_strides(parameter),
        group,
    )


def view(memory: np.ndarray, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """A tensor of `parameter`'s dtype, shape and gradient strides that is a view of `memory` (1-D
    uint8) from byte `offset` on. It has a storage of its own: saving it saves no more than it."""
    with warnings.catch_warnings():
        # Memory that only the other end writes is read-only here; nobody writes this tensor.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(
            memory, dtype=parameter.dtype, count=parameter.numel(), offset=offset
        )
    strides = dense_strides(parameter)
    return flat.as_strided(parameter.shape, strides) if strides else flat.view(parameter.shape)


class Slot:
    """A parameter's place in the arena, and what has become of its gradient in this step.

    `memory` is never handed out. What stands in ``parameter.grad`` is an alias of it, which a user
    or `Module.to` may point elsewhere.

    Attributes:
        index: of the key in the exchange.
        memory: view of the arena with the gradient's shape and strides.
        firings: gradients accumulated since the last exchange.
        pushed: the gradient is being exchanged; its memory must not change.
    """

    def __init__(self, index: int, key: Key, parameter: torch.Tensor, memory: torch.Tensor) -> None:
        self.index, self.key, self.parameter = index, key, parameter
        self.memory = memory
        self.firings = 0
        self.pushed = False
        self._address, self._strides = memory.data_ptr(), memory.stride()
        self._gradient = memory.detach()
        self._layout = (parameter.dtype, parameter.device, parameter.shape, parameter.stride())
        self._version = 0

    def matches(self) -> bool:
        """False when the parameter was cast, moved or laid otherwise since."""
        p = self.parameter
        return (p.dtype, p.device, p.shape, p.stride()) == self._layout

    def place(self, sparse_as_dense: bool) -> None:
        """Bring ``parameter.grad`` into the arena, unless autograd has accumulated it there, and
        make it a view of it.

        With ``p.grad`` None before backward, autograd leaves a tensor of its own here, which is
        copied. create_graph=True replaces the view by a new tensor. `Module.to` and users may
        point the view elsewhere. Only address and strides tell.
        """
        gradient = self.parameter.grad
        assert gradient is not None
        is_sparse = gradient.layout is not torch.strided
        in_arena = not is_sparse and gradient.data_ptr() == self._address
        if in_arena and gradient.stride() == self._strides:
            return
        self._check(gradient, sparse_as_dense)
        source = gradient.detach()
        if is_sparse:
            source = source.to_dense()
        if in_arena:
            source = source.clone()  # a transposed alias
        with torch.no_grad():
            self.memory.copy_(source)
        self.adopt_gradient()

    def _check(self, gradient: torch.Tensor, sparse_as_dense: bool) -> None:
        if gradient.layout is not torch.strided and not sparse_as_dense:
            raise ConfigError(
                f"[torch] the gradient of {self.key.name!r} is sparse; expected a dense one: pass "
                "sparse_as_dense=True to DistributedOptimizer, or sparse=False to the layer"
            )
        if gradient.dtype is not self.memory.dtype or gradient.shape != self.memory.shape:
            raise ConfigError(
                f"[torch] the gradient of {self.key.name!r} is {short_name(gradient.dtype)} "
                f"{tuple(gradient.shape)}; expected {short_name(self.memory.dtype)} "
                f"{tuple(self.memory.shape)}, as its parameter was when this step began"
            )

    def adopt_gradient(self) -> None:
        """Make ``parameter.grad`` the view of the arena."""
        if self._gradient.data_ptr() != self._address:
            self._gradient = self.memory.detach()
        if self.parameter.grad is not self._gradient:
            self.parameter.grad = self._gradient

    def mark_pushed(self) -> None:
        """The exchange has it now."""
        self.pushed = True
        self._version = self.memory._version

    def written_since_push(self) -> bool:
        """Whether torch counted a write to the gradient while it is exchanged."""
        return self.pushed and self.memory._version != self._version

    def reset(self) -> None:
        """A new step begins."""
        self.firings = 0
        self.pushed = False


def slots_of(
    parameters: Iterable[torch.Tensor], keys: list[Key], offsets: list[int], memory: np.ndarray
) -> list[Slot]:
    """A slot for each parameter of an exchange, in the order of its keys."""
    return [
        Slot(index, keys[index], parameter, view(memory, offsets[index], parameter))
        for index, parameter in enumerate(parameters)
    ]
