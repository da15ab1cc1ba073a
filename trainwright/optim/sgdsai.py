"""SGD-SaI: momentum, with one learning-rate factor per tensor fixed at its first gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .base import Lists, Method, check_common, check_range, working_dtype
from .record import STEP, OptimizerRecord, StateTensor, kept, list_temporaries


class SGDSaI(Method):
    r"""Scale each tensor's momentum step by the signal-to-noise ratio of its first gradient.

        G = ‖g₁‖ / (σ(g₁) + ε)                        once a tensor, at its first gradient
        M ← g₁, then μM + (1 − μ)g
        θ ← θ (1 − lr·λ) − lr · G · M                 the decay is not multiplied by G

    with σ the unbiased standard deviation over the tensor's elements. For a gradient of n elements about zero, G is
    √(n − 1): in effect each tensor's learning rate grows with the root of its size, for half of Adam's memory. Meant
    for transformers trained from a start where the first gradients tell the layers apart; G is never refreshed, so do
    not use it where the first batch is not typical (most of an embedding unseen, say).

    lr: what G, usually in the hundreds, multiplies. momentum: μ; 0 keeps no buffer. eps: ε.
    guard: where σ is at most `guard` times the gradient's root mean square (one element, all alike, all zero), G is
        √n: the quotient would say nothing, and multiply the step by up to 1e8.

    G stands in the state: a resumed run keeps it, and a tensor that is frozen at first gets its own at its first
    gradient. Of a sharded tensor (`DTensor`) it is that of the whole, gathered once. A first gradient with NaN makes G
    and the tensor NaN for good. Raises `UserError` for settings out of range.

    >>> weight = torch.nn.Parameter(torch.zeros(4))
    >>> weight.grad = torch.tensor([1.0, -1.0, 1.0, -1.0])
    >>> optimizer = SGDSaI([weight], lr=0.1, weight_decay=0.0)
    >>> optimizer.step()
    >>> optimizer.state[weight]["gain"]
    tensor(1.7321)

    Source: Xu, Xiang, Cai, Wen, *No More Adam: Learning Rate Scaling at Initialization is All You Need*, 2024. It
    departs in the guard: without it one element with gradient 0.1 moves by 10 000 at the defaults.
    """

    updates_alone = True
    _state_names = ("gain",)

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-2, momentum: float = 0.9, eps: float = 1e-8,
                 weight_decay: float = 1e-2, guard: float = 1e-5, **how: Any) -> None:  # fmt: skip
        defaults = {"lr": lr, "momentum": momentum, "eps": eps, "weight_decay": weight_decay, "guard": guard}
        super().__init__(params, defaults, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("SGDSaI", settings["lr"], (), settings["eps"], settings["weight_decay"])
        check_range(
            "SGDSaI",
            momentum=(settings["momentum"], "in [0, 1)", lambda value: 0 <= value < 1),
            guard=(settings["guard"], "in [0, 1)", lambda value: 0 <= value < 1),
        )

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("gain", "momentum_buffer") if group["momentum"] else ("gain",)

    def _state_keys(self) -> tuple[str, ...]:
        return ("gain", "momentum_buffer")

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        assert param.grad is not None
        grad = param.grad.to(working_dtype(param.dtype), copy=True)
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        state = {"gain": _gain(whole, group["eps"], group["guard"])}
        if group["momentum"]:
            # The first update then leaves it as it is: μg + (1 − μ)g.
            state["momentum_buffer"] = -grad if group["maximize"] else grad
        return state

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        if options["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * options["weight_decay"])
        means = grads
        if options["momentum"]:
            means = states["momentum_buffer"]
            torch._foreach_lerp_(means, grads, 1 - options["momentum"])
        updates = torch._foreach_mul(means, states["gain"])
        torch._foreach_mul_(updates, -lr)
        torch._foreach_add_(params, updates)


def _gain(gradient: Tensor, eps: float, guard: float) -> Tensor:
    """‖g‖ / (σ(g) + ε), or √n where σ is nothing beside the gradient; complex elements count as pairs."""
    values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    num_values = max(1, values.numel())
    norm = torch.linalg.vector_norm(values)
    deviation = torch.std(values) if num_values > 1 else torch.zeros_like(norm)
    flat = deviation <= guard * norm / num_values**0.5
    return torch.where(flat, torch.full_like(norm, num_values**0.5), norm / (deviation + eps))


RECORD = OptimizerRecord(
    "sgdsai",
    SGDSaI,
    "momentum with a learning-rate factor per tensor, fixed at its first gradient; half of Adam's state",
    (StateTensor("gain", lambda shape, options: (), wide=True), kept("momentum_buffer", "momentum"), STEP),
    list_temporaries(1),
    defaults={"momentum": 0.9},
    by_tensor=True,
    paper="Xu et al. 2024, arXiv:2412.11768",
    departs="tensors whose first gradient has no spread take the root of their size for the factor",
)
