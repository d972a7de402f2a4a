"""The modules of parameters: an optimizer is given parameters, which do not know theirs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


def modules_of(parameters: Collection[int]) -> list[torch.nn.Module]:
    """All modules of the process that own one of `parameters` (ids) themselves."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    return [
        module
        for module in modules
        if any(id(one) in parameters for one in module.__dict__.get("_parameters", {}).values())
    ]


def before_use(
    parameters: Collection[torch.Tensor],
    wait: weakref.WeakMethod[Callable[[Iterable[torch.Tensor]], None]],
) -> list[RemovableHandle]:
    """Call `wait` with a module's own parameters before its forward and its state_dict()."""

    def hook(module: torch.nn.Module, *_: Any) -> None:
        target = wait()
        if target is not None:
            target(module.parameters(recurse=False))

    handles = []
    for module in modules_of({id(parameter) for parameter in parameters}):
        handles.append(module.register_forward_pre_hook(hook, prepend=True))
        handles.append(module.register_state_dict_pre_hook(hook))
    return handles
