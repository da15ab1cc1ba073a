"""The share of the parameters' communication that computation hides, on devices that overlap the two.

    E ≥ P − ω · C          of the forward and of the backward, each; P of each link
    E ≥ Σ count · E_c + Σ E_w       what regions of the class c wait for, and what the end of the step does (`arrivals`)
    seconds  δ · P + (1 − δ) · E    in place of P

P are the seconds of the collectives that are issued early (`joined`), C those of computation, reruns included; E are the
exposed seconds. P leaves out what nothing can hide (`rank.travel`): the parameters of the first region where they go a region
ahead, before which and after whose gradients nothing is computed, and sums of what it reads whole. ω < 1, since a collective is
hidden by what runs at that moment, not by the whole phase (`overlap.Timeline`), and δ > 0, so that the solver moves nothing
needlessly. Collectives over several links run side by side, so there E is no less than each of the two sums, which are not added.

In a long program E makes branch and bound slow: reruns add to C, gathers to P, and every mixture of the two is about as good.
There prices λ replace E: the duals of its rows in the relaxation with E, which every search solves first.

    seconds  δ · P + Σ λ · (P − ω · C),  0 ≤ Σ λ ≤ 1 − δ,  in place of P, and alike of each row of each E_c

For any such λ that is no more than the seconds with E, so a bound of it bounds those; solutions are compared by the seconds with E.

Gathers in flight also delay exchanges over the same link, which the objective ignores. Where the price of a plan shows such
a delay, `ways` searches once more, with the δ that the price showed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ..problem.problem import Problem
from .arrivals import Waits, add_sum_waits, add_waits, has_links
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
            for column, sums in each.sums:
                exact[column] = min(_sum(exact, terms) for terms in sums)
            exact[each.column] = max([0.0, *(_sum(exact, terms) for _, terms in each.floors)])
        return float(np.dot(self.model.cost, exact))


def _sum(values: np.ndarray, terms: Terms) -> float:
    return sum(coefficient * float(values[column]) for column, coefficient in terms)


def hide(
    model: Model, problem: Problem, sharding: Sharding, recompute: Recompute | None = None, delta: float | None = None
) -> None:
    """Take the hidden seconds out of the objective; `delta` is δ, by default `EXPOSED`."""
    if not sharding.joined.in_buckets or problem.costs.device.kind != "gpu":
        return
    delta = EXPOSED if delta is None else delta
    found: list[Waits] = []
    for phase, computing in enumerate(_computing(problem, sharding, recompute)):
        exposed = Waits(model.column(cost=(1 - delta) * problem.unit_s))
        travelling = sharding.joined.travelling[phase]
        for column, seconds in chain.from_iterable(travelling.values()):
            model.cost[column] -= (1 - delta) * seconds
        for terms in travelling.values():
            left = [*terms, *((column, -HIDES * seconds) for column, seconds in computing)]
            exposed.add_floor(model, HIDDEN, [(column, seconds / problem.unit_s) for column, seconds in left])
        classes = add_waits(model, problem, sharding, phase)
        sums = list(add_sum_waits(model, problem, sharding)) if phase else []
        for parts in _in_turn(problem, classes, sums):
            exposed.add_floor(model, HIDDEN, parts)
        found += [exposed, *(each for each, _ in (*classes, *sums))]
    if problem.is_long:
        sharding.hidden = Hidden(model, tuple(found))


def _in_turn(problem: Problem, classes: Sequence[tuple[Waits, int]], sums: Sequence[tuple[Waits, int]]) -> list[Terms]:
    """Return the sums of what is waited for one after the other: all of one link, which alone is known of several."""
    regions = [(each.column, float(count)) for each, count in classes]
    by_link: dict[int, Terms] = defaultdict(list)
    for each, link in sums:
        by_link[link].append((each.column, 1.0))
    if has_links(problem):
        return [terms for terms in (regions, *by_link.values()) if terms]
    return [[*regions, *chain.from_iterable(by_link.values())]] if regions or by_link else []


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
