"""torch's optimizers on the shards of a plan: each rank runs torch's own step on its parts, as plain tensors.

a step       parts of parameters, gradients and states → torch's step → states wrapped again     `OnParts.step`
states       of the part's shape are `DTensor`s laid out like their parameter: any plan can read them back

As `DTensor`s they would go through a dispatcher op by op, which takes longer than the update itself, and some of torch's
forms have no rule there.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..numerics.hvp import placed_like

Group = dict[str, Any]
_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class OnParts(torch.optim.Optimizer):
    """Mixed into an elementwise optimizer of torch's: its step on what this rank holds. Made by `on_parts`."""

    updates_alone: bool | property = True
    of_torch: Any
    """The class of torch's that it was made from."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's part of every parameter that has a gradient; returns the closure's loss, or `None`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_on_parts()
        return loss

    def _step_on_parts(self) -> None:
        parts: dict[Tensor, Tensor] = {}
        groups = []
        for group in self.param_groups:
            own = {param: _part(param) for param in group["params"] if param.grad is not None}
            parts.update(own)
            groups.append({**group, "params": list(own.values())})
        self._run(groups, parts)

    def _run(self, groups: list[Group], parts: dict[Tensor, Tensor]) -> None:
        """Let torch's step run on plain tensors in place of parameters, and take over the states that it leaves."""
        cls = self.of_torch
        states: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        for param, part in parts.items():
            states[part].update({name: local(value) for name, value in self.state.get(param, {}).items()})
        view: Any = object.__new__(cls)
        view.__dict__.update(
            self.__dict__, param_groups=groups, state=states, **{name: OrderedDict() for name in _HOOKS}
        )
        cls.step(view)
        for param, part in parts.items():
            self._keep(param, part, states[part])

    def _keep(self, param: Tensor, part: Tensor, found: dict[str, Any]) -> None:
        """Take over a state: what was changed in place is there, what is new is laid out like the parameter."""
        state = self.state[param]
        for name, value in found.items():
            if local(state.get(name)) is not value:
                alike = isinstance(value, Tensor) and value.shape == part.shape and value.dim() > 0
                state[name] = like(param, value) if alike else value


def _part(param: Tensor) -> Tensor:
    """What this rank holds of a parameter, with its gradient."""
    assert param.grad is not None
    part: Tensor = local(param).detach()
    part.grad = local(placed_like(param.grad, param))
    return part


def local(value: Any) -> Any:
    """Return what this rank holds of a `DTensor`, sharing its memory; anything else as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def like(param: Tensor, value: Tensor) -> Tensor:
    """Return this rank's part of something laid out like `param`."""
    if not isinstance(param, DTensor):
        return value
    return DTensor.from_local(
        value, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


@functools.cache
def on_parts(cls: type[torch.optim.Optimizer], base: type[OnParts] = OnParts) -> type[torch.optim.Optimizer]:
    """Return torch's `cls` with a step on this rank's parts; the same class and name for everything that asks.

    >>> on_parts(torch.optim.Adagrad).__name__, issubclass(on_parts(torch.optim.Adagrad), torch.optim.Adagrad)
    ('Adagrad', True)
    """
    own = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "of_torch": cls}
    return type(cls.__name__, (base, cls), own)
