"""The share of the parameters' communication that computation hides, on devices that overlap the two.

    E ≥ P − ω · C          of the forward and of the backward, each
    seconds  δ · P + (1 − δ) · E    in place of P

P are the seconds of the collectives that are issued early (`joined`), C those of computation, reruns included; E are the
exposed seconds. P leaves out what nothing can hide (`rank.travel`): the parameters of the first region, before which and
after whose gradients nothing is computed, and the last buffer of gradients that stay whole. ω < 1, since a collective is hidden
by what runs at that moment, not by the whole phase (`overlap.Timeline`), and δ > 0, so that the solver moves nothing needlessly.

In a long program E makes branch and bound slow: reruns add to C, gathers to P, and every mixture of the two is about as good.
There a price λ replaces E in each phase: the dual of the row in the relaxation with E, which every search solves first.

    seconds  δ · P + (1 − δ) · λ · (P − ω · C),  0 ≤ λ ≤ 1,  in place of P

For any λ that is no more than the seconds with E, so a bound of it bounds those; solutions are compared by the seconds with E.

Collectives in flight also delay exchanges over the same link, which the objective ignores. Where the price of a plan shows such
a delay, `ways` searches once more, with the δ that the price showed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..problem.problem import Problem
from .deadline import Deadline
from .milp import Model, Relaxation, Terms, Vertex
from .recompute import Recompute
from .sharding import Sharding

HIDES = 0.9
"""ω: the share of computation that hides communication."""
EXPOSED = 0.05
"""δ: the share of early communication that stays exposed however much is computed, unless a plan shows another."""
HIDDEN = "what computation hides of what is on its way"


@dataclass(eq=False)
class Hidden:
    """The rows of both phases in the model of a long program, where a solve may replace E by λ."""

    model: Model
    phases: tuple[_Phase, ...]
    delta: float
    """δ"""

    def weighed(self, relaxation: Relaxation, time_limit_s: float, deadline: Deadline) -> dict[int, float]:
        """Return the costs with each λ at its row's dual in the relaxation, 0 where that is unknown, and charge it by them."""
        prices = [0.0 for _ in self.phases]
        if isinstance(relaxation.solve(time_limit_s=time_limit_s, deadline=deadline), Vertex):
            duals = relaxation.duals([phase.row for phase in self.phases])
            prices = [min(1.0, max(0.0, -dual / (1 - self.delta))) for dual in duals]
        costs = self.priced(prices)
        relaxation.charge({column: costs[column] for phase in self.phases for column in phase.columns})
        return costs

    def priced(self, prices: Sequence[float] = (0.0, 0.0)) -> dict[int, float]:
        """Return the costs of all columns with λ in place of E."""
        costs = dict(enumerate(self.model.cost))
        for phase, price in zip(self.phases, prices):
            costs[phase.exposed] = 0.0
            for column, seconds in phase.terms:
                costs[column] += (1 - self.delta) * price * seconds
        return costs

    def in_full_s(self, values: np.ndarray) -> float:
        """Return the seconds with E of a solution, whichever λ it was found with."""
        objective_s = float(np.dot(self.model.cost, values))
        for phase in self.phases:
            beyond_s = sum(seconds * float(values[column]) for column, seconds in phase.terms)
            objective_s += (1 - self.delta) * (max(0.0, beyond_s) - float(values[phase.exposed]))
        return objective_s


@dataclass(eq=False)
class _Phase:
    """The row of the forward or of the backward."""

    row: int
    exposed: int
    """The column E."""
    terms: Terms
    """P − ω · C"""

    @property
    def columns(self) -> list[int]:
        """E, and the columns of P − ω · C."""
        return [self.exposed, *(column for column, _ in self.terms)]


def hide(
    model: Model, problem: Problem, sharding: Sharding, recompute: Recompute | None = None, delta: float | None = None
) -> None:
    """Take the hidden seconds out of the objective; `delta` is δ, by default `EXPOSED`."""
    if not sharding.joined.in_buckets or problem.costs.device.kind != "gpu":
        return
    delta = EXPOSED if delta is None else delta
    phases = []
    for index, computing in enumerate(_computing(problem, sharding, recompute)):
        travelling = [(c, seconds[index]) for c, seconds in sharding.joined.travelling.items() if seconds[index]]
        for column, seconds in travelling:
            model.cost[column] -= (1 - delta) * seconds
        exposed = model.column(cost=1 - delta)
        terms = [*travelling, *((column, -HIDES * seconds) for column, seconds in computing)]
        row = model.row(HIDDEN, [*terms, (exposed, -1.0)], upper=0.0)
        phases.append(_Phase(row, exposed, terms))
    if problem.is_long:
        sharding.hidden = Hidden(model, tuple(phases), delta)


def _computing(problem: Problem, sharding: Sharding, recompute: Recompute | None) -> tuple[Terms, Terms]:
    """Return the terms of C in the forward and in the backward."""
    forward: Terms = []
    backward: Terms = []
    for decision in problem.groups:
        for option, column in enumerate(sharding.choice[decision]):
            forward.append((column, decision.count * decision.forward_s[option]))
            backward.append((column, decision.count * decision.backward_s[option]))
            if recompute is not None and (decision, option) in recompute.rerun:
                backward.append((recompute.rerun[decision, option], decision.forward_s[option]))
    return forward, backward
