r"""AdaHessian: Adam with Hutchinson's |diagonal of the Hessian| where Adam has |g|.

D = z ⊙ Hz, z = ±1                                                       `CurvatureMethod._refresh_from`
D^(s): mean |D| over a block                                             `_block_means`
q ← β2 q + (1 - β2)(D^(s))²,  kept as q / (1 - β2^n) after n refreshes    `AdaHessian._refresh`
m ← β1 m + (1 - β1) g;  θ ← θ - η [m / ((1 - β1^t)(√q̂^k + ε)) + λθ]      `AdaHessian._update`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from ..numerics.hvp import placed_like, real_view
from .base import Lists, add_quotients, check_common, check_range, plain
from .record import STEP, ExtraPass, OptimizerRecord, kept, list_temporaries
from .second_order import HESSIAN_STEP, CurvatureMethod, gradients


class AdaHessian(CurvatureMethod):
    r"""Adam whose second moment is of the Hessian's diagonal: one Hessian-vector product a refresh.

    lr, betas, eps, weight_decay (decoupled) as in Adam; lr is 0.15 because the step is Newton-like, not sign-like.
    hessian_power: k in (0, 1], 1 is Newton's scaling, less is milder. update_period: refresh the curvature before
    steps 1, k + 1, …; the published runs refresh every step. average: over what |D| is averaged before it is squared:
    `"spatial"` the kernel of a 4-D or 5-D convolution weight and nothing else (the authors' vision code), `"row"`
    the last dim of matrices and 3-D weights too (their instruction code), an integer b blocks of b consecutive
    elements of everything above one dim (their Transformer code, b = 32), `None` nothing. signed: average D, not |D|
    (the paper's text); averaging signed values cancels curvature of mixed sign.

    `step(closure)`: the closure returns the loss with its graph. Without a closure, call `update_hessian(closure)`
    whenever `hessian_due`, before `step()`. A parameter's first gradient needs curvature with it. Raises `UserError`
    for settings out of range and as `step` says. NaN gradients reach the momentum. Not for losses with mostly zero
    curvature (ReLU networks with a linear loss): q̂ = 0 leaves steps of lr/eps.

    >>> weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    >>> curvature = torch.tensor([3.0, -2.0, 10.0])
    >>> loss = AdaHessian([weight], lr=1.0).step(lambda: 0.5 * (curvature * weight**2).sum())
    >>> [float(f"{value:.4g}") for value in weight.tolist()]
    [3.333e-05, 2.0, 1e-05]

    Source: Yao, Gholami, Shen, Mustafa, Keutzer & Mahoney 2021, ADAHESSIAN, and the authors' code. Departs: with
    update_period > 1, q counts refreshes where others re-add a stale D every step (the same at update_period = 1);
    probes follow `seed`, not the global state; ranks average Hz, which the authors' all-reduce discards.
    """

    _needs_curvature = True
    _state_names = ("exp_avg", "hessian_sq")

    def __init__(
        self, params: Iterable[Any], lr: float | Tensor = 0.15, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-4, weight_decay: float = 0.0, hessian_power: float = 1.0, update_period: int = 1,
        average: str | int | None = "spatial", signed: bool = False, probe: str = "rademacher", seed: int = 0,
        process_group: dist.ProcessGroup | None = None, **how: Any,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "hessian_power": hessian_power}
        own = {"update_period": update_period, "average": average, "signed": signed, "probe": probe, "seed": seed}
        super().__init__(params, {**defaults, **own}, process_group=process_group, **how)

    def _check_settings(self, settings: dict[str, Any]) -> None:
        check_common("AdaHessian", settings["lr"], settings["betas"], settings["eps"], settings["weight_decay"])
        check_range(
            "AdaHessian",
            hessian_power=(settings["hessian_power"], "in (0, 1]", lambda value: 0.0 < value <= 1.0),
            average=(settings["average"], "'spatial', 'row', None or a block length of at least 1", _is_average),
        )
        super()._check_settings(settings)

    def update_hessian(self, closure: Callable[[], Tensor]) -> None:
        """Refresh the curvature by one Hessian-vector product of the loss that `closure` returns with its graph."""
        with torch.enable_grad():
            loss = closure()
        self._refresh_from(gradients(self, loss, self._params(), create_graph=True))

    @staticmethod
    def _update(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        if options["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * options["weight_decay"])
        means = states["exp_avg"]
        torch._foreach_lerp_(means, grads, 1 - options["betas"][0])
        denominators = torch._foreach_sqrt(states["hessian_sq"])
        if options["hessian_power"] != 1.0:
            torch._foreach_pow_(denominators, options["hessian_power"])
        torch._foreach_add_(denominators, options["eps"])
        add_quotients(params, means, denominators, options["scale"])

    @staticmethod
    def _step_numbers(step: Any, lr: Any, options: dict[str, Any]) -> dict[str, Any]:
        return {"scale": -lr / (1 - options["betas"][0] ** step)}

    def _refresh(self, param: Tensor, estimate: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        beta2, count = group["betas"][1], int(state["hessian_step"])
        averaged = _averaged(estimate if group["signed"] else estimate.abs(), param.dim(), group["average"])
        averaged = placed_like(averaged, estimate)
        kept = real_view(plain(state["hessian_sq"]))
        kept.lerp_(plain(averaged) ** 2, (1 - beta2) / (1 - beta2**count))


def _averaged(values: Tensor, num_dims: int, average: str | int | None) -> Tensor:
    """Replace `values` (a complex parameter's have one dim more) by the means of their blocks."""
    if isinstance(average, int) and num_dims > 1:
        return _block_means(values, average)
    if average is not None and num_dims in (4, 5):
        return values.mean(tuple(range(2, num_dims)), keepdim=True).expand_as(values)
    if average == "row" and num_dims in (2, 3):
        return values.mean(num_dims - 1, keepdim=True).expand_as(values)
    return values


def _block_means(values: Tensor, length: int) -> Tensor:
    """Means over `length` consecutive elements of the flattened tensor; what is left over is a shorter block."""
    if isinstance(values, DTensor):
        whole = _block_means(values.full_tensor(), length)
        return distribute_tensor(whole, values.device_mesh, values.placements, src_data_rank=None)
    flat = values.reshape(-1)
    num_whole = flat.numel() // length * length
    parts = [flat[:num_whole].view(-1, length).mean(1).repeat_interleave(length)]
    if num_whole < flat.numel():
        parts.append(flat[num_whole:].mean().expand(flat.numel() - num_whole))
    return torch.cat(parts).view_as(values)


def _is_average(value: Any) -> bool:
    return value in ("spatial", "row", None) or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


RECORD = OptimizerRecord(
    "adahessian",
    AdaHessian,
    "Adam with the Hessian's diagonal in place of the squared gradient",
    (kept("exp_avg"), kept("hessian_sq"), STEP, HESSIAN_STEP),
    list_temporaries(1),
    reads="matrix",
    extra_passes=(ExtraPass("hessian_vector"),),
    paper="Yao et al. 2021, ADAHESSIAN",
    departs="mean |D| over a kernel, as in the authors' code; with average=None it reads elements alone",
)
