"""Where the optimizer runs: what the result of an exchange is, and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from phub_collective.backends.base import Exchange, Hyper
from phub_collective.errors import ConfigError
from phub_collective.torch.arena import Slot
from phub_collective.torch.server_state import Entry, entries_of, from_entry, hyper_of

Entries = Mapping[torch.Tensor, Entry]
Groups = Sequence[dict[str, Any]]


class Place(Protocol):
    """What differs between the places; called by `Reducer`, at the same points on every rank."""

    def opened(
        self, exchange: Exchange, slots: Sequence[Slot], groups: Groups, loaded: Entries | None
    ) -> None:
        """The exchange is new, or weights were changed by hand: make them everybody's. `loaded`:
        the optimizer's state that goes with them; None: it stays as it is."""

    def state(self, exchange: Exchange, slots: Sequence[Slot], groups: Groups) -> Entries:
        """The optimizer's state, where the exchange has it."""

    def changed(self, slots: Sequence[Slot]) -> bool:
        """Whether weights were changed by hand, so that `opened` must be called again."""

    def begin(self, exchange: Exchange, groups: Groups) -> None:
        """Before the first push of a step. `groups`: those of the optimizer that have keys."""

    def check(self, groups: Groups) -> None:
        """Before the results of a step are waited for."""

    def finish(self, exchange: Exchange, slots: Sequence[Slot]) -> None:
        """The results of a step have come, of these slots."""


class WorkerPlace:
    """The optimizer runs in the worker: the result is the reduced gradient, which stands where
    the gradient stood."""

    def opened(
        self, exchange: Exchange, slots: Sequence[Slot], groups: Groups, loaded: Entries | None
    ) -> None:
        pass

    def state(self, exchange: Exchange, slots: Sequence[Slot], groups: Groups) -> Entries:
        return {}

    def changed(self, slots: Sequence[Slot]) -> bool:
        return False

    def begin(self, exchange: Exchange, groups: Groups) -> None:
        pass

    def check(self, groups: Groups) -> None:
        pass

    def finish(self, exchange: Exchange, slots: Sequence[Slot]) -> None:
        for slot in slots:
            # As in Horovod, a parameter without a gradient gets the other ranks', or zeros; one
            # that was frozen since is left alone.
            if slot.parameter.requires_grad or slot.parameter.grad is not None:
                slot.adopt_gradient()


class ServerPlace:
    """The optimizer runs on the server: the result is the new weights, which are copied into the
    parameters. Gradients are not kept."""

    def __init__(self) -> None:
        self._sent: list[Hyper] = []
        self._seen: dict[torch.Tensor, tuple[int, int]] = {}

    def opened(
        self, exchange: Exchange, slots: Sequence[Slot], groups: Groups, loaded: Entries | None
    ) -> None:
        with torch.no_grad():
            for slot in slots:
                slot.memory.copy_(slot.parameter)
        state = None
        if loaded is not None:
            state = [
                from_entry(loaded.get(slot.parameter, {}), slot, hyper_of(groups[slot.key.group]))
                for slot in slots
            ]
        exchange.initialize(state=state)
        self._take_weights(exchange, slots)

    def state(self, exchange: Exchange, slots: Sequence[Slot], groups: Groups) -> Entries:
        return entries_of(exchange.read_state(), slots, groups)

    def changed(self, slots: Sequence[Slot]) -> bool:
        return any(_fingerprint(slot.parameter) != self._seen.get(slot.parameter) for slot in slots)

    def begin(self, exchange: Exchange, groups: Groups) -> None:
        self._sent = [hyper_of(group) for group in groups]
        exchange.set_hyper(self._sent)

    def check(self, groups: Groups) -> None:
        now = [hyper_of(group) for group in groups]
        if now != self._sent:
            raise ConfigError(
                f"[torch] hyperparameters changed from {self._sent} to {now} between a step's "
                "first gradient and step(); the server has begun to apply the former: change them "
                "(scheduler.step()) after optimizer.step(), or use optimizer_place='worker'"
            )

    def finish(self, exchange: Exchange, slots: Sequence[Slot]) -> None:
        self._take_weights(exchange, slots)
        for slot in slots:
            slot.parameter.grad = None  # its memory holds weights now, or will

    def _take_weights(self, exchange: Exchange, slots: Sequence[Slot]) -> None:
        self._write(exchange, slots)
        self._seen.update({slot.parameter: _fingerprint(slot.parameter) for slot in slots})

    def _write(self, exchange: Exchange, slots: Sequence[Slot]) -> None:
        """Give the parameters the weights in ``exchange.result``."""
        with torch.no_grad():
            for slot in slots:
                slot.parameter.copy_(slot.memory)  # the result stands in the arena


def _fingerprint(parameter: torch.Tensor) -> tuple[int, int]:
    """Changes when torch counts a write to a parameter, or its data is elsewhere. Writes through
    ``p.data`` or NumPy are not counted."""
    return parameter._version, parameter.data_ptr()


def check_server_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ConfigError unless the server can run `optimizer`."""
    known = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    if type(optimizer) not in known:
        raise ConfigError(
            f"[torch] optimizer_place='server' with {type(optimizer).__name__}; the server runs "
            "torch.optim.SGD, Adam and AdamW: use one of them, or optimizer_place='worker'"
        )
    if any(group["differentiable"] for group in optimizer.param_groups):
        raise ConfigError(
            "[torch] optimizer_place='server' with differentiable=True; a graph does not go "
            "through the server: use optimizer_place='worker'"
        )
