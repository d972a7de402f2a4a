"""Parameters that are the PBox's memory: new weights are read where the core wrote them.

`Exchange.result` is one of two buffers in turn, so after each exchange the parameters are pointed
at the other one. Autograd is told of it, since a graph that saved the old weights would else
compute a wrong gradient without an error.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from phub_collective.backends.base import Exchange
from phub_collective.torch.arena import Slot, view
from phub_collective.torch.context import face, is_initialized
from phub_collective.torch.modules import modules_of
from phub_collective.torch.places import Entries, Groups, ServerPlace
from phub_collective.torch.tensors import count_write


class SharedModelPlace(ServerPlace):
    """As `ServerPlace`, with parameters that are views of ``exchange.result``."""

    def __init__(self) -> None:
        super().__init__()
        self._views: dict[int, list[torch.Tensor]] = {}  # by address of the result buffer
        self._known: set[int] = set()  # parameters whose modules return copies

    def opened(
        self, exchange: Exchange, slots: Sequence[Slot], groups: Groups, loaded: Entries | None
    ) -> None:
        self._views.clear()
        super().opened(exchange, slots, groups, loaded)
        parameters = {id(slot.parameter) for slot in slots}
        if not parameters <= self._known:
            copy_in_state_dict(parameters)
            self._known = parameters

    def _write(self, exchange: Exchange, slots: Sequence[Slot]) -> None:
        address = exchange.result.ctypes.data
        if address not in self._views:
            self._views[address] = [
                view(exchange.result, exchange.offsets[slot.index], slot.parameter)
                for slot in slots
            ]
        for slot, weights in zip(slots, self._views[address], strict=True):
            slot.parameter.data = weights
            count_write(slot.parameter)


def copy_in_state_dict(parameters: Collection[int]) -> None:
    """Make state_dict() of the modules that own `parameters` (ids) return copies: a view would
    change with every second step, and keep the whole arena alive. The hooks stay for as long as
    the modules do, since their parameters stay views."""
    for module in modules_of(parameters):
        if _copy_entries not in module.__dict__.get("_state_dict_hooks", {}).values():
            module.register_state_dict_post_hook(_copy_entries)


def _copy_entries(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object
) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        entry = state_dict.get(prefix + name)
        if isinstance(entry, torch.Tensor) and entry is not parameter:  # keep_vars=True
            copy = entry.detach().clone()
            state_dict[prefix + name] = copy
            if is_initialized():
                face().parameter_of_copy[copy] = parameter
