"""Wraps a sync method as a torch optimizer, for loops that call `optimizer.step()`: Hugging Face's Trainer, Accelerate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..artifacts import UserError

if TYPE_CHECKING:
    from .face import Sync


class SyncOptimizer(torch.optim.Optimizer):
    """Optimizer whose `step()` calls `sync.step(loss)` with the mean of the losses that the model returned since the last one.

    Made by `sync.as_optimizer()`. Groups and state are the wrapped optimizer's, so that schedulers and checkpoints find them;
    its `state_dict` also has the method's state. The loss is found in what the model returns in training: a scalar, `loss` of an
    object or a dict, or the first entry of a tuple; if it is not found, it is NaN, which matters only to `lsgd`. The model is
    marked as prepared, so that Accelerate does not wrap it in DistributedDataParallel, which would sum gradients.
    """

    def __init__(self, sync: Sync) -> None:
        replica = sync.method.replica
        if sync.record.takes == "closure" or replica.optimizer is None:
            raise UserError(
                f"a method that takes a loss after its backward is needed as an optimizer; {sync.record.name} takes a closure; "
                "write the loop, with sync.step(closure)"
            )
        self.sync, self.inner = sync, replica.optimizer
        self._losses: list[Tensor] = []
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        replica.model._is_accelerate_prepared = True  # type: ignore[assignment]
        replica.model.register_forward_hook(self._note)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Run one step together with the other workers; return the closure's loss, or `None`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        losses = self._losses if self.sync.method.reads_loss else []  # to read one is to wait for it
        told = [float(each) for each in losses]
        self._losses.clear()
        self.sync.step(math.fsum(told) / len(told) if told else math.nan)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, with the method's state under `sync`."""
        return {**self.inner.state_dict(), "sync": self.sync.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Restore a `state_dict` of this worker."""
        rest = dict(state_dict)
        saved = rest.pop("sync", None)
        if saved is None:
            raise UserError(
                "a state with that of a sync method is needed; got an optimizer's alone; load it into that one"
            )
        self.inner.load_state_dict(rest)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.sync.load_state_dict(saved)

    def _note(self, model: Any, given: Any, output: Any) -> None:
        loss = _loss_in(output)
        if model.training and torch.is_grad_enabled() and loss is not None:
            self._losses.append(loss.detach())


def _loss_in(output: Any) -> Tensor | None:
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if found is None:
        found = output[0] if isinstance(output, tuple) and output else output
    return found if isinstance(found, Tensor) and found.numel() == 1 else None
