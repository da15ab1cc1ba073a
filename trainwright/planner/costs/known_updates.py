"""The update at the end of a simulated step, followed once for all plans of one problem whose rank updates the same parts.

An update sees parameters, gradients and states, whatever the forward and the backward kept, recomputed or sent. So what it
holds is the same in every plan with the same parts, at the top of what else is alive then. A search simulates dozens of plans
of one sharding, and the update takes 5 to 25 % of a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ...artifacts import UserError
from ...profiler.tracker import Excursion, MemoryTracker
from ...torch_internals.private import VALUE_NEEDED

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""A function from named parameters to their optimizer."""
_Parts = tuple[object, ...]
"""What tells one rank's parts of the parameters, and what the optimizer holds beside them, from others."""


class OtherGradientsError(Exception):
    """The states of an update are known, and it was not followed with such gradients; simulate again, which follows it."""


@dataclass(eq=False)
class KnownUpdates:
    """What the updates hold that were followed, by the parts that they update."""

    state_bytes: dict[_Parts, int] = field(default_factory=dict)
    """The bytes of the optimizer's states once it has stepped."""
    steps: dict[tuple[_Parts, _Parts], Excursion] = field(default_factory=dict)
    """What a later step holds at most beyond those, by the parts and their gradients."""


class Update:
    """The optimizer of one simulated step, or what is known of it from another plan's."""

    def __init__(
        self,
        make_optimizer: MakeOptimizer,
        params: Sequence[tuple[str, nn.Parameter]],
        tracker: MemoryTracker,
        held_bytes: int = 0,
        known: KnownUpdates | None = None,
    ) -> None:
        """Make the optimizer of named parameters; held_bytes: what it holds in each step beside what its kernels allocate."""
        self._params, self._tracker, self._known = params, tracker, known
        shapes = ((name, tuple(param.shape), param.stride(), param.dtype) for name, param in params)
        self._parts: _Parts = (tracker.target, held_bytes, *shapes)
        self._state_bytes = None if known is None else known.state_bytes.get(self._parts)
        self.optimizer = None if self._state_bytes is not None else make_optimizer(params)
        """None where what it holds is known."""
        if self.optimizer is not None:
            _hold_while_stepping(self.optimizer, held_bytes)

    def warm_up(self, without: Sequence[torch.Tensor] = ()) -> None:
        """Run one update with empty gradients, so that the optimizer's states exist, but those of `without`."""
        if self.optimizer is None:
            assert self._state_bytes is not None
            self._tracker.hold(self._state_bytes, "optimizer")
            return
        before = self._tracker.live_breakdown["optimizer"]
        _warm_up(self.optimizer, self._tracker, without)
        self._state_bytes = self._tracker.live_breakdown["optimizer"] - before

    def step(self) -> None:
        """Count the update; `OtherGradientsError` where it is neither known with such gradients nor can be followed."""
        with self._tracker.phase("update"):
            if self._known is None:
                assert self.optimizer is not None
                self.optimizer.step()
                return
            key = self._parts, tuple(_gradient(param) for _, param in self._params)
            if key in self._known.steps:
                self._tracker.repeat(self._known.steps[key])
            elif self.optimizer is None:
                del self._known.state_bytes[self._parts]
                raise OtherGradientsError
            else:
                with self._tracker.excursion() as found:
                    self.optimizer.step()
                if found.leaves_nothing:
                    assert self._state_bytes is not None
                    self._known.state_bytes[self._parts] = self._state_bytes
                    self._known.steps[key] = found


def _gradient(param: nn.Parameter) -> object:
    grad = param.grad
    return None if grad is None else (tuple(grad.shape), grad.stride(), grad.dtype)


def _hold_while_stepping(optimizer: torch.optim.Optimizer, num_bytes: int) -> None:
    held: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(lambda *_: held.append(torch.empty(num_bytes, dtype=torch.uint8)))
    optimizer.register_step_post_hook(lambda *_: held.clear())


def _warm_up(optimizer: torch.optim.Optimizer, tracker: MemoryTracker, without: Sequence[torch.Tensor]) -> None:
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if all(param is not other for other in without):
            param.grad = torch.empty_like(param)
    with tracker.phase("update"):
        try:
            optimizer.step()
        except VALUE_NEEDED:
            raise UserError(
                f"an optimizer that decides by shapes alone is needed to plan; {type(optimizer).__name__} reads the values "
                "of its tensors; choose another, such as adamw or sgd"
            ) from None
    optimizer.zero_grad(set_to_none=True)
