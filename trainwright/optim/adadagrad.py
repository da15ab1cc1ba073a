"""AdAdaGrad's two updates: AdaGrad by coordinate, and AdaGrad with one norm for the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..numerics.norms import total_norm
from .base import Lists, Method, add_quotients, check_common, check_range, working_dtype
from .record import STEP, OptimizerRecord, StateTensor, kept, list_temporaries


class AdAdaGrad(Method):
    r"""Divide each coordinate's step by the root of all its squared gradients so far.

        v ← v + g²,    θ ← θ − lr · g / (√v + ε)

    What makes it AdAdaGrad is the batch, which `trainwright.schedules.AdaptiveBatchSize` grows with the noise of the
    gradient (here with `test="coordinate"`, for which convergence is proved; the other tests are what is used). Steps
    only ever shrink, so it is for convex or sparse problems and short runs; long runs of deep networks want Adam.

    lr: usually 5e-3 to 5e-2. eps: added to the root. weight_decay: decoupled, θ ← θ (1 − lr·λ) before the update.

    A gradient with NaN makes its coordinates NaN for good. Raises `UserError` for settings out of range.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    >>> weight.grad = torch.tensor([0.5, -2.0])
    >>> AdAdaGrad([weight], lr=0.1).step()
    >>> weight.detach()
    tensor([0.9000, 1.1000])

    Source: Lau, Li, Xu, Liu, Kolar, *AdAdaGrad: Adaptive Batch Size Schemes for Adaptive Gradient Methods*, 2024.
    """

    updates_alone = True
    _state_names = ("sum_of_squares",)

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-2, eps: float = 1e-8, weight_decay: float = 0.0,
                 **how: Any) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("AdAdaGrad", settings["lr"], (), settings["eps"], settings["weight_decay"])

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        if options["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * options["weight_decay"])
        torch._foreach_addcmul_(states["sum_of_squares"], grads, grads)
        roots = torch._foreach_sqrt(states["sum_of_squares"])
        torch._foreach_add_(roots, options["eps"])
        add_quotients(params, grads, roots, -lr)


class AdAdaGradNorm(Method):
    r"""Divide the whole step by the root of all squared gradient norms so far.

        b² ← b² + ‖g‖²,    θ ← θ − lr · g / b

    with one b, and ‖g‖ over all parameters of all groups. The batch is grown by
    `trainwright.schedules.AdaptiveBatchSize` with the norm test: then the squared gradient falls as 1/K in K steps, with
    high probability, for smooth functions, whatever `lr` and `b0`. Layers of very different gradients share one step
    length: there, a method by coordinate is better.

    lr: the distance that the first step may go, if ‖g‖ ≫ b0. b0: the root of the accumulator's start, above 0.
    weight_decay: decoupled, θ ← θ (1 − lr·λ) before the update.

    The accumulator stands in the state of every parameter, so that any part of the model can be saved and resumed. A
    gradient with NaN makes every parameter NaN. Raises `UserError` for settings out of range.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    >>> weight.grad = torch.tensor([3.0, -4.0])
    >>> AdAdaGradNorm([weight], lr=0.1, b0=12.0).step()
    >>> weight.detach()
    tensor([0.9769, 1.0308])

    Source: Lau, Li, Xu, Liu, Kolar, *AdAdaGrad: Adaptive Batch Size Schemes for Adaptive Gradient Methods*, 2024; Ward,
    Wu, Bottou, *AdaGrad stepsizes*, 2019. It departs from the authors' code, which keeps an accumulator per row and
    lets biases borrow the layer before's; the equations above are the paper's.
    """

    _state_names = ("sum_of_squares",)

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1.0, b0: float = 0.01, weight_decay: float = 0.0,
                 **how: Any) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "b0": b0, "weight_decay": weight_decay}, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("AdAdaGradNorm", settings["lr"], (), 0.0, settings["weight_decay"])
        check_range("AdAdaGradNorm", b0=(settings["b0"], "above 0", lambda value: value > 0))

    def _prepare(self) -> None:
        """Add this step's squared norm to the accumulator, which every parameter's state repeats."""
        kept = [state["sum_of_squares"] for state in self.state.values() if "sum_of_squares" in state]
        owners = [(param, group) for group in self.param_groups for param in group["params"] if param.grad is not None]
        if not owners:
            return
        square = total_norm([param.grad for param, _ in owners]) ** 2
        total = square + (kept[0].to(square) if kept else self.defaults["b0"] ** 2)
        for param, group in owners:
            self._state_of(param, group)
        for state in self.state.values():
            state["sum_of_squares"].copy_(total)

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        dtype = working_dtype(torch.empty((), dtype=param.dtype, device="meta").abs().dtype)
        return {"sum_of_squares": torch.zeros((), dtype=dtype, device=param.device)}

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        if options["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * options["weight_decay"])
        updates = torch._foreach_div(grads, torch._foreach_sqrt(states["sum_of_squares"]))
        torch._foreach_mul_(updates, -lr)
        torch._foreach_add_(params, updates)


RECORDS = (
    OptimizerRecord(
        "adadagrad",
        AdAdaGrad,
        "AdaGrad, whose batch grows with the noise of the gradient",
        (kept("sum_of_squares"), STEP),
        list_temporaries(1),
        paper="Lau et al. 2024, arXiv:2402.11215",
    ),
    OptimizerRecord(
        "adadagradnorm",
        AdAdaGradNorm,
        "AdaGrad with one norm for all parameters; its batch grows with the noise of the gradient",
        (StateTensor("sum_of_squares", lambda shape, options: (), wide=True), STEP),
        list_temporaries(1),
        paper="Lau et al. 2024, arXiv:2402.11215",
        departs="one accumulator for the whole model, where the authors' code keeps one per row",
    ),
)
