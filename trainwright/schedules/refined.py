"""A schedule refined by the gradient norms of a run before: its own warm-up, and annealing as sharp as they call for.

weights w of a median-filtered run      `refined_weights`
η_t = w_t · Σ_{p>t} w_p / Σ_p w_p       `schedule_of_weights`
of another number of steps              w is interpolated, not η     `_resampled`
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ..artifacts import UserError
from .gradient_norms import Order
from .last_iterate import bound_factors
from .linear import ScheduledFactors


class RefinedSchedule(ScheduledFactors):
    r"""Follow the schedule that minimises the last-iterate bound for the gradient norms of an earlier run.

    From the norms G_t of a run (`GradientNormLog`), smoothed: w_t = G_t⁻² (`order=2`, SGD) or G_t⁻¹ (`order=1`, Adam),

        η_t = w_t · Σ_{p>t} w_p / Σ_p w_p,

    scaled to a maximum of 1 and multiplied by the learning rate that each group has. Large early gradients give a
    warm-up, growing late ones a faster annealing; constant ones give linear decay. Train once with `LinearDecay` (a
    short warm-up for deep networks), log the norms before clipping, then train again with this. It costs that run, or
    a shorter one. Do not refine from the log of a refined run: that is no fixed point.

    optimizer: whose groups' learning rates are the peaks.
    norms: of the earlier run, one a step, at least 2.
    num_steps: steps of this run; `None`: as many as `norms`. Another number interpolates the weights.
    order: of the norms, 2 for SGD and 1 for Adam.
    minimise: `False` takes the formula; `True` minimises the last-iterate bound itself by L-BFGS (`bound_factors`), which
        the formula does not quite: T variables, seconds for 10⁴ steps. For `order=2`.
    smoothing: the median filter's width as a share of the run; unsmoothed norms (0) give spiky schedules.
    latest_peak: the share of the run after which the schedule may not peak. Where gradients vanish at the end (the
        network interpolates its data) weights explode there; the schedule is then linear decay, with a warning, and
        `fell_back` says why. `None` never falls back.

    Raises `UserError` for norms that are not finite or negative, fewer than 2 of them, or settings out of range.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> schedule = RefinedSchedule(torch.optim.SGD([weight], lr=1.0), [1.0, 1.0, 1.0, 1.0])
    >>> [round(factor, 2) for factor in schedule.factors]
    [1.0, 0.75, 0.5, 0.25]

    Source: Defazio, Cutkosky, Mehta, Mishchenko, *Optimal Linear Decay Learning Rate Schedules and Further
    Refinements*, 2023. It departs in that the step of learning rate zero is left out (the last weight is repeated in
    its place), and in falling back to linear decay by a stated rule.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        norms: Sequence[float],
        *,
        num_steps: int | None = None,
        order: Order = 2,
        smoothing: float = 0.1,
        latest_peak: float | None = 0.5,
        minimise: bool = False,
        last_epoch: int = -1,
    ) -> None:
        num_steps = len(norms) if num_steps is None else num_steps
        _check(num_steps, latest_peak)
        self.fell_back = ""
        weights = _resampled(refined_weights(norms, order, smoothing), num_steps)
        factors = _minimised(weights, order) if minimise else schedule_factors(weights)
        if latest_peak is not None and (reason := _degenerate(factors, latest_peak)):
            self.fell_back = reason
            warnings.warn(f"RefinedSchedule is linear decay instead: {reason}", stacklevel=2)
            factors = schedule_factors(np.ones(num_steps))
        super().__init__(optimizer, factors.tolist(), last_epoch)


def schedule_of_weights(weights: ArrayLike) -> NDArray[np.float64]:
    r"""Return η_t = w_t · Σ_{p>t} w_p / Σ_p w_p, [num_steps]; the last is 0.

    Of gradient descent with these learning rates, f(x_T) − f(u) ≤ (1/Σw) Σ_t w_t ⟨g_t, z_t − u⟩ for convex f, where z
    is the online learner z_{t+1} = z_t − w_t g_t.

    weights: [num_steps], not negative, at least one positive.

    >>> schedule_of_weights([1, 1, 1, 1]).tolist()
    [0.75, 0.5, 0.25, 0.0]
    """
    given = np.asarray(weights, dtype=np.float64)
    if given.ndim != 1 or not np.isfinite(given).all() or (given < 0).any() or not given.sum() > 0:
        raise UserError("weights of at least one positive, none negative, are needed; got others; check the norms")
    tails = np.append(np.cumsum(given[::-1])[::-1][1:], 0.0)
    return given * tails / given.sum()


def refined_weights(norms: Sequence[float], order: Order = 2, smoothing: float = 0.1) -> NDArray[np.float64]:
    """Return w_t of gradient norms, [num_steps]: their median-filtered −2nd (`order=2`) or −1st (`order=1`) power.

    The filter's width is 2⌊smoothing · T / 2⌋ + 1; beyond the right end the norms are reflected, beyond the left the
    first is repeated. Norms of zero count as the smallest positive one times 1e-6. Errors as for `RefinedSchedule`.

    >>> refined_weights([1.0, 2.0], order=1, smoothing=0).tolist()
    [1.0, 0.5]
    """
    given = np.asarray(norms, dtype=np.float64)
    if given.ndim != 1 or len(given) < 2 or not np.isfinite(given).all() or (given < 0).any() or not given.any():
        raise UserError(
            f"gradient norms of at least 2 steps are needed, finite and positive; got {_described(given)}; "
            "log them before clipping, with GradientNormLog"
        )
    if order not in (1, 2) or not 0 <= smoothing <= 1:
        raise UserError(f"order 1 or 2 and smoothing in [0, 1] are needed; got {order!r} and {smoothing}; change them")
    smooth = _median(given, 2 * int(smoothing * len(given) / 2) + 1)
    floor = 1e-6 * given[given > 0].min()
    return np.maximum(smooth, floor) ** -(2.0 if order == 2 else 1.0)


def _median(values: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    from scipy.ndimage import median_filter  # every process that trains would take its time to import

    padded = np.pad(values, (0, 2 * width), mode="reflect")
    return median_filter(padded, size=width, mode="nearest")[: len(values)]


def _resampled(weights: NDArray[np.float64], num_steps: int) -> NDArray[np.float64]:
    if num_steps == len(weights):
        return weights
    middles = (np.arange(num_steps) + 0.5) / num_steps
    return np.interp(middles, (np.arange(len(weights)) + 0.5) / len(weights), weights)


def schedule_factors(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """The schedule over the weights and one more like the last, whose own learning rate, 0, is dropped."""
    schedule = schedule_of_weights(np.append(weights, weights[-1]))[:-1]
    return schedule / schedule.max()


def _minimised(weights: NDArray[np.float64], order: Order) -> NDArray[np.float64]:
    """The schedule that minimises the bound for the norms that these weights stand for."""
    if order != 2:
        raise UserError(
            "the bound of the last iterate is one of norms of order 2; got order=1; leave out minimise=True"
        )
    return bound_factors(weights**-0.5)


def _degenerate(factors: NDArray[np.float64], latest_peak: float) -> str:
    peak = int(factors.argmax())
    if peak < max(1, latest_peak * len(factors)):
        return ""
    return f"gradients that vanish put the peak at step {peak} of {len(factors)}, after latest_peak={latest_peak} of the run"


def _check(num_steps: int, latest_peak: float | None) -> None:
    if num_steps < 1 or not (latest_peak is None or 0 < latest_peak <= 1):
        raise UserError(
            f"RefinedSchedule needs num_steps of at least 1 and latest_peak in (0, 1] or None; got {num_steps} and "
            f"{latest_peak}; change them"
        )


def _described(values: NDArray[np.float64]) -> str:
    if values.ndim != 1 or len(values) < 2:
        return f"an array of shape {values.shape}"
    return "zeros alone" if not values.any() else "some that are negative or not finite"
