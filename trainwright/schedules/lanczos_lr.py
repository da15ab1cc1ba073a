"""Learning rate and momentum from the spectrum of the batch Hessian, measured now and then during training.

Ritz values r_i, weights τ_i of the Hessian of one training batch        `LanczosLR.measure`
L = max |r_i|,  ℓ = Σ τ_i |r_i| or the smallest positive r_i             `_edges`
α of plain descent, or α and ρ of the heavy ball                         `_rates`
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from ..artifacts import UserError, check_range
from ..numerics.hvp import HessianOperator
from ..numerics.lanczos import Lanczos, lanczos
from ..numerics.seeds import seeded

Rule = Literal["plain", "heavy-ball", "polyak"]


class LanczosLR(torch.optim.lr_scheduler.LRScheduler):
    r"""Set SGD's learning rate and momentum by the curvature of its batches.

    With L the largest and ℓ the typical curvature seen by a few Lanczos steps on the Hessian of one batch, and
    ρ = ((√L − √ℓ) / (√L + √ℓ))² Polyak's momentum,

        lr = safety · 2 / (L + ℓ)                                                    rule="plain"
        lr = safety · (1 − ρ) · 2 / (L + ℓ),           momentum = ρ                  rule="heavy-ball"
        lr = safety · (2 / (√L + √ℓ))²,                momentum = ρ                  rule="polyak"

    Each rate is at most `max_lr` and at most `max_growth` times the one before. Measure on batches of the *training* size:
    small batches have larger curvature, the largest stable rate falls with the batch size, and a rate from the whole data
    diverges. Layers such as BatchNorm in training mode, and dropout, are part of the function measured.

    Not for Adam and other methods that scale coordinates: their steps see another curvature (`scaled_lr` says how their
    rates go with the batch). The rules are optimal for quadratics; for networks they give a stable rate, seldom the best.

        for batch in loader:
            if schedule.due:
                schedule.measure(lambda: loss_fn(model(batch)))
            ...
            optimizer.step()
            schedule.step()

    optimizer: all its parameters together are one operator. Until the first measurement its own rates hold.
    interval: steps from one measurement to the next. The curvature of a network rises fast at first, so the steps 1, 2, 4,
        8 … before the first interval ends measure too.
    num_lanczos: Hessian-vector products of each measurement, 10–20; each costs about two further steps' gradients, so that
        10 of them every 100 steps take about a fifth of the training time. Memory while measuring: 8 · num_lanczos bytes a
        parameter.
    rule: `plain` leaves momentum alone, and where there is one, μ, takes 1 − μ of the rate: the step that adds up is the
        same. `heavy-ball` takes Polyak's momentum and the rate whose accumulated step is the
        plain rule's. `polyak` is for deterministic gradients (full batches, quadratics): with the noise of batches its
        accumulated step, lr / (1 − ρ), is beyond what is stable. Both need a `momentum` setting without dampening.
    lower: ℓ as the `mean` of |r_i| by weight, for networks, whose spectra reach zero; or the `smallest` positive r_i.
    safety: 0.25 for batches of any size: the curvature of a network rises by five to ten times while it learns, and a step
        between two measurements has to stand it. 0.5 where batches are large, 1 for a deterministic quadratic.
    max_momentum: momentum is never above it.
    max_lr: largest rate; `math.inf` for none, as a quadratic with small curvature wants.
    max_growth: largest ratio of a rate to the one measured before; `math.inf` for none.
    smoothing: of L and ℓ over measurements, 0 for none: new = smoothing · old + (1 − smoothing) · measured, and L never
        below what was measured. So L rises at once and falls slowly: a step must be stable on the batches that curve most,
        and of small batches some are all but flat.
    num_warmup_steps: steps over which the rate rises linearly. seed: of the starting vectors; the same on every rank.
    process_group: data-parallel ranks, each with its part of the batch: the curvature is that of the whole batch, and
        every rank must measure. `None`: this process alone, or parameters that are sharded (`DTensor`).

    Raises `UserError` for settings out of range, and for a loss without curvature at the first measurement; a later one
    that finds none leaves the rates as they are.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> schedule = LanczosLR(optimizer, lower="smallest", safety=1.0, num_warmup_steps=0)
    >>> found = schedule.measure(lambda: (torch.tensor([1.0, 4.0]) * weight**2).sum() / 2)
    >>> round(optimizer.param_groups[0]["lr"], 6)
    0.4

    Source: Granziol, Zohren, Roberts, *Learning Rates as a Function of Batch Size: A Random Matrix Theory Approach to
    Neural Network Training*, 2022, for the dependence on batches; Polyak 1964 for the rule. Their learner's code is
    not public: how ℓ is chosen, when it measures, smoothing, safety and the caps are choices of this one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        interval: int = 100,
        num_lanczos: int = 10,
        rule: Rule = "plain",
        lower: Literal["mean", "smallest"] = "mean",
        safety: float = 0.25,
        max_momentum: float = 0.99,
        max_lr: float = 1.0,
        max_growth: float = 2.0,
        smoothing: float = 0.9,
        num_warmup_steps: int = 20,
        seed: int = 0,
        process_group: dist.ProcessGroup | None = None,
        last_epoch: int = -1,
    ) -> None:
        at_least_1, above_0 = ("of at least 1", lambda value: value >= 1), ("above 0", lambda value: value > 0)
        below_1 = ("in [0, 1)", lambda value: 0 <= value < 1)
        check_range(
            "LanczosLR",
            interval=(interval, *at_least_1),
            num_lanczos=(num_lanczos, *at_least_1),
            rule=(rule, f"one of {', '.join(get_args(Rule))}", lambda value: value in get_args(Rule)),
            lower=(lower, "mean or smallest", lambda value: value in ("mean", "smallest")),
            safety=(safety, *above_0),
            max_momentum=(max_momentum, *below_1),
            max_lr=(max_lr, *above_0),
            max_growth=(max_growth, "above 1", lambda value: value > 1),
            smoothing=(smoothing, *below_1),
            num_warmup_steps=(num_warmup_steps, "of at least 0", lambda value: value >= 0),
        )
        if rule != "plain":
            _check_momentum(optimizer, rule)
        self.interval, self.num_lanczos, self.rule, self.lower, self.safety = interval, num_lanczos, rule, lower, safety
        self.max_momentum, self.max_lr, self.max_growth = max_momentum, max_lr, max_growth
        self.smoothing, self.num_warmup_steps = smoothing, num_warmup_steps
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
        step = self.last_epoch
        early = step < self.interval and step & (step - 1) == 0
        return self.rate is None or early or step % self.interval == 0

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group for the step to come."""
        rise = min(1.0, (self.last_epoch + 1) / (self.num_warmup_steps + 1))
        if self.rate is None:
            return [base * rise for base in self.base_lrs]
        return [self.rate * rise * self._share(group) for group in self.optimizer.param_groups]

    def _share(self, group: dict[str, Any]) -> float:
        """Return the share of the rate for one step, where the optimizer's own momentum adds steps up to the rest."""
        if self.rule != "plain":
            return 1.0
        return (1 - group.get("momentum", 0.0)) / (1 - group.get("dampening", 0.0))

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
        self.num_measured += 1
        seen = _edges(found, self.lower)
        if seen is None:
            if self.curvatures is None:
                raise UserError(
                    "LanczosLR needs a loss that curves; the curvature of this one is 0 in every direction that was tried; "
                    "measure a loss that the parameters reach nonlinearly"
                )
            return
        if self.curvatures is not None:
            largest, lower = (
                self.smoothing * old + (1 - self.smoothing) * new for old, new in zip(self.curvatures, seen)
            )
            seen = (max(seen[0], largest), lower)
        self.curvatures = seen
        rate, momentum = _rates(*seen, self.rule, self.safety)
        self.rate = min(rate, self.max_lr, math.inf if self.rate is None else self.max_growth * self.rate)
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


def _edges(found: Lanczos, lower: str) -> tuple[float, float] | None:
    """L and ℓ; `None` where there is no curvature."""
    sizes = found.ritz_values.abs()
    largest = float(sizes.max())
    if largest == 0:
        return None
    if lower == "mean":
        return largest, float((found.weights * sizes).sum())
    # What is nothing beside the largest is rounding of a zero.
    positive = found.ritz_values[found.ritz_values > 1e-12 * largest]
    return largest, float(positive.min()) if len(positive) else largest


def _rates(largest: float, lower: float, rule: str, safety: float) -> tuple[float, float | None]:
    plain = safety * 2 / (largest + lower)
    if rule == "plain":
        return plain, None
    upper, low = math.sqrt(largest), math.sqrt(lower)
    momentum = ((upper - low) / (upper + low)) ** 2
    return (1 - momentum) * plain if rule == "heavy-ball" else safety * (2 / (upper + low)) ** 2, momentum


def _check_momentum(optimizer: torch.optim.Optimizer, rule: str) -> None:
    for group in optimizer.param_groups:
        if "momentum" not in group or group.get("dampening", 0) != 0 or group.get("nesterov"):
            raise UserError(
                f"rule={rule!r} needs an optimizer with heavy-ball momentum; {type(optimizer).__name__} has none, or has it with "
                "dampening or Nesterov's correction; take torch.optim.SGD, or rule='plain'"
            )
