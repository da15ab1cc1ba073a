"""Methods whose steps have one length whatever the gradient's: Lion, SignSGD, normalised SGD; the last two may clip first.

sign       u = sign(…)                                   `Lion`, `SignSGD`
length     u = ĝ √n / ‖ĝ‖ of each tensor of n elements    `NormalizedSGD`
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..numerics.shards import sum_over_shards
from .base import Lists, Method, check_common, check_range
from .batch import Batch
from .clipped import check_clipping, clipped, clipping_temporaries, gradient_threshold
from .record import STEP, OptimizerRecord, kept, list_temporaries

_PAPER = "Pan, Li 2023, arXiv:2306.00204"


class Lion(Method):
    r"""Step by the sign of an interpolated momentum: one state, and every coordinate moves by lr.

        u = sign(β₁ m + (1 − β₁) g)
        θ ← θ (1 − lr·λ) − lr · u
        m ← β₂ m + (1 − β₂) g

    lr: three to ten times smaller than AdamW's, weight_decay as much larger. betas: β₁, β₂. For large batches: with the noise of
    small ones, signs are near to random. Clipping its update changes nothing, as all coordinates have one magnitude.

    A NaN gradient makes its element NaN for good. Raises `UserError` for settings out of range.

    >>> weight = torch.nn.Parameter(torch.zeros(3))
    >>> weight.grad = torch.tensor([5.0, -0.1, 0.0])
    >>> Lion([weight], lr=0.1).step()
    >>> weight.detach()
    tensor([-0.1000,  0.1000,  0.0000])

    Source: Chen, Liang, Huang et al., *Symbolic Discovery of Optimization Algorithms*, 2023.
    """

    updates_alone = True
    _state_names = ("exp_avg",)

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
                 weight_decay: float = 0.0, **how: Any) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("Lion", settings["lr"], settings["betas"], 0.0, settings["weight_decay"])

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        beta1, beta2 = options["betas"]
        directions = torch._foreach_lerp(states["exp_avg"], grads, 1 - beta1)
        torch._foreach_lerp_(states["exp_avg"], grads, 1 - beta2)
        _step_by_sign(params, directions, lr, options)


class SignSGD(Method):
    r"""Step by the sign of the gradient, or of its running mean.

        m ← μ m + (1 − μ) ĝ,    θ ← θ (1 − lr·λ) − lr · sign(m)

    momentum: μ; 0 keeps nothing and takes sign(g). clip: the share of coordinates of the whole gradient that are clipped
    first (`ClippedSGD`), which without momentum changes no sign. weight_decay: λ, decoupled. As `Lion`, for large batches.

    Raises `UserError` for settings out of range.

    >>> weight = torch.nn.Parameter(torch.zeros(3))
    >>> weight.grad = torch.tensor([5.0, -0.1, 0.0])
    >>> SignSGD([weight], lr=0.1, momentum=0.0).step()
    >>> weight.detach()
    tensor([-0.1000,  0.1000,  0.0000])

    Source: Bernstein, Wang, Azizzadenesheli, Anandkumar, *signSGD*, 2018; its clipped form: Pan, Li 2023.
    """

    _state_names = ("momentum_buffer",)

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0,
                 clip: float = 0.0, *, threshold_scale: float = 1.0, **how: Any) -> None:  # fmt: skip
        _init_clipped(self, params, lr, momentum, weight_decay, clip, threshold_scale, how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        _check_clipped("SignSGD", settings)

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._state_names if group["momentum"] else ()

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**super()._options(group), "threshold": gradient_threshold(group)}

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        directions = clipped(grads, options["threshold"])
        if options["momentum"]:
            torch._foreach_lerp_(states["momentum_buffer"], directions, 1 - options["momentum"])
            torch._foreach_copy_(directions, states["momentum_buffer"])
        _step_by_sign(params, directions, lr, options)


class NormalizedSGD(Method):
    r"""Descend along each tensor's gradient, scaled to a root mean square of 1 an element.

        n = ĝ √numel / ‖ĝ‖,    m ← μ m + (1 − μ) n,    θ ← θ (1 − lr·λ) − lr · m

    with ĝ the gradient whose largest share of coordinates over the whole group is clipped (`ClippedSGD`), and n = 0 for a
    tensor whose gradient is 0. Of a sharded tensor the norm is that of the whole.

    lr: the root mean square of a step's elements. clip: 0.1; 0 clips none. momentum: μ, 0 keeps no buffer. weight_decay: λ,
    decoupled. `foreach` and `loop` alone: the norm stands between two passes. Raises `UserError` for settings out of range.

    >>> weight = torch.nn.Parameter(torch.zeros(4))
    >>> weight.grad = torch.tensor([3.0, -3.0, 3.0, 3.0])
    >>> NormalizedSGD([weight], lr=0.1, momentum=0.0).step()
    >>> weight.detach()
    tensor([-0.1000,  0.1000, -0.1000, -0.1000])

    Source: Pan, Li, *Toward Understanding Why Adam Converges Faster Than SGD for Transformers*, 2023.
    """

    forms = ("foreach", "loop")
    _state_names = ("momentum_buffer",)

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, momentum: float = 0.9, weight_decay: float = 0.0,
                 clip: float = 0.1, *, threshold_scale: float = 1.0, **how: Any) -> None:  # fmt: skip
        _init_clipped(self, params, lr, momentum, weight_decay, clip, threshold_scale, how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        _check_clipped("NormalizedSGD", settings)
        check_range(
            "NormalizedSGD", fused=(settings["fused"], "False, for a norm stands between", lambda value: not value)
        )

    def _names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._state_names if group["momentum"] else ()

    def _step_group(self, group: dict[str, Any]) -> None:
        threshold, lr = gradient_threshold(group), group["lr"]
        for batch in self._batches(group):
            directions = clipped(batch.grads, threshold)
            torch._foreach_mul_(directions, _to_unit(batch, directions))
            if group["momentum"]:
                torch._foreach_lerp_(batch.states["momentum_buffer"], directions, 1 - group["momentum"])
                torch._foreach_copy_(directions, batch.states["momentum_buffer"])
            _decay(batch.params, lr, group)
            torch._foreach_mul_(directions, -lr)
            torch._foreach_add_(batch.params, directions)
            batch.write_back()
            del batch, directions  # before the next working copies come


def _to_unit(batch: Batch, directions: list[Tensor]) -> list[Tensor]:
    """Return √numel / ‖ĝ‖ of each tensor, 0 where the norm is."""
    found = []
    for owner, direction in zip(batch.owners, directions, strict=True):
        square, numel = direction.square().sum(), owner.numel() * (2 if owner.is_complex() else 1)
        whole = sum_over_shards([(square, owner)]) if isinstance(owner, DTensor) else square
        found.append(torch.where(whole > 0, (numel / whole).sqrt(), torch.zeros_like(whole)).to(direction.dtype))
    return found


def _decay(params: list[Tensor], lr: Any, options: dict[str, Any]) -> None:
    if options["weight_decay"]:
        torch._foreach_mul_(params, 1 - lr * options["weight_decay"])


def _step_by_sign(params: list[Tensor], directions: Any, lr: Any, options: dict[str, Any]) -> None:
    _decay(params, lr, options)
    torch._foreach_sign_(directions)
    torch._foreach_mul_(directions, -lr)
    torch._foreach_add_(params, directions)


def _init_clipped(
    method: Method, params: Any, lr: Any, momentum: float, weight_decay: float, clip: float, scale: float, how: Any
) -> None:
    defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "clip": clip, "threshold_scale": scale}
    Method.__init__(method, params, defaults, **how)


def _check_clipped(owner: str, settings: dict[str, Any]) -> None:
    check_common(owner, settings["lr"], (), 0.0, settings["weight_decay"])
    check_clipping(owner, settings)
    check_range(owner, momentum=(settings["momentum"], "in [0, 1)", lambda value: 0 <= value < 1))


RECORDS = (
    OptimizerRecord(
        "lion",
        Lion,
        "The sign of an interpolated momentum; half of Adam's state",
        (kept("exp_avg"), STEP),
        list_temporaries(1),
        paper="Chen et al. 2023, arXiv:2302.06675",
    ),
    OptimizerRecord(
        "signsgd",
        SignSGD,
        "The sign of the gradient's running mean",
        (kept("momentum_buffer", "momentum"), STEP),
        clipping_temporaries(1),
        defaults={"momentum": 0.9, "clip": 0.0},
        paper="Bernstein et al. 2018, arXiv:1802.04434",
        departs="momentum as a running mean, gradients clipped on demand",
    ),
    OptimizerRecord(
        "normalizedsgd",
        NormalizedSGD,
        "SGD whose step has one length for each tensor, its largest coordinates clipped before",
        (kept("momentum_buffer", "momentum"), STEP),
        clipping_temporaries(2),
        defaults={"momentum": 0.9, "clip": 0.1},
        by_tensor=True,
        paper=_PAPER,
    ),
)
