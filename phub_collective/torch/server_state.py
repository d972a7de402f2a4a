"""A server optimizer's state as torch has it, and back.

In a torch optimizer's state_dict() each parameter's entry holds tensors of its shape ("exp_avg",
...) and the number of steps; on the server they are flat arrays that are laid as the parameter's
key. An entry of a 16-bit parameter holds one tensor more, MASTER: its weights in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from phub_collective.backends.base import SGD, Adam, Hyper, KeyState
from phub_collective.errors import ConfigError
from phub_collective.torch.arena import Slot

MASTER = "phub_master_weights"
Entry = Mapping[str, Any]  # a parameter's part of a state_dict


def hyper_of(group: dict[str, Any]) -> Hyper:
    """The hyperparameters in an optimizer's parameter group."""
    if "betas" not in group:
        return SGD(
            float(group["lr"]),
            float(group["momentum"]),
            float(group["dampening"]),
            float(group["weight_decay"]),
            bool(group["nesterov"]),
            bool(group["maximize"]),
        )
    beta1, beta2 = group["betas"]
    return Adam(
        float(group["lr"]),
        (float(beta1), float(beta2)),
        float(group["eps"]),
        float(group["weight_decay"]),
        bool(group["amsgrad"]),
        bool(group["maximize"]),
        bool(group["decoupled_weight_decay"]),
    )


def _names(hyper: Hyper) -> list[str]:
    """What torch calls the arrays of state of a rule."""
    if isinstance(hyper, SGD):
        return ["momentum_buffer"]
    return ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"][: hyper.state_arrays]


def to_entry(state: KeyState, slot: Slot, hyper: Hyper) -> dict[str, Any]:
    """The entry of a parameter; empty when the server has no state of it yet."""
    entry: dict[str, Any] = {}
    if state.taken > 0:
        arrays = zip(_names(hyper), state.arrays, strict=False)
        entry = {name: _shaped(array, slot) for name, array in arrays}
        if isinstance(hyper, Adam):
            entry["step"] = torch.tensor(float(state.taken))
    if state.weights is not None:
        entry[MASTER] = _shaped(state.weights, slot)
    return entry


def from_entry(entry: Entry, slot: Slot, hyper: Hyper) -> KeyState:
    """What the server shall have of a parameter.

    Raises:
        ConfigError: the entry is not that of this rule, or of another shape.
    """
    names = _names(hyper)
    there = [entry.get(name) is not None for name in names]
    master = entry.get(MASTER)
    weights = None if master is None else _flat(master, slot, MASTER)
    if not any(there):
        return KeyState(0, [], weights)
    if not all(there):
        raise ConfigError(
            f"[torch] state of {slot.key.name!r}: expected {', '.join(names)}, got "
            f"{', '.join(map(str, entry))}; load the state of the same optimizer"
        )
    arrays = [_flat(entry[name], slot, name) for name in names]
    # SGD counts no steps: the momentum is there, so it has been set.
    return KeyState(int(entry.get("step", 1)), arrays, weights)


def entries_of(
    states: Sequence[KeyState], slots: Sequence[Slot], groups: Sequence[dict[str, Any]]
) -> dict[torch.Tensor, dict[str, Any]]:
    """The entries of all parameters that have any. `groups`: by the keys' group."""
    entries = {
        slot.parameter: to_entry(state, slot, hyper_of(groups[slot.key.group]))
        for state, slot in zip(states, slots, strict=True)
    }
    return {parameter: entry for parameter, entry in entries.items() if entry}


def _shaped(array: np.ndarray, slot: Slot) -> torch.Tensor:
    """As the parameter is laid."""
    flat = torch.from_numpy(array)
    if slot.key.strides:
        return flat.as_strided(slot.key.shape, slot.key.strides)
    return flat.view(slot.key.shape)


def _flat(tensor: torch.Tensor, slot: Slot, name: str) -> np.ndarray:
    """As the key is laid, in the type of the server's arrays."""
    if tuple(tensor.shape) != slot.key.shape:
        raise ConfigError(
            f"[torch] {name} of {slot.key.name!r}: expected shape {slot.key.shape}, "
            f"got {tuple(tensor.shape)}"
        )
    wide = np.dtype("float64") if slot.key.dtype.itemsize == 8 else np.dtype("float32")
    flat = np.empty(slot.key.count, wide)
    _shaped(flat, slot).copy_(tensor.detach())
    return flat
