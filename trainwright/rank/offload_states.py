"""Keeps optimizer states off the device except while their own parameter is updated.

    between steps   none of the states is on the device
    the step        updates one parameter after another: its states are read back, it is updated, they are written out;
                    meanwhile the previous parameter's states are being written, and the next one's are being read

Two buffers alternate: the next parameter's states are read into the one that the previous parameter's states leave. So
the states of at most two parameters are on the device, however slow the store is, for which a step waits. The
simulation and the run share this code, each with its own store.

The optimizer has to update each parameter from its own gradient and states alone (`updates_alone`). It is found at its
first step, by a hook that torch calls before every optimizer's step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from ..artifacts import UserError
from .offload import OffloadStore
from .step_hooks import before_each_step

_ALIGNMENT = 64
"""The alignment in bytes of each state within a buffer, which suits every dtype."""
_NOT_ALONE = {"LBFGS", "SparseAdam"}
"""The optimizers of torch that update all parameters together, or take sparse gradients, which plans do not have."""
State = dict[str, Any]
Owner = tuple[dict[str, Any], Tensor]
"""A parameter, after the parameter group that it belongs to."""


def updates_alone(optimizer: Optimizer) -> bool:
    """Return True if the update of each parameter reads no other one.

    The class says so by an attribute of this name; torch's own optimizers, but for `_NOT_ALONE`, need none.
    """
    kind = type(optimizer)
    of_torch = kind.__module__.split(".")[:2] == ["torch", "optim"] and kind.__name__ not in _NOT_ALONE
    return bool(getattr(optimizer, "updates_alone", of_torch))


@dataclass(frozen=True)
class _Away:
    """A state in the store, with all that is needed to make the same tensor from its bytes."""

    ticket: Any
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    wrap: Callable[[Tensor], Tensor] | None
    """Makes the `DTensor` of the rank's part; None for a plain tensor."""

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def room_bytes(self) -> int:
        """Return the bytes that the state takes in a buffer."""
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT

    def of(self, flat: Tensor) -> Tensor:
        """Return the state whose elements are `flat`."""
        local = flat.as_strided(self.shape, self.stride, flat.storage_offset())
        return local if self.wrap is None else self.wrap(local)


@dataclass(eq=False)
class _Held:
    """The states of one optimizer in the store: by parameter, its states by name, in order; None marks one that stays."""

    states: dict[Tensor, dict[str, _Away | None]] = field(default_factory=dict)

    def room_bytes(self, param: Tensor) -> int:
        return sum(away.room_bytes for away in self.states.get(param, {}).values() if away is not None)


class StateOffload:
    """Keeps the optimizer states of `params` in `store`, whichever optimizer updates them, and whenever that is made.

    States that `load_state_dict` puts on the device are offloaded by the next update. The first step raises `UserError`
    for an optimizer that cannot update parameters one by one.
    """

    def __init__(self, store: OffloadStore, params: Iterable[Tensor]) -> None:
        self.store, self.params = store, frozenset(params)
        self._held: weakref.WeakKeyDictionary[Optimizer, _Held] = weakref.WeakKeyDictionary()
        self._is_stepping = False
        self._hook = before_each_step(self._before_step)

    def close(self) -> None:
        """Stop offloading: optimizers step as usual from here on."""
        self._hook.remove()

    def whole(self, optimizer: Optimizer, param: Tensor, read: bool = True) -> State:
        """Return the states of `param`, copied to the device; without `read` their contents are undefined."""
        held = self._held.get(optimizer)
        state: State = optimizer.state.get(param, {})
        if held is None or param not in held.states:
            return state
        return {
            name: state[name] if away is None else self._copy(away, read) for name, away in held.states[param].items()
        }

    def send_off(self, optimizer: Optimizer, param: Tensor) -> None:
        """Offload the states of `param` if it is one of `params`; return when they have been written."""
        if param in self.params:
            held = self._of(optimizer)
            _wait(self.store, _leave(self.store, optimizer, held, param))

    def forget(self, optimizer: Optimizer) -> None:
        """Drop the stored states of `optimizer`, which has been given others."""
        self._of(optimizer).states.clear()

    def _copy(self, away: _Away, read: bool) -> Tensor:
        flat = torch.empty(away.shape.numel(), dtype=away.dtype, device=away.device)
        if read:
            self.store.read(away.ticket, flat)
            self.store.arrived(away.ticket)
        return away.of(flat)

    # An optimizer's step

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the arguments of the step, so that it has no parameters and does nothing but call a closure of ours.

        Hooks, schedulers and scalers around the step then see one step of the optimizer itself, and the user's closure
        runs where it would without us.
        """
        params = {param for group in optimizer.param_groups for param in group["params"]}
        if self._is_stepping or self.params.isdisjoint(params):
            return None
        check_updates_alone(optimizer)
        given = dict(zip(("closure",), args[1:])) | kwargs
        closure = given.pop("closure", None)
        if given or len(args) > 2:
            raise UserError(
                f"a step that takes a closure or nothing is needed where optimizer states are offloaded; that of "
                f"{type(optimizer).__name__} got more; plan with --pin '*=state-keep'"
            )
        step = type(optimizer).step
        step = getattr(step, "__wrapped__", step)  # without the hooks, which torch has put around the step
        return (with_groups(optimizer, []), partial(self._step, optimizer, step, closure)), {}

    def _step(self, optimizer: Optimizer, step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        loss = None if closure is None else closure()
        self._is_stepping = True
        try:
            with torch.no_grad():
                _Update(self.store, optimizer, step, self._of(optimizer), self.params).run()
        finally:
            self._is_stepping = False
        return loss

    def _of(self, optimizer: Optimizer) -> _Held:
        if optimizer not in self._held:
            self._held[optimizer] = _Held()
            own = weakref.ref(self)
            optimizer.register_state_dict_post_hook(partial(_completed, own))
            optimizer.register_load_state_dict_post_hook(partial(_forgotten, own))
        return self._held[optimizer]


class _Update:
    """One step of an optimizer, which updates one parameter after another."""

    def __init__(
        self,
        store: OffloadStore,
        optimizer: Optimizer,
        step: Callable[..., Any],
        held: _Held,
        params: frozenset[Tensor],
    ) -> None:
        self.store, self.optimizer, self.step, self.held = store, optimizer, step, held
        owners = [(group, param) for group in optimizer.param_groups for param in group["params"]]
        self.due: list[Owner] = [owner for owner in owners if owner[1] in params and owner[1].grad is not None]
        away = {id(param) for _, param in self.due}
        self.others = [
            {**group, "params": [param for param in group["params"] if id(param) not in away]}
            for group in optimizer.param_groups
        ]
        self.buffers = [self._buffer(self.due[first::2]) for first in (0, 1)]
        self.coming: dict[Tensor, dict[str, Tensor]] = {}

    def run(self) -> None:
        self._send_for(0)
        self._step(self.others)
        leaving: list[Sent] = []
        for place, (group, param) in enumerate(self.due):
            self._send_for(place + 1)
            self._take_back(param)
            self._step([{**group, "params": [param]}])
            _wait(self.store, leaving)  # before more leaves, and before the next ones come into that buffer's place
            leaving = _leave(self.store, self.optimizer, self.held, param)
        _wait(self.store, leaving)

    def _step(self, groups: Sequence[dict[str, Any]]) -> None:
        groups = [group for group in groups if group["params"]]
        if groups:
            self.step(with_groups(self.optimizer, groups))

    def _buffer(self, owners: Sequence[Owner]) -> Tensor | None:
        """Return a buffer for the states of any one of `owners`; None in a first step, which makes the states."""
        room_bytes = max((self.held.room_bytes(param) for _, param in owners), default=0)
        # Made of a parameter, on its device, and in a simulation as much a fake as it is.
        return _local(owners[0][1]).new_empty(room_bytes, dtype=torch.uint8) if room_bytes else None

    def _send_for(self, place: int) -> None:
        """Begin to read the states of parameter `place` into its buffer.

        The states that were in that buffer may still be leaving it: the store carries transfers out in order.
        """
        if place >= len(self.due):
            return
        param, buffer = self.due[place][1], self.buffers[place % 2]
        flats, begin = {}, 0
        for name, away in self.held.states.get(param, {}).items():
            if away is not None and buffer is not None:
                flats[name] = buffer[begin : begin + away.num_bytes].view(away.dtype)
                self.store.read(away.ticket, flats[name])
                begin += away.room_bytes
        self.coming[param] = flats

    def _take_back(self, param: Tensor) -> None:
        """Wait for the states of `param` and give them to the optimizer, in their original order."""
        flats = self.coming.pop(param)
        states = self.held.states.pop(param, None)
        if states is None:
            return
        kept = self.optimizer.state[param]
        whole = {}
        for name, away in states.items():
            if away is not None:
                self.store.arrived(away.ticket)
                whole[name] = away.of(flats[name])
            else:
                whole[name] = kept[name]
        kept.clear()
        kept.update(whole)


Sent = tuple[Any, Tensor]
"""A ticket, with the tensor that is being written, which has to live until that is done."""


def _leave(store: OffloadStore, optimizer: Optimizer, held: _Held, param: Tensor) -> list[Sent]:
    """Remove the states of `param` from the optimizer, and begin to write them to the store."""
    state = optimizer.state.get(param, {})
    sent: list[Sent] = []
    found: dict[str, _Away | None] = {}
    for name, value in state.items():
        found[name] = None
        if _can_leave(value, param):
            local = _local(value)
            flat = local.detach().as_strided((local.numel(),), (1,), local.storage_offset())
            ticket = store.write(flat)
            sent.append((ticket, flat))
            found[name] = _Away(ticket, local.shape, local.stride(), local.dtype, local.device, _wrapper(value))
    for name, away in found.items():
        if away is not None:
            del state[name]
    if sent:
        held.states[param] = found
    return sent


def _wait(store: OffloadStore, sent: list[Sent]) -> None:
    """Wait until these tensors are written, and release them."""
    for ticket, _ in sent:
        store.written(ticket)
    sent.clear()


def _can_leave(value: Any, param: Tensor) -> bool:
    """Return True for a tensor with dims, without gaps, on its parameter's device; counters stay where they are."""
    if not isinstance(value, Tensor):
        return False
    local = _local(value)
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(local.shape, local.stride()))
    return local.dim() > 0 and 0 < local.numel() == spanned and local.device == _local(param).device


def _wrapper(value: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return the function that makes a `DTensor` like `value` from this rank's part; None for a plain tensor."""
    if not hasattr(value, "to_local"):
        return None
    place = {"run_check": False, "shape": value.shape, "stride": value.stride()}
    return partial(type(value).from_local, device_mesh=value.device_mesh, placements=value.placements, **place)  # type: ignore[attr-defined]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def with_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer that shares the state of `optimizer` and has other parameter groups."""
    other: Optimizer = object.__new__(type(optimizer))
    other.__dict__.update(optimizer.__dict__, param_groups=groups)
    return other


def check_updates_alone(optimizer: Optimizer) -> None:
    """Raise `UserError` for an optimizer whose states cannot come and go parameter by parameter."""
    if not updates_alone(optimizer):
        name = type(optimizer).__name__
        raise UserError(
            f"an optimizer that updates each parameter by itself is needed where a plan keeps its states off the device; {name} "
            "does not, or does not say so; take AdamW or SGD, plan with --pin '*=state-keep', or, where it does, set "
            f"{name}.updates_alone = True"
        )


def _completed(own: weakref.ref[StateOffload], optimizer: Optimizer, found: dict[str, Any]) -> None:
    """Complete the result of `state_dict` with copies of the stored states."""
    offload = own()
    if offload is None:
        return
    params: Iterator[Tensor] = (param for group in optimizer.param_groups for param in group["params"])
    for index, param in enumerate(params):
        if index in found["state"]:
            found["state"][index] = offload.whole(optimizer, param)


def _forgotten(own: weakref.ref[StateOffload], optimizer: Optimizer) -> None:
    """Drop the stored states after `load_state_dict`, which has replaced them."""
    offload = own()
    if offload is not None:
        offload.forget(optimizer)
