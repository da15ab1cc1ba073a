"""Adan: Nesterov momentum in Adam's form, from the difference of successive gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..numerics.norms import total_norm
from .base import Lists, Method, add_quotients, check_common, check_range
from .record import STEP, OptimizerRecord, Options, kept, list_temporaries


class Adan(Method):
    r"""Follow the mean gradient and the mean change of the gradient, which together look one step ahead.

        Δ = g - g_previous,  at the first step 0
        m ← β1 m + (1 - β1) g,    d ← β2 d + (1 - β2) Δ,    n ← β3 n + (1 - β3) (g + β2 Δ)²
        D = √(n / (1 - β3^t)) + ε
        θ ← (θ - lr · m / ((1 - β1^t) D) - lr · β2 d / ((1 - β2^t) D)) / (1 + lr·λ)

    lr: five to ten times AdamW's. betas: how much of m, d and n is *kept*, each in [0, 1); the paper's β are 1 minus
    these. eps: added to the root. weight_decay: λ; with `no_prox`, θ ← θ (1 - lr·λ) before the update instead of the
    division after it. max_grad_norm: G; if above 0, gradients are scaled by min(1, G / (‖g‖ + ε)), with ‖g‖ over all
    parameters of all groups, in a copy. For large batches and learning rates; where memory is short, note the four
    tensors of the parameter's size that it keeps, AdamW keeping two.

    `restart()` forgets the moments, as the paper's restart does; the authors call it after warm-up and every few epochs,
    if at all. A gradient with NaN makes its elements NaN for good, and with `max_grad_norm` every element. Raises
    `UserError` for settings out of range.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    >>> optimizer = Adan([weight], lr=0.1)
    >>> weight.grad = torch.tensor([0.5, -2.0])
    >>> optimizer.step()
    >>> weight.detach()
    tensor([0.9000, 1.1000])

    Source: Xie, Zhou, Li, Lin, Yan, *Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models*, 2022,
    and the authors' code, whose first step takes g_previous = g where the derivation takes 0. It departs from that code
    in counting steps for each parameter, and in heeding each group's own max_grad_norm.
    """

    _state_names = ("exp_avg", "exp_avg_diff", "exp_avg_sq", "previous_grad")

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 1e-3, betas: tuple[float, float, float] = (0.98, 0.92, 0.99),
        eps: float = 1e-8, weight_decay: float = 0.0, max_grad_norm: float = 0.0, no_prox: bool = False, **how: Any,
    ) -> None:  # fmt: skip
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**settings, "max_grad_norm": max_grad_norm, "no_prox": no_prox}, **how)

    @property
    def updates_alone(self) -> bool:  # type: ignore[override]
        """Whether no group clips by the norm of all gradients."""
        return not any(group["max_grad_norm"] for group in self.param_groups)

    @torch.no_grad()
    def restart(self) -> None:
        """Forget the moments and start counting the steps anew."""
        for state in self.state.values():
            for value in state.values():
                value.zero_()

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("Adan", settings["lr"], settings["betas"], settings["eps"], settings["weight_decay"])
        check_range("Adan", max_grad_norm=(settings["max_grad_norm"], "of at least 0", lambda value: value >= 0.0))

    def _prepare(self) -> None:
        """Take the norm of all gradients, where a group clips by it."""
        clips = any(group["max_grad_norm"] for group in self.param_groups)
        grads = [param.grad for group in self.param_groups for param in group["params"] if param.grad is not None]
        self._norm = total_norm(grads) if clips and grads else None

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        factor = None
        if group["max_grad_norm"] and self._norm is not None:
            factor = (group["max_grad_norm"] / (self._norm + group["eps"])).clamp(max=1.0)
        return {**super()._options(group), "clip": factor}

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        if options["clip"] is not None:
            grads = list(torch._foreach_mul(grads, options["clip"]))
        _average(grads, states, options)
        denominators = torch._foreach_sqrt(states["exp_avg_sq"])
        torch._foreach_div_(denominators, options["root"])
        torch._foreach_add_(denominators, options["eps"])
        if options["weight_decay"] and options["no_prox"]:
            torch._foreach_mul_(params, options["kept"])
        add_quotients(params, states["exp_avg"], denominators, options["scale"])
        add_quotients(params, states["exp_avg_diff"], denominators, options["ahead"])
        if options["weight_decay"] and not options["no_prox"]:
            torch._foreach_div_(params, options["grown"])

    @staticmethod
    def _step_numbers(step: Any, lr: Any, options: dict[str, Any]) -> dict[str, Any]:
        (beta1, beta2, beta3), decay = options["betas"], lr * options["weight_decay"]
        return {
            "scale": -lr / (1 - beta1**step),
            "ahead": -lr * beta2 / (1 - beta2**step),
            "root": (1 - beta3**step) ** 0.5,
            "kept": 1 - decay,
            "grown": 1 + decay,
            "moving": (step > 1) * 1.0,
        }


def _average(grads: list[Tensor], states: Lists, options: dict[str, Any]) -> None:
    """Take the gradients into the three running means, and remember them."""
    beta1, beta2, beta3 = options["betas"]
    differences = list(torch._foreach_sub(grads, states["previous_grad"]))
    if not isinstance(options["moving"], float) or not options["moving"]:
        torch._foreach_mul_(differences, options["moving"])  # there is no difference at the first step
    torch._foreach_lerp_(states["exp_avg"], grads, 1 - beta1)
    torch._foreach_lerp_(states["exp_avg_diff"], differences, 1 - beta2)
    torch._foreach_mul_(differences, beta2)
    torch._foreach_add_(differences, grads)
    torch._foreach_mul_(states["exp_avg_sq"], beta3)
    torch._foreach_addcmul_(states["exp_avg_sq"], differences, differences, 1 - beta3)
    torch._foreach_copy_(states["previous_grad"], grads)


def _num_copies(options: Options) -> int:
    return 1 + bool(options.get("max_grad_norm"))


RECORD = OptimizerRecord(
    "adan",
    Adan,
    "Adam with Nesterov momentum by differences of gradients; for large batches",
    (kept("exp_avg"), kept("exp_avg_diff"), kept("exp_avg_sq"), kept("previous_grad"), STEP),
    list_temporaries(_num_copies),
    paper="Xie et al. 2022, arXiv:2208.06677",
    departs="betas are the kept parts, 1 minus the paper's; no restart by a condition on the path",
)
