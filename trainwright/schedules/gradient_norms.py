"""The norm of all gradients together, step by step: what a refined schedule is made from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor

from ..artifacts import UserError
from ..numerics.norms import total_norm

Order = Literal[1, 2]


class GradientNormLog:
    """Collects the ℓ2 or ℓ1 norm of the gradient of all parameters together, one number a step.

    Call `record()` after the backward pass and *before* clipping, once a step (with accumulation: after the last
    micro-batch). Of sharded parameters (`DTensor`) it is the norm of the whole, and every rank must call it.

    params: the parameters; those without a gradient count as zero.
    order: 2 for SGD and its relatives, 1 for Adam and the like, whose steps do not grow with the gradient.

    `norms` is the list; `state_dict` and `load_state_dict` carry it over a restart. Raises `UserError` for another order.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> log = GradientNormLog([weight])
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> log.record()
    5.0
    """

    def __init__(self, params: Iterable[Tensor], order: Order = 2) -> None:
        if order not in (1, 2):
            raise UserError(f"the order of a norm is needed, 1 or 2; got {order!r}; take 2 for SGD, 1 for Adam")
        self.params, self.order = list(params), order
        self.norms: list[float] = []

    def record(self, loss_scale: float = 1.0) -> float:
        """Note this step's norm and return it; what is not finite is left out of `norms`.

        loss_scale: what the loss was multiplied by (`GradScaler.get_scale()`, where `unscale_` was not called). A step
        whose gradients overflowed is one that the scaler skips, so it is no step of the schedule either.
        """
        found = [param.grad for param in self.params if param.grad is not None]
        norm = float(total_norm(found, self.order)) / loss_scale if found else 0.0
        if math.isfinite(norm):
            self.norms.append(norm)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return the norms so far."""
        return {"order": self.order, "norms": list(self.norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; `UserError` where its norms are of another order."""
        if state["order"] != self.order:
            raise UserError(
                f"norms of order {self.order} are needed; got order {state['order']}; make the log with order={state['order']}"
            )
        self.norms = list(state["norms"])
