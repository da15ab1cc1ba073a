"""Learning rate and momentum from the spectrum of the batch Hessian, measured now and then during training.

Ritz values r_i, weights τ_i of the Hessian of one training batch        `LanczosLR.measure`
L = max |r_i|,  ℓ = Σ τ_i |r_i| or the smallest positive r_i             `_edges`
α, ρ of Polyak's heavy ball, or α of plain descent                       `_rates`
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..artifacts import UserError
from ..numerics.hvp import HessianOperator
from ..numerics.lanczos import Lanczos, lanczos
from ..numerics.seeds import seeded


class LanczosLR(torch.optim.lr_scheduler.LRScheduler):
    r"""Set SGD's learning rate and momentum by the curvature of its batches.

    With L the largest and ℓ the smallest curvature seen by a few Lanczos steps on the Hessian of one batch,

        lr = safety · (2 / (√L + √ℓ))²,   momentum = ((√L − √ℓ) / (√L + √ℓ))²        rule="polyak"
        lr = safety · 2 / (L + ℓ)                                                    rule="plain"

    Measure on batches of the *training* size: small batches have larger curvature, the largest stable rate falls with
    the batch size, and a rate from the whole data diverges. For SGD, with or without heavy-ball momentum; not for Adam and
    other methods that scale coordinates, whose steps see another curvature. It is what is optimal for quadratics:
    elsewhere a start, hence `safety`. Layers such as BatchNorm in training mode, and dropout, are part of the
    function measured.

        for batch in loader:
            if schedule.due:
                schedule.measure(lambda: loss_fn(model(batch)))
            ...
            optimizer.step()
            schedule.step()

    optimizer: all its parameters together are one operator. Until the first measurement its own rates hold.
    interval: steps from one measurement to the next. num_lanczos: Hessian-vector products of each, 10–20; at 10
        every 100 steps they take about a fifth of the training time. Memory while measuring: 8 · num_lanczos bytes a parameter.
    rule: `polyak` needs optimizers with a `momentum` setting without dampening; `plain` leaves momentum alone.
    lower: ℓ as the `mean` of |r_i| by weight, for networks, whose spectra reach zero; or the `smallest` positive r_i.
    safety: 0.5 for noisy gradients, 1 for a deterministic quadratic. max_momentum: momentum is never above it.
    smoothing: of L and ℓ over measurements, 0 for none: new = smoothing · old + (1 − smoothing) · measured.
    num_warmup_steps: steps over which the rate rises linearly. seed: of the starting vectors; the same on every rank.
    process_group: data-parallel ranks, each with its part of the batch: the curvature is that of the whole batch, and
        every rank must measure. `None`: this process alone, or parameters that are sharded (`DTensor`).

    Raises `UserError` for settings out of range and for a loss without curvature.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> schedule = LanczosLR(optimizer, rule="plain", lower="smallest", safety=1.0)
    >>> found = schedule.measure(lambda: (torch.tensor([1.0, 4.0]) * weight**2).sum() / 2)
    >>> round(optimizer.param_groups[0]["lr"], 6)
    0.4

    Source: Granziol, Zohren, Roberts, *Learning Rates as a Function of Batch Size: A Random Matrix Theory Approach to
    Neural Network Training*, 2022, for the dependence on batches; Polyak 1964 for the rule. Their learner's code is
    not public: how ℓ is chosen, smoothing and safety are choices of this one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        interval: int = 100,
        num_lanczos: int = 10,
        rule: Literal["polyak", "plain"] = "polyak",
        lower: Literal["mean", "smallest"] = "mean",
        safety: float = 0.5,
        max_momentum: float = 0.99,
        smoothing: float = 0.0,
        num_warmup_steps: int = 0,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
        last_epoch: int = -1,
    ) -> None:
        _check(interval, num_lanczos, rule, lower, safety, max_momentum, smoothing, num_warmup_steps)
        if rule == "polyak":
            _check_momentum(optimizer)
        self.interval, self.num_lanczos, self.rule, self.lower, self.safety = interval, num_lanczos, rule, lower, safety
        self.max_momentum, self.smoothing, self.num_warmup_steps = max_momentum, smoothing, num_warmup_steps
        self.seed, self.num_measured = seed, 0
        self._process_group = process_group
        self.curvatures: tuple[float, float] | None = None
        """L and ℓ in use; `None` before the first measurement."""
        self.rate: float | None = None
        super().__init__(optimizer, last_epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state, without its optimizer and ranks."""
        return {key: value for key, value in super().state_dict().items() if key != "_process_group"}

    @property
    def due(self) -> bool:
        """Whether a measurement is due before the step to come."""
        return self.rate is None or self.last_epoch % self.interval == 0

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group for the step to come."""
        rise = min(1.0, (self.last_epoch + 1) / (self.num_warmup_steps + 1))
        return [(base if self.rate is None else self.rate) * rise for base in self.base_lrs]

    def measure(self, closure: Callable[[], Tensor]) -> Lanczos:
        """Measure the curvature of a batch, set the rates by it, and return the spectrum.

        closure: returns the loss of a batch of training size with its graph, without calling backward; no gradient is
            touched. With `process_group`, the mean loss of the rank's own part, all parts equally large.
        """
        params = [param for group in self.optimizer.param_groups for param in group["params"] if param.requires_grad]
        with torch.enable_grad():
            operator = HessianOperator(closure(), params)
        found = lanczos(
            functools.partial(_averaged, operator, self._process_group),
            max(1, operator.num_dims),
            self.num_lanczos,
            generator=seeded(self.seed, self.num_measured),
            dtype=params[0].dtype if not params[0].is_complex() else params[0].real.dtype,
            device=params[0].device,
        )
        self._take(found)
        return found

    def _take(self, found: Lanczos) -> None:
        seen = _edges(found, self.lower)
        if self.curvatures is not None:
            kept = self.smoothing
            seen = (kept * self.curvatures[0] + (1 - kept) * seen[0], kept * self.curvatures[1] + (1 - kept) * seen[1])
        self.curvatures, self.num_measured = seen, self.num_measured + 1
        self.rate, momentum = _rates(*seen, self.rule, self.safety)
        for group, lr in zip(self.optimizer.param_groups, self.get_lr()):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            if momentum is not None:
                group["momentum"] = min(momentum, self.max_momentum)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def _averaged(operator: HessianOperator, group: dist.ProcessGroup | None, vector: Tensor) -> Tensor:
    product = operator(vector)
    if group is not None:
        dist.all_reduce(product, group=group)
        product /= dist.get_world_size(group)
    return product


def batch_curvature(
    curvature: float, noise: float, num_params: int, batch_size: int, num_samples: float = math.inf
) -> float:
    r"""Return the largest eigenvalue of a batch's Hessian, from that of the whole data's, in the spiked Wigner model.

    With the noise of each element of a sample's Hessian of variance σ², 1/𝔟 = 1/B − 1/N and s = σ √(P/𝔟),

        λ₁(B) = λ₁ + s² / λ₁   where |λ₁| > s,   and the edge of the noise, 2s, otherwise.

    SGD is stable up to about 2 / λ₁(B): a rate that rises with B and saturates where B ≫ P σ² / λ₁². Scale the rate with
    the batch only below that.

    curvature: λ₁, not 0. noise: σ. num_params: P. batch_size: B. num_samples: N of the data.

    Raises `UserError` for counts below 1 and a batch larger than the data.

    >>> batch_curvature(10.0, noise=1.0, num_params=100, batch_size=4)
    12.5

    Source: Granziol, Zohren, Roberts, 2022 (see `LanczosLR`).
    """
    if not 1 <= batch_size <= num_samples or num_params < 1:
        raise UserError(
            f"1 ≤ batch_size ≤ num_samples and at least 1 parameter are needed; got {batch_size}, {num_samples} and "
            f"{num_params}; change them"
        )
    spread = noise * math.sqrt(num_params * (1 / batch_size - 1 / num_samples))
    return curvature + spread**2 / curvature if abs(curvature) > spread else 2 * spread


def _edges(found: Lanczos, lower: str) -> tuple[float, float]:
    sizes = found.ritz_values.abs()
    largest = float(sizes.max())
    if not 0 < largest < math.inf:
        raise UserError(
            f"a loss with curvature is needed; its largest is {largest}; measure a loss that the parameters reach nonlinearly"
        )
    if lower == "mean":
        return largest, float((found.weights * sizes).sum())
    # What is nothing beside the largest is rounding of a zero.
    positive = found.ritz_values[found.ritz_values > 1e-12 * largest]
    return largest, float(positive.min()) if len(positive) else largest


def _rates(largest: float, smallest: float, rule: str, safety: float) -> tuple[float, float | None]:
    if rule == "plain":
        return safety * 2 / (largest + smallest), None
    upper, low = math.sqrt(largest), math.sqrt(smallest)
    return safety * (2 / (upper + low)) ** 2, ((upper - low) / (upper + low)) ** 2


def _check(
    interval: int,
    num_lanczos: int,
    rule: str,
    lower: str,
    safety: float,
    max_momentum: float,
    smoothing: float,
    warmup: int,
) -> None:
    counts = interval >= 1 and num_lanczos >= 1 and warmup >= 0
    if not counts or not safety > 0 or not 0 <= max_momentum < 1 or not 0 <= smoothing < 1:
        raise UserError(
            "interval and num_lanczos of at least 1, safety above 0, max_momentum and smoothing in [0, 1) and no negative "
            f"num_warmup_steps are needed; got {interval}, {num_lanczos}, {safety}, {max_momentum}, {smoothing} and {warmup}; "
            "change them"
        )
    if rule not in ("polyak", "plain") or lower not in ("mean", "smallest"):
        raise UserError(
            f"rule polyak or plain and lower mean or smallest are needed; got {rule!r} and {lower!r}; choose"
        )


def _check_momentum(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        if "momentum" not in group or group.get("dampening", 0) != 0 or group.get("nesterov"):
            raise UserError(
                f"an optimizer with heavy-ball momentum is needed for rule='polyak'; {type(optimizer).__name__} has none, or with "
                "dampening or Nesterov's correction; take torch.optim.SGD, or rule='plain'"
            )
