"""Stand-ins for methods whose step is not followed op by op: what they hold, and that they pass over memory once or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, library

from .record import OptimizerRecord


class DeclaredStep(torch.optim.Optimizer):
    """Keep and allocate what a record declares, parameter after parameter beside what all hold, and update nothing.

    Profiles and plans follow a step's memory on gradients alone; a method whose step takes the loss with its graph is
    followed by this in its place. The graph of a Hessian-vector product is not part of what a record declares.

    >>> from trainwright import optim
    >>> weight = torch.nn.Parameter(torch.ones(4))
    >>> weight.grad = torch.ones(4)
    >>> optimizer = DeclaredStep([weight], optim.record("adamw"))
    >>> optimizer.step()
    >>> sum(tensor.nbytes for tensor in optimizer.state[weight].values())
    36
    """

    def __init__(self, params: Iterable[Any], entry: OptimizerRecord) -> None:
        super().__init__(params, {})
        self._entry = entry

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Hold the state from the first call on, and each parameter's temporaries for a moment."""
        vectors = [
            torch.empty(self._entry.held_bytes(tuple(param.shape), param.dtype), dtype=torch.uint8, device=param.device)
            for group in self.param_groups
            for param in group["params"]
        ]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    own = {name: value for name, value in group.items() if name != "params"}
                    self._hold(param, self._entry.with_options(**own))
        del vectors
        return None if closure is None else closure()

    def _hold(self, param: Tensor, entry: OptimizerRecord) -> None:
        shape = tuple(param.shape)
        if not self.state[param]:
            first = not any(self.state[other] for other in self.state if other is not param)
            for index, state in enumerate(entry.states):
                own = state.shape(() if state.once else shape, entry.defaults)
                if own is None or (state.once and not first):
                    continue
                # Counts and other numbers are kept on the host.
                device = "cpu" if own == () != shape else param.device
                kept = torch.empty(own, dtype=state.dtype_for(param.dtype), device=device)
                self.state[param][f"{index}.{state.name}"] = kept
        torch.empty(entry.step_temporary_bytes(shape, param.dtype), dtype=torch.uint8, device=param.device)


class OnePassStep(DeclaredStep):
    """The same, which also updates each parameter by one call: a kernel that reads the gradient and reads and writes the rest.

    GPUs run 8-bit methods so (bitsandbytes), where ours is a chain of ops. The call costs its bytes and one launch.

    >>> from trainwright import optim
    >>> weight = torch.nn.Parameter(torch.ones(8192))
    >>> weight.grad = torch.ones(8192)
    >>> OnePassStep([weight], optim.record("adamw8bit").with_options("fused")).step()
    """

    def _hold(self, param: Tensor, entry: OptimizerRecord) -> None:
        super()._hold(param, entry)
        states = [each for each in self.state[param].values() if each.ndim]
        update_in_one_pass(param.detach(), states, param.grad)


@library.custom_op("trainwright::update_in_one_pass", mutates_args=("param", "states"))
def update_in_one_pass(param: Tensor, states: list[Tensor], grad: Tensor) -> None:
    """Stand for a kernel that updates a parameter and its states; it computes nothing."""


@update_in_one_pass.register_fake
def _updated(param: Tensor, states: list[Tensor], grad: Tensor) -> None:
    """Nothing is returned."""
