"""The share of the parameters' communication that computation hides, on devices that overlap the two.

    E ≥ P − C                          of the forward and of the backward, each; P of each link
    E ≥ Σ count · E_r + E_last         what regions that are alike wait for, and what the end of the backward does (`arrivals`)
    seconds  δ · P + (1 − δ) · E       in place of P

P are the seconds of the collectives that are issued early (`joined`), C those of computation, reruns included; E are the
exposed seconds. δ > 0, so that the solver moves nothing needlessly. But for δ, of a sharding that keeps everything that is what the
clocks of the price say (`overlap.Timeline`), or a little less: `docs/planning.md` says how much, and what is not followed.

In a long program E makes branch and bound slow: reruns add to C, gathers to P, and every mixture of the two is about as good.
There prices λ replace E: the duals of its rows in the relaxation with E, which every search solves first.

    seconds  δ · P + Σ λ · (P − C),  0 ≤ Σ λ ≤ 1 − δ,  in place of P, and alike of each row of each E_r

For any such λ that is no more than the seconds with E, so a bound of it bounds those; solutions are compared by the seconds with E.

Where the price of a plan shows that a step waits for more, `ways` searches once more, with the δ that the price showed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ..problem.problem import Problem
from .arrivals import Waits, add_last_waits, add_waits
from .deadline import Deadline
from .events import FORWARD, Events
from .milp import Model, Relaxation, Terms, Vertex
from .recompute import Recompute
from .sharding import Sharding

EXPOSED = 0.005
"""δ where no memory binds: the share of early communication that counts as exposed though it is hidden."""
EXPOSED_WITHIN = 0.05
"""δ within a budget, unless a plan shows another: with less, plans that differ in what is hidden are alike, and a search of
vit-tiny on 2x2xh100 that ends within 2 % of its bound ends within 13 %."""
HIDDEN = "what computation hides of what is on its way"


@dataclass(eq=False)
class Hidden:
    """The rows of both phases in the model of a long program, where a solve may replace E by λ."""

    model: Model
    waits: tuple[Waits, ...]
    """E of each phase, each followed by the E_c of its classes and, of the backward, by each E_w."""

    def weighed(self, relaxation: Relaxation, time_limit_s: float, deadline: Deadline) -> dict[int, float]:
        """Return the costs with each λ at its row's dual in the relaxation, 0 where that is unknown, and charge it by them."""
        prices: dict[int, float] = {}
        if isinstance(relaxation.solve(time_limit_s=time_limit_s, deadline=deadline), Vertex):
            rows = [row for each in self.waits for row, _ in each.floors]
            prices = {row: max(0.0, -dual) for row, dual in zip(rows, relaxation.duals(rows))}
        costs = self.priced(prices)
        relaxation.charge(costs)
        return costs

    def priced(self, prices: Mapping[int, float] | None = None) -> dict[int, float]:
        """Return the costs of all columns with λ in place of E and E_c; `prices` are λ by row, 0 for the others."""
        prices = prices or {}
        costs = dict(enumerate(self.model.cost))
        for each in self.waits:
            weight, costs[each.column] = costs[each.column], 0.0
            total = sum(prices.get(row, 0.0) for row, _ in each.floors)
            share = min(1.0, weight / total) if total else 0.0
            for row, terms in each.floors:
                for column, coefficient in terms:
                    costs[column] += share * prices.get(row, 0.0) * coefficient
        return costs

    def in_full_s(self, values: np.ndarray) -> float:
        """Return the seconds with E of a solution, whichever λ it was found with."""
        exact = np.array(values, dtype=float)
        for each in reversed(self.waits):
            for column, sums in each.parts:
                exact[column] = max([0.0, *(_sum(exact, terms) for terms in sums)])
            exact[each.column] = max([0.0, *(_sum(exact, terms) for _, terms in each.floors)])
        return float(np.dot(self.model.cost, exact))


def _sum(values: np.ndarray, terms: Terms) -> float:
    return sum(coefficient * float(values[column]) for column, coefficient in terms)


def hide(
    model: Model, problem: Problem, sharding: Sharding, recompute: Recompute | None = None, delta: float | None = None
) -> None:
    """Take the hidden seconds out of the objective; `delta` is δ, by default what suits a model with or without memory."""
    if not sharding.joined.in_buckets or problem.costs.device.kind != "gpu":
        return
    if delta is None:
        delta = EXPOSED if recompute is None else EXPOSED_WITHIN
    # within a budget, on several axes, their rows cost more than they tell: `docs/log.md`, The objective is what the clocks say
    exchanges_wait = recompute is None or len(problem.mesh) == 1
    events, found = Events(problem, sharding), list[Waits]()
    for phase, computing in enumerate(_computing(problem, sharding, recompute)):
        exposed = Waits(model.column(cost=(1 - delta) * problem.unit_s))
        travelling = sharding.joined.travelling[phase]
        for column, seconds in chain.from_iterable(travelling.values()):
            model.cost[column] -= (1 - delta) * seconds
        for terms in travelling.values():
            left = [*terms, *((column, -seconds) for column, seconds in computing)]
            exposed.add_floor(model, HIDDEN, [(column, seconds / problem.unit_s) for column, seconds in left])
        regions = add_waits(model, events, phase, exchanges_wait)
        waited: Terms = [(each.column, float(count)) for each, count in regions]
        found += [exposed, *(each for each, _ in regions)]
        if phase == FORWARD:
            exposed.add_floor(model, HIDDEN, waited)
            continue
        everywhere, at_end = add_last_waits(model, events, exchanges_wait)
        exposed.add_floor(model, HIDDEN, [*waited, (at_end.column, 1.0)])
        if at_end is not everywhere:  # an exchange may wait for both at once, each on a link of its own
            exposed.add_floor(model, HIDDEN, [(everywhere.column, 1.0)])
            found.append(at_end)
        found.append(everywhere)  # whose columns stand in the rows of `at_end` too
    if problem.is_long:
        sharding.hidden = Hidden(model, tuple(found))


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
