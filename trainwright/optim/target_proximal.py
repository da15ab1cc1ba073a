"""What keeps the targets of a surrogate near those at the start: divergences D(z, z_t), one of them chosen by name.

½ ⟨z − z_t, A (z − z_t)⟩ with A = ∇²ℓ(z_t), √(Σ‖d‖²) or diag √(Σ d²);  Σ KL(softmax(z_t) ‖ softmax(z))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..artifacts import UserError
from ..numerics.hvp import gradients, hessian_vector

Proximal = Callable[[Tensor, Tensor], Tensor]
Remember = Callable[[dict[str, Any]], None]
PROXIMALS = ("euclidean", "newton", "adagrad", "diagonal", "kl")
_TINY = 1e-16


def target_proximal(
    options: dict[str, Any], state: dict[str, Any], slope: Tensor, loss: Callable[[Tensor], Tensor], targets: Tensor,
    rows: Tensor | None,
) -> tuple[Proximal | None, Remember]:  # fmt: skip
    """Return D of this step, `None` for ½‖z − z_t‖², and what puts the step's gradient into a state once it is taken.

    state: may be empty before the first step. slope: d_t. loss: ℓ of targets. rows: the examples of the batch.
    """
    kind = options["proximal"]
    if kind == "newton":
        return _newton(loss, targets), _nothing
    if kind == "kl":
        return _kl, _nothing
    if kind == "adagrad":
        total = (slope.double() ** 2).sum() + float(state.get("squares", 0.0))
        return _weighted(total.sqrt()), lambda kept: kept["squares"].copy_(total)
    if kind == "diagonal":
        return _by_example(options["table"], state, slope, rows)
    return None, _nothing


def _nothing(kept: dict[str, Any]) -> None:
    """A divergence that remembers nothing."""


def _newton(loss: Callable[[Tensor], Tensor], targets: Tensor) -> Proximal:
    with torch.enable_grad():
        free = targets.detach().requires_grad_()
        value = loss(free)
        if not value.requires_grad:
            raise UserError(
                "proximal='newton' needs a loss that autograd sees through; got a value without a graph; take another proximal"
            )
        slopes = gradients(value, [free])

    def bend(z: Tensor, anchor: Tensor) -> Tensor:
        change = z - anchor
        (product,) = hessian_vector([slopes[0]], [free], [change.detach()], keep_graph=True)  # type: ignore[list-item]
        # Of value ½⟨c, Hc⟩ and gradient Hc, with H a constant.
        return (product * change).sum() - (product * change.detach()).sum() / 2

    return bend


def _weighted(weights: Tensor) -> Proximal:
    def bend(z: Tensor, anchor: Tensor) -> Tensor:
        return (weights.to(z) * (z - anchor) ** 2).sum() / 2

    return bend


def _kl(z: Tensor, anchor: Tensor) -> Tensor:
    before, now = torch.log_softmax(anchor, -1), torch.log_softmax(z, -1)
    return (before.exp() * (before - now)).sum()


def _by_example(
    shape: tuple[int, ...], state: dict[str, Any], slope: Tensor, rows: Tensor | None
) -> tuple[Proximal, Remember]:
    index = torch.arange(shape[0], device=slope.device) if rows is None else rows
    if slope.shape != (len(index), *shape[1:]):
        raise UserError(
            f"targets [examples, …] of the table's shape {tuple(shape)} are needed, a row each of `rows`; got targets "
            f"{tuple(slope.shape)} and {len(index)} rows; give step(closure, loss, rows=the batch's examples)"
        )
    known = state["table"][index] if "table" in state else torch.zeros((), dtype=torch.float64, device=slope.device)
    total = known + slope.double() ** 2
    return _weighted(total.sqrt() + _TINY), lambda kept: kept["table"].index_copy_(0, index, total)
