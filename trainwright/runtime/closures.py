"""Runs the steps of optimizers that need a closure, which returns the loss with its graph, and not gradients alone.

the closure's result      loss (SophiaH, AdaHessian …) · loss and logits (SophiaG) · what the loss is a function of (SSO)
called again              draws the same random numbers, and its writes to buffers are undone: effects happen once
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..artifacts import UserError
from ..capture.call import find_loss
from .module import LossOutput, ParallelModule

Wants = Literal["loss", "logits", "targets"]
LossOf = Callable[[Any, Any], Tensor]
"""Computes the loss from the whole batch and the model's output."""


class _LeftOut(Exception):
    """Raised inside a closure to skip the step, because the loss is not finite."""


@dataclass(frozen=True)
class ClosureStep:
    """Callable that runs one training step by `optimizer.step(closure)`, with the arguments of `train_step` and the whole batch.

    wants: what the optimizer's closure returns. twice: whether the loss is differentiated twice: attention then runs as plain
    ops, since its fused kernels have no second derivative. loss_of: the function by which SSO computes the loss of targets.
    """

    wants: Wants = "loss"
    twice: bool = False
    loss_of: LossOf | None = None

    def __call__(
        self,
        module: ParallelModule,
        optimizer: torch.optim.Optimizer,
        part: Any,
        may_update: Any = None,
        batch: Any = None,
    ) -> Tensor:
        """Run one step on the rank's part of a batch and return the whole batch's loss before the update."""
        optimizer.zero_grad(set_to_none=True)
        closure = _Closure(self, module, part, may_update)
        try:
            with module.communicator.activity.doing("the optimizer's step"), self._attention():
                self._step(optimizer, closure, batch)
        except _LeftOut:
            pass
        finally:
            closure.end()
        assert closure.loss is not None
        return closure.loss

    def _step(self, optimizer: torch.optim.Optimizer, closure: _Closure, batch: Any) -> None:
        if self.wants != "targets":
            optimizer.step(closure)
            return
        loss_of = self.loss_of
        assert loss_of is not None
        optimizer.step(closure, lambda targets: loss_of(batch, targets))  # type: ignore[call-overload]

    def _attention(self) -> AbstractContextManager[Any]:
        return sdpa_kernel(SDPBackend.MATH) if self.twice else nullcontext()


class _Closure:
    """The closure of one step: runs the forward as often as the optimizer calls it."""

    def __init__(self, step: ClosureStep, module: ParallelModule, part: Any, may_update: Any) -> None:
        self.step, self.module, self.part, self.may_update = step, module, part, may_update
        self.loss: Tensor | None = None
        self._num_steps = module.num_steps
        self._buffers: list[Tensor] | None = None

    def __call__(self) -> Any:
        module, part = self.module, self.part
        is_first = self.loss is None
        module.num_steps = self._num_steps
        if not is_first and self._buffers is None:
            self._buffers = [buffer.detach().clone() for buffer in module.buffers()]
        output = module(**part) if isinstance(part, dict) else module(*part)
        loss = find_loss(output)
        if is_first:
            self.loss = loss.detach().clone()  # some losses are a number in the storage of all their terms
            if self.may_update is not None and not self.may_update(loss):
                raise _LeftOut
        if self.step.wants == "loss":
            return loss
        logits = whole_logits(module, output)
        return (loss, logits) if self.step.wants == "logits" else logits

    def end(self) -> None:
        """Count the step once, and restore the buffers that calls after the first one wrote."""
        self.module.num_steps = self._num_steps + 1
        with torch.no_grad():
            for buffer, before in zip(self.module.buffers(), self._buffers or ()):
                buffer.copy_(before)


@contextmanager
def measuring(module: ParallelModule, part: Any) -> Iterator[Callable[[], Tensor]]:
    """Yield a function that returns a batch's loss with its graph, twice differentiable; undo its effects afterwards.

    The function draws the random numbers of the next step.
    """
    num_steps, buffers = module.num_steps, [buffer.detach().clone() for buffer in module.buffers()]

    def loss() -> Tensor:
        module.num_steps = num_steps
        return find_loss(module(**part) if isinstance(part, dict) else module(*part))

    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield loss
    finally:
        module.num_steps = num_steps
        with torch.no_grad():
            for buffer, before in zip(module.buffers(), buffers):
                buffer.copy_(before)


def whole_logits(module: ParallelModule, output: Any) -> Tensor:
    """Return the logits of all examples on every rank, with their graph."""
    found = output.output if isinstance(output, LossOutput) else output
    if not isinstance(found, Tensor):
        found = found.get("logits") if isinstance(found, dict) else getattr(found, "logits", None)
    if not isinstance(found, Tensor) or found.requires_grad != torch.is_grad_enabled():
        raise UserError(
            "a model whose output is, or has, its logits is needed by this optimizer; got "
            f"{type(output).__name__}; return them, or take sophiah, which needs the loss alone"
        )
    return module.whole(found) if isinstance(found, DTensor) else found
