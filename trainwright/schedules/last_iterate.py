r"""The bound on the last iterate of SGD for any learning rates, and the learning rates that minimise it.

f(x_T) − f* ≤ D²/(2Σ) + Σ_t η_t²G_t²/(2Σ) + ½ Σ_{k<T} η_k/S_{k+1} · Q_k/S_k          `last_iterate_bound`
S_k = Σ_{t≥k} η_t,  Σ = S_1,  Q_k = Σ_{t≥k} η_t² G_t²
with η = c · shape, the best c leaves D √(A B):  A = 1/Σ, B the rest at c = 1         `bound_factors`
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..artifacts import UserError

_LEAST = 1e-12
"""Of a factor beside the largest: it is minimised over logarithms."""
Progress = Callable[[int, float], None]


def last_iterate_bound(lrs: ArrayLike, norms: ArrayLike, distance: float) -> float:
    r"""Return the bound on f(x_T) − f* of SGD's last iterate, for convex f with gradient norms G_t.

    With S_k = Σ_{t≥k} η_t and Q_k = Σ_{t≥k} η_t² G_t²,

        D²/(2 S_1) + Q_1/(2 S_1) + ½ Σ_{k<T} η_k/S_{k+1} · Q_k/S_k

    x_T is the point that the T-th gradient is taken at: its own step η_T is not part of it, and any η_T gives a bound.

    lrs: η_t > 0, one a gradient. norms: G_t, ℓ₂, as many. distance: D, from the start to a minimiser.

    Raises `UserError` for lengths that differ, and for numbers that are not finite or rates that are not positive.

    >>> last_iterate_bound([0.5], [2.0], distance=1.0)
    2.0

    Source: Defazio, Cutkosky, Mehta, Mishchenko, *Optimal Linear Decay Learning Rate Schedules and Further
    Refinements*, 2023; it follows from the regret of each tail of the run.
    """
    given, squares = _checked(lrs, norms)
    spread, noise = _terms(given, squares)
    return float(distance**2 * spread / 2 + noise / 2)


def bound_factors(
    norms: ArrayLike, *, max_iterations: int = 500, progress: Progress | None = None
) -> NDArray[np.float64]:
    r"""Return the learning rates that minimise `last_iterate_bound`, as factors of their maximum, [num_steps].

    Over η = c · shape the best c gives D √(A(shape) · B(shape)), so the shape does not depend on D. L-BFGS over the
    logarithms of T variables, O(T) an iteration, from G_t⁻² times linear decay. The point behind the last step counts with the
    last norm; the step after it, which the bound has and a run has not, is left out.

    norms: G_t, smoothed. max_iterations: of L-BFGS. progress: called with (iteration, bound at D = 1).

    >>> factors = bound_factors([1.0] * 8)
    >>> bool((factors[1:] < factors[:-1]).all())
    True
    """
    from scipy.optimize import minimize  # every process that trains would take its time to import

    given = np.asarray(norms, dtype=np.float64)
    given = np.append(given, given[-1:])
    least = 1e-6 * given[given > 0].min() if (given > 0).any() else 1.0
    floored = np.maximum(given, least)
    start, squares = _checked(floored**-2 * np.arange(len(given), 0, -1), floored)
    count = [0]

    def objective(logs: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        free = torch.from_numpy(logs.copy()).requires_grad_()
        spread, noise = _terms(free.exp(), squares)
        value = (spread.log() + noise.log()) / 2
        (slope,) = torch.autograd.grad(value, free)
        return float(value.detach()), slope.numpy()

    def told(logs: NDArray[np.float64]) -> None:
        count[0] += 1
        if progress is not None:
            progress(count[0], float(np.exp(objective(logs)[0])))

    first = np.log(np.maximum(start.numpy(), _LEAST * float(start.max())))
    options = {"maxiter": max_iterations, "maxfun": 4 * max_iterations, "maxcor": 30, "ftol": 1e-14, "gtol": 1e-9}
    found = minimize(objective, first, jac=True, method="L-BFGS-B", options=options, callback=told)
    best = found.x if found.fun <= objective(first)[0] else first
    return np.exp(best[:-1] - best[:-1].max())


def _terms(lrs: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Return 1/Σ, and what multiplies ½ beside D²/Σ."""
    tails, sums = _from_the_end(lrs), _from_the_end(lrs**2 * squares)
    inner = (lrs[:-1] / tails[1:] * sums[:-1] / tails[:-1]).sum()
    return 1 / tails[0], sums[0] / tails[0] + inner


def _from_the_end(values: Tensor) -> Tensor:
    return values.flip(0).cumsum(0).flip(0)


def _checked(lrs: ArrayLike, norms: ArrayLike) -> tuple[Tensor, Tensor]:
    given, sizes = (torch.as_tensor(np.asarray(values, dtype=np.float64)) for values in (lrs, norms))
    fine = given.shape == sizes.shape and given.dim() == 1 and len(given) > 0
    if not fine or not torch.isfinite(given).all() or not torch.isfinite(sizes).all() or not bool((given > 0).all()):
        raise UserError(
            f"learning rates above 0 and as many finite norms are needed; got {tuple(given.shape)} and {tuple(sizes.shape)}; "
            "leave out steps of rate 0"
        )
    return given, sizes**2
