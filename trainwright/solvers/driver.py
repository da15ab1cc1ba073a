"""`drive`: the one loop of every iterative solver: limits, tolerances, NaN and divergence, callbacks, history, progress.

An algorithm gives `step(state) -> state` (a new state; what an old state holds is not written to) and
`measure(state) -> Measured`; it counts its oracle calls in a `Counts`. Formula → function:

    residual ≤ max(atol, rtol · residual at the start)  → CONVERGED      `_Loop.verdict`
    residual > divergence · residual at the start        → DIVERGED       `_Loop.verdict`
    residual or objective not finite                     → NOT_FINITE     `_Loop.verdict`
"""

from __future__ import annotations

import math
import numbers
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..artifacts import UserError
from .outcome import Status
from .seeds import need_count

State = TypeVar("State")


@dataclass(frozen=True)
class Measured:
    """How far a state is: `residual` (≥ 0, what the tolerance is held against; NaN where it is not known) and the objective."""

    residual: float
    fun: float = math.nan
    extra: Mapping[str, float] = field(default_factory=dict)
    """More columns for the history."""


@dataclass(frozen=True)
class Limits:
    """When to stop. `rtol` is relative to the residual at the start; with both tolerances 0 the budget itself is the goal.

    A run without a tolerance that spends its budget, of iterations, evaluations or seconds, is COMPLETED, a success; one
    with a tolerance that it has not met is not.
    """

    max_iterations: int
    rtol: float = 0.0
    atol: float = 0.0
    max_evaluations: int | None = None
    """Of the count named `nfev`; looked at between steps, so that the last step may go beyond it."""
    max_seconds: float | None = None
    divergence: float = 1e12
    check_every: int = 1
    """Steps between two measurements; the last state is always measured."""

    @property
    def has_tolerance(self) -> bool:
        return self.rtol > 0 or self.atol > 0

    def __post_init__(self) -> None:
        for name, low in (("max_iterations", 0), ("check_every", 1)):
            object.__setattr__(self, name, need_count(name, getattr(self, name), low))
        for name, low in (("rtol", 0), ("atol", 0), ("divergence", 1), ("max_evaluations", 0), ("max_seconds", 0)):
            value = getattr(self, name)
            if value is None and name.startswith("max_"):
                continue
            if not isinstance(value, numbers.Real) or not float(value) >= low:
                raise UserError(f"{name} of at least {low} is needed; got {value!r}; give such a value")


class Counts(Counter[str]):
    """Oracle calls by name, as the theory counts them: `counts.add(nsfo=2)`; `nfev` is what `max_evaluations` limits."""

    def add(self, **calls: int) -> None:
        self.update(calls)


@dataclass(frozen=True)
class Moment(Generic[State]):
    """What a callback sees: `callback(moment)` returning True, or raising StopIteration, stops the run."""

    nit: int
    state: State
    measured: Measured
    counts: Mapping[str, int]
    seconds: float


Callback = Callable[[Moment[Any]], bool | None]


@dataclass(frozen=True)
class LoopResult(Generic[State]):
    """How the loop ended: the last finite state, the best one by residual (by objective where there is no residual)."""

    last: State
    best: State
    measured: Measured
    best_measured: Measured
    status: Status
    nit: int
    counts: Counts
    history: dict[str, list[float]]

    @property
    def message(self) -> str:
        return self.status.value


def drive(
    state: State,
    step: Callable[[State], State],
    measure: Callable[[State], Measured],
    limits: Limits,
    *,
    counts: Counts | None = None,
    callback: Callback | None = None,
    keep_history: bool = False,
    progress: Callable[[str], None] | None = None,
) -> LoopResult[State]:
    """Step until a tolerance or a limit is met; see the module's description.

    `step` may raise `Ended(status)` where it cannot go on (a breakdown, no descent): the state before it stands.
    `progress` gets a line at most once a second. A `KeyboardInterrupt` ends the run as STOPPED with the best so far.
    `rtol` and `divergence` are relative to the first residual that is known, that is, not NaN.

    >>> halve = lambda x: x / 2
    >>> run = drive(8.0, halve, lambda x: Measured(residual=abs(x)), Limits(100, rtol=1e-3))
    >>> run.status.name, run.nit, run.last
    ('CONVERGED', 10, 0.0078125)
    """
    loop: _Loop[State] = _Loop(limits, counts if counts is not None else Counts(), callback, keep_history, progress)
    return loop.run(state, step, measure)


class Ended(Exception):
    """Raised by a step that cannot go on, with the `Status` that says why."""

    def __init__(self, status: Status) -> None:
        super().__init__(status.value)
        self.status = status


class _Loop(Generic[State]):
    def __init__(self, limits: Limits, counts: Counts, callback: Callback | None, keep_history: bool,
                 progress: Callable[[str], None] | None) -> None:  # fmt: skip
        self.limits, self.counts, self.callback, self.progress = limits, counts, callback, progress
        self.keep_history = keep_history
        self.history: dict[str, list[float]] = {}
        self.start = self.told = time.monotonic()
        self.first = math.nan
        """The first residual that is known."""

    def run(
        self, state: State, step: Callable[[State], State], measure: Callable[[State], Measured]
    ) -> LoopResult[State]:
        nit, last, best, status = 0, state, state, None
        measured = best_measured = Measured(math.nan)
        try:
            measured = best_measured = measure(state)
            status = self.verdict(nit, state, measured)
            while status is None:
                state = step(state)
                nit += 1
                if nit % self.limits.check_every and nit < self.limits.max_iterations and not self._out_of_budget():
                    continue
                found = measure(state)
                status = self.verdict(nit, state, found)
                if status in (Status.NOT_FINITE, Status.DIVERGED):
                    break
                last, measured = state, found
                if _better(found, best_measured):
                    best, best_measured = state, found
        except Ended as ended:
            status = ended.status
        except KeyboardInterrupt:  # in a step, a measurement or the callback
            status = Status.STOPPED
        assert status is not None
        return LoopResult(last, best, measured, best_measured, status, nit, self.counts, self.history)

    def verdict(self, nit: int, state: State, measured: Measured) -> Status | None:
        """Return why to stop at this state, or `None`; the history and the callback see it first."""
        self._record(nit, measured)
        limits, residual = self.limits, measured.residual
        if math.isinf(residual) or math.isinf(measured.fun) or (math.isnan(residual) and math.isnan(measured.fun)):
            return Status.NOT_FINITE
        if math.isnan(residual) and not math.isnan(self.first):
            return Status.NOT_FINITE
        if math.isnan(self.first):
            self.first = residual
        if residual > limits.divergence * max(self.first, 1e-300):
            return Status.DIVERGED
        asked = self._asked_to_stop(Moment(nit, state, measured, self.counts, time.monotonic() - self.start))
        if limits.has_tolerance and residual <= max(limits.atol, limits.rtol * self.first):
            return Status.CONVERGED
        return Status.STOPPED if asked else self._limit(nit)

    def _asked_to_stop(self, moment: Moment[State]) -> bool:
        """SciPy's callbacks raise StopIteration; ours return True."""
        try:
            return self.callback is not None and bool(self.callback(moment))
        except StopIteration:
            return True

    def _limit(self, nit: int) -> Status | None:
        spent = self._spent(nit)
        return Status.COMPLETED if spent is not None and not self.limits.has_tolerance else spent

    def _spent(self, nit: int) -> Status | None:
        limits = self.limits
        if limits.max_evaluations is not None and self.counts["nfev"] >= limits.max_evaluations:
            return Status.MAX_EVALUATIONS
        if limits.max_seconds is not None and time.monotonic() - self.start >= limits.max_seconds:
            return Status.MAX_SECONDS
        return Status.MAX_ITERATIONS if nit >= limits.max_iterations else None

    def _out_of_budget(self) -> bool:
        return self._limit(0) is not None if self.limits.max_iterations > 0 else True

    def _record(self, nit: int, measured: Measured) -> None:
        if self.keep_history:
            row = {
                "nit": nit,
                "residual": measured.residual,
                "fun": measured.fun,
                "seconds": time.monotonic() - self.start,
            }
            num_before = len(self.history.get("nit", ()))
            for name, value in {**row, **measured.extra, **self.counts}.items():
                # A count whose first call comes later was zero until then: columns stay of one length.
                self.history.setdefault(name, [0.0] * num_before).append(float(value))
        if self.progress is not None and time.monotonic() - self.told >= 1.0:
            self.told = time.monotonic()
            self.progress(f"iteration {nit}: residual {measured.residual:.3g}, objective {measured.fun:.6g}")


def _better(one: Measured, other: Measured) -> bool:
    if math.isnan(one.residual) != math.isnan(other.residual):
        return math.isnan(other.residual)
    if math.isnan(one.residual):
        return one.fun < other.fun or math.isnan(other.fun)
    return one.residual < other.residual
