"""Armijo backtracking: the first of a falling sequence of steps that lowers a function by enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LineSearch:
    """The step that was chosen, the value there, and how many values that took."""

    step: float
    value: float
    num_trials: int
    accepted: bool
    """Whether `value` meets the condition; if not, `step` is the last one tried, and nothing is promised of it."""


def armijo(
    value_at: Callable[[float], float], value: float, slope: float, *, step: float,
    sufficient: float = 1e-4, shrink: float = 0.5, max_trials: int = 100, min_step: float = 0.0,
) -> LineSearch:  # fmt: skip
    r"""Find s = step·shrink^k, k = 0, 1, …, with φ(s) ≤ φ(0) + sufficient·s·φ'(0).

    `value_at(s)` is φ(s), `value` φ(0) and `slope` φ'(0) < 0: for a step along -∇f it is -‖∇f‖². A value of NaN or
    infinity is no decrease. Ends unaccepted after `max_trials`, or where the next step would be below `min_step`.

    Raises `ValueError` for a slope that is not negative and settings out of range. Not for noisy values: near the
    function's rounding error no step is accepted.

    >>> found = armijo(lambda s: (1 - 4 * s) ** 2, 1.0, -8.0, step=1.0)
    >>> found.step, found.value, found.num_trials
    (0.25, 0.0, 3)

    Source: Armijo 1966; Nocedal & Wright 2006, algorithm 3.1.
    """
    _check(slope, step, sufficient, shrink, max_trials)
    trials = 0
    while True:
        found = value_at(step)
        trials += 1
        if found <= value + sufficient * step * slope:
            return LineSearch(step, found, trials, True)
        if trials >= max_trials or step * shrink < min_step:
            return LineSearch(step, found, trials, False)
        step *= shrink


def _check(slope: float, step: float, sufficient: float, shrink: float, max_trials: int) -> None:
    if not slope < 0.0:
        raise ValueError(f"a direction of descent is needed, slope < 0; got slope {slope}; reverse the direction")
    if not (step > 0.0 and 0.0 < sufficient < 1.0 and 0.0 < shrink < 1.0 and max_trials >= 1):
        raise ValueError(
            "armijo needs step > 0, sufficient and shrink in (0, 1), max_trials ≥ 1; "
            f"got {step}, {sufficient}, {shrink}, {max_trials}; give such values"
        )
