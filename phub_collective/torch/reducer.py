"""What stands behind a distributed optimizer: its exchange, and the course of a step.

A step begins with its first gradient and ends when all results are there:

    hook of a parameter   counts the gradient; in the last backward pass it is brought into the
                          arena and pushed, while backward goes on
    synchronize           pushes what no hook has pushed (parameters without a gradient are pushed
                          as such), waits for the results; with wait_in_forward it leaves that to
                          the modules that use them next

Opening the exchange anew (parameters were cast, moved, unfrozen or added) and adopting weights
that were changed by hand are collective. They happen in `synchronize`, never inside backward: in
such a step the hooks only count.

Thread contract: none; hooks run where backward was called, for parameters in host memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from phub_collective.backends.base import Exchange, ExchangeSpec, Kind, Operation
from phub_collective.errors import ConfigError
from phub_collective.torch.arena import Slot, key_of, slots_of
from phub_collective.torch.context import Face, face
from phub_collective.torch.modules import before_use
from phub_collective.torch.options import ExchangeCounters, Options
from phub_collective.torch.places import Entries, Groups, Place, ServerPlace, WorkerPlace
from phub_collective.torch.server_state import hyper_of
from phub_collective.torch.shared_model import SharedModelPlace


class Reducer:
    """See the module. Errors of an exchange are final: the ranks are then at different points, so
    every later call raises the same error."""

    def __init__(self, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self.options = options
        self.passes = options.passes
        self.counters = ExchangeCounters()
        self._optimizer = weakref.ref(optimizer)
        self._place: Place = WorkerPlace()
        if options.on_server:
            self._place = SharedModelPlace() if options.shared_model else ServerPlace()
        self._loaded: Entries | None = None  # state that the server shall have
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        self._failed: Exception | None = None
        # the exchange, and how it was opened
        self._face: Face | None = None
        self._exchange: Exchange | None = None
        self._name, self._epoch = "", 0
        self._slots: dict[torch.Tensor, Slot] = {}
        self._unsettled = False  # the last step's results are not all taken:
        self._unread: dict[torch.Tensor, Slot] = {}  # those that are not
        self._watched: list[RemovableHandle] = []  # modules that wait for them
        self._group_indices: list[int] = []
        # this step
        self._begun = False  # a gradient has come
        self._held = False  # hooks only count, see above
        self._reduced = False  # synchronized, and no gradient has come since
        self._in_flight = 0  # keys pushed
        self._start, self._left = 0, 0  # bytes pushed when it began; pushed since, in backward
        self._marked = False  # we shall be told when backward ends

    # ---- the exchange

    def _entries(self) -> list[tuple[str, torch.Tensor, int]]:
        """(name, parameter, group) in the order of the key table, frozen parameters included."""
        optimizer = self._optimizer()
        assert optimizer is not None
        flat = [(p, g) for g, group in enumerate(optimizer.param_groups) for p in group["params"]]
        return [(name, *flat[position]) for name, position in self.options.named]

    @property
    def backend(self) -> str:
        """Name of the exchange's backend; empty while no exchange is open."""
        return "" if self._exchange is None else self._exchange.backend

    def _groups(self) -> Groups:
        optimizer = self._optimizer()
        assert optimizer is not None
        return [optimizer.param_groups[index] for index in self._group_indices]

    def _is_laid(self) -> bool:
        """Whether the exchange fits the parameters as they are now."""
        if self._exchange is None or self._face is not face():
            return False
        for _, parameter, _ in self._entries():
            slot = self._slots.get(parameter)
            if slot is None:
                if parameter.requires_grad and parameter.numel():
                    return False
            elif not slot.matches():
                return False
        return True

    def lay(self) -> None:
        """Open the exchange for the parameters as they are now. Collective.

        Raises:
            ConfigError: a parameter cannot be exchanged.
            MismatchError: the ranks' parameters differ; both sides are named.
        """
        here = face()
        if here is not self._face:
            self._face, self._name, self._epoch = here, here.exchange_name(), 0
        elif self._exchange is not None:
            # The state goes on with the new exchange; rank 0's counts.
            self._loaded = self.state() if here.session.rank == 0 else {}
            self._exchange.close()
            self._epoch += 1
        entries = [one for one in self._entries() if one[1].requires_grad and one[1].numel()]
        if not entries:
            raise ConfigError("[torch] no parameter of the optimizer requires a gradient")
        self._group_indices = sorted({group for _, _, group in entries})
        keys = [key_of(name, p, self._group_indices.index(group)) for name, p, group in entries]
        options = self.options
        self._exchange = exchange = here.session.open_exchange(
            ExchangeSpec(
                self._name if self._epoch == 0 else f"{self._name}@{self._epoch}",
                keys,
                options.op,
                "server" if options.on_server else "worker",
                options.shared_model,
                options.bucket_bytes or here.session.config.bucket_bytes,
                options.prescale,
                options.postscale,
                self._state_arrays(),
                options.deterministic,
                options.staleness,
                options.wait_in_forward,
                compression=options.compression,
            ),
            options.backend,
        )
        parameters = [parameter for _, parameter, _ in entries]
        slots = slots_of(parameters, keys, exchange.offsets, exchange.arena)
        self._slots = dict(zip(parameters, slots, strict=True))
        self._opened(exchange)
        for parameter in parameters:
            if parameter not in self._hooks:
                hook = _hook(weakref.WeakMethod(self._on_gradient))
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)
        if options.wait_in_forward:
            for handle in self._watched:
                handle.remove()
            self._watched = before_use(parameters, weakref.WeakMethod(self.take))

    def _adopt_weights(self) -> None:
        """Make weights that were changed by hand everybody's. Collective."""
        assert self._face is not None
        assert self._exchange is not None
        # Who comes here alone learns it from the name of this operation.
        barrier = Operation(Kind.BARRIER, f"{self._name}: weights were changed by hand")
        self._face.session.submit(barrier).wait()
        self._opened(self._exchange)

    def _opened(self, exchange: Exchange) -> None:
        slots = list(self._slots.values())
        self._place.opened(exchange, slots, self._groups(), self._loaded)
        self._loaded = None

    def _state_arrays(self) -> int:
        if not self.options.on_server:
            return 0
        return max(hyper_of(group).state_arrays for group in self._groups())

    def state(self) -> Entries:
        """The optimizer's state by parameter, where the server has it. Not collective.

        Raises:
            ConfigError: a step has begun.
        """
        self.settle()
        if self._loaded is not None:
            return self._loaded
        if self._exchange is None:
            return {}
        if self._in_flight:
            raise ConfigError(
                "[torch] the optimizer's state is on the server, which has begun to change it: "
                "call state_dict() before backward() or after step()"
            )
        return self._place.state(self._exchange, list(self._slots.values()), self._groups())

    def load_state(self, entries: Entries) -> None:
        """What the server's state shall be from the next step on; collective then, and rank 0's
        counts."""
        self._loaded = entries

    # ---- a step

    def _begin(self) -> None:
        self.settle()
        self._begun, self._reduced = True, False
        changed = self._loaded is not None or self._place.changed(list(self._slots.values()))
        self._held = changed or not self._is_laid()
        if not self._held:
            self._open_step()

    def _open_step(self) -> None:
        assert self._exchange is not None
        self._place.begin(self._exchange, self._groups())
        self._start, self._left = self._exchange.counters.pushed, 0

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self.raise_if_failed()
        face()
        try:
            if not self._begun:
                self._begin()
            slot = self._slots.get(parameter)
            if slot is None:
                return  # `synchronize` will find it
            if slot.pushed:
                raise ConfigError(self._second_gradient(slot))
            slot.firings += 1
            if slot.firings >= self.passes and not self._held:
                self._push(slot)
                self._mark_backward()
        except Exception as error:
            self._failed = error
            raise

    def _second_gradient(self, slot: Slot) -> str:
        return (
            f"[torch] parameter {slot.key.name!r} got gradient {slot.firings + 1} of a step; "
            f"expected {self.passes}, after which it was sent. Call optimizer.step() or "
            "optimizer.zero_grad() after each backward(), or set backward_passes_per_step to the "
            "number of gradients (each segment of a reentrant checkpoint gives one; "
            "use_reentrant=False gives one in all)"
        )

    def _push(self, slot: Slot) -> None:
        assert self._exchange is not None
        if slot.parameter.grad is None:
            self._exchange.push(slot.index, no_grad=True)
        else:
            slot.place(self.options.sparse_as_dense)
            self._exchange.push(slot.index)
        slot.mark_pushed()
        self._in_flight += 1

    def synchronize(self) -> None:
        """Finish the step's exchange; does nothing when that was done already.

        Raises:
            PeerLost, PeerTimeout, MismatchError, ProtocolError: of the exchange.
            ConfigError: gradients or hyperparameters were changed while they were exchanged.
        """
        self.raise_if_failed()
        face()
        if self._reduced:
            return
        try:
            self._finish_step()
        except Exception as error:
            self._failed = error
            raise

    def _finish_step(self) -> None:
        if not self._begun:
            self._begin()
        if self._held:
            if self._is_laid():
                self._adopt_weights()
            else:
                self.lay()
            self._open_step()
        assert self._exchange is not None
        slots = list(self._slots.values())
        self._place.check(self._groups())
        for slot in slots:
            if not slot.pushed:
                self._push(slot)
        self._check_unchanged(slots)
        if self.options.wait_in_forward:
            for slot in slots:
                slot.parameter.grad = None  # its memory is being exchanged
            self._unread, self._unsettled = dict(self._slots), True
            face().unsettled.add(self)
        else:
            self._exchange.wait()
            self._check_unchanged(slots)
            self._place.finish(self._exchange, slots)
            self._count()
        self._reset()
        self._reduced = True

    def take(self, parameters: Iterable[torch.Tensor]) -> None:
        """Wait for the last step's results of these parameters, and take them."""
        for parameter in parameters:
            slot = self._unread.get(parameter)
            if slot is None:
                continue
            self.raise_if_failed()
            assert self._exchange is not None
            try:
                self._exchange.wait_key(slot.index)
                self._place.finish(self._exchange, [slot])
            except Exception as error:
                self._failed = error
                raise
            del self._unread[parameter]

    def settle(self) -> None:
        """Take all results of the last step that nobody has taken yet."""
        if not self._unsettled:
            return
        self.take(list(self._unread))
        assert self._exchange is not None
        self._exchange.wait()  # for nothing: it ends the exchange's step
        self._unsettled = False
        self._count()

    def _check_unchanged(self, slots: list[Slot]) -> None:
        for slot in slots:
            if slot.written_since_push():
                raise ConfigError(
                    f"[torch] the gradient of {slot.key.name!r} was changed after it was sent "
                    "(clipped, or unscaled?); call optimizer.synchronize() before that"
                    + (", which needs optimizer_place='worker'" if self.options.on_server else "")
                )

    def _reset(self) -> None:
        for slot in self._slots.values():
            slot.reset()
        self._begun = self._held = self._reduced = self._marked = False
        self._in_flight = 0

    def drop(self) -> None:
        """Forget this step: finish what is being exchanged, and begin a new one."""
        self.raise_if_failed()
        if self._in_flight:
            if self.options.on_server:
                raise ConfigError(
                    "[torch] zero_grad() between backward() and step(), but the server applies "
                    "gradients as they come; use optimizer_place='worker' to skip steps (as "
                    "GradScaler does), and freeze parameters (requires_grad_(False)) where their "
                    "gradients are not wanted"
                )
            self.synchronize()
        self._reset()

    def stepped(self) -> None:
        """The optimizer has used the results."""
        self._reset()

    def require_settled(self) -> None:
        """Raise ConfigError while gradients are being exchanged."""
        if self._in_flight:
            raise ConfigError(
                "[torch] step() inside skip_synchronize() while gradients are being exchanged; "
                "call optimizer.synchronize() first"
            )

    def raise_if_failed(self) -> None:
        """Raise the error that ended the exchange, if one did."""
        if self._failed is not None:
            raise self._failed

    # ---- counting

    def _mark_backward(self) -> None:
        """Note what has been pushed when this backward pass ends."""
        if self._marked:
            return
        self._marked = True
        ended = weakref.WeakMethod(self._backward_ended)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _call(ended))

    def _backward_ended(self) -> None:
        self._marked = False
        if self._exchange is not None:
            self._left = self._exchange.counters.pushed - self._start

    def _count(self) -> None:
        assert self._exchange is not None
        before, pushed = self.counters, self._exchange.counters.pushed - self._start
        self.counters = ExchangeCounters(
            before.bytes_total + pushed,
            before.bytes_in_backward + self._left,
            before.steps + 1,
        )


def _call(method: weakref.WeakMethod[Callable[..., Any]], *args: Any) -> None:
    target = method()
    if target is not None:
        target(*args)


def _hook(method: weakref.WeakMethod[Callable[..., Any]]) -> Callable[[torch.Tensor], None]:
    """A hook that dies with its reducer: a parameter may outlive its optimizer."""
    return lambda parameter: _call(method, parameter)
