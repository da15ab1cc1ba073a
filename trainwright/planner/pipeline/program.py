"""Chooses cuts by dynamic programming, and gives a lower bound over all cuts, levels and layouts.

A stage s of the units c … d-1 takes f forward and t forward and backward of a micro-batch, with the reruns and transfers that it
needs to fit, and u once a step (u' after the last backward). With m micro-batches of which w_s are in flight, transfers h and g
(there and back), for every stage

    stages   Z ≥ Σ_{q<s} (t_q + h_q + g_q) + m t_s + u'_0
    warm-up  Z ≥ Σ_q t_q + Σ_q (h_q + g_q) + (m - 1) t_s - (w_s - w_P-1) f_s + u'_0
    update   Z ≥ Σ_{q<s} (f_q + h_q) + m t_s + u'_s

The rows hold for every schedule in which w_s forwards of stage s precede its first backward, and w does not rise from a stage to
the next: a first backward waits for the last stage's, behind the w_P-1-th micro-batch. What the other stages take but for their
reruns is known from c and d alone: Σ_{q<s} t_q is what all units before c take. So with their reruns left out, each row is a number
for (s, c, d), and cuts whose largest row is least are found stage by stage. They are cuts to begin from, which the simulation
judges, and min Z is a bound under one table. `bound_s` has the same rows over any layouts: every unit takes what `floors` finds at
least, and all of them together what the best sharding of the whole program takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..model.milp import Model
from .cuts import Cuts, depths
from .table import Table

STAGES = "stages one behind the other"
_MS = 1e3
"""Seconds are counted in milliseconds, so that coefficients stay near 1."""

_BOUND_GAP, _BOUND_S = 1e-3, 0.2
"""A bound over any pieces is sought to so much of it, and no longer than so many seconds of work."""
_EXACT = 1e-6
"""The share of a bound to which it is found."""


@dataclass(frozen=True)
class Least:
    """The least seconds of one unit for a micro-batch, under any layouts."""

    forward_s: float
    backward_s: float
    all_s: float = 0.0
    """The least of all micro-batches and of what it takes once a step, together."""
    kind: int = -1
    """Units of one kind take equally long."""
    both_s: float = 0.0
    """The least of forward and backward together, where that is more than the sum of the two."""

    @property
    def micro_s(self) -> float:
        """Return what the unit takes of a micro-batch at least."""
        return max(self.both_s, self.forward_s + self.backward_s)

    def total_s(self, num_micro_batches: int) -> float:
        """Return what the unit takes of a step at least."""
        return max(self.all_s, num_micro_batches * self.micro_s)


def bound_s(
    least: Sequence[Least], whole_s: float, num_stages: int, num_micro_batches: int, schedule: str = "1f1b"
) -> float:
    """Return a lower bound in seconds on a step with `num_stages` stages, for any cuts, depths, levels and layouts.

    schedule: with a split backward (`zero-bubble`) only the last of the rows holds, since weight gradients may be computed
    when other stages no longer wait; of `interleaved` stages those of `_of_any_pieces`.

    least: each unit's least seconds. whole_s: the least seconds of all micro-batches of the whole program on one stage's ranks,
    work once a step included.

    >>> round(bound_s([Least(1.0, 2.0)] * 4, 48.0, 2, 4), 3)   # two stages of 6 s, three micro-batches behind the first
    30.0
    """
    m = num_micro_batches
    if schedule == "interleaved":
        return _of_any_pieces(least, whole_s, num_stages, m)
    if schedule == "zero-bubble":
        return _of_pieces_in_turn(least, whole_s, (m,) * num_stages, m, splits_backward=True)
    return min(_of_pieces_in_turn(least, whole_s, depth, m) for depth in depths(num_stages, m))


def _of_pieces_in_turn(
    least: Sequence[Least], whole_s: float, in_flight: Sequence[int], m: int, splits_backward: bool = False
) -> float:
    """Return seconds that no step is below whose stages are one piece each, at one depth: the least Z for which there are cuts.

    Without transfers each row hangs on where a stage begins and ends alone. With f, b and t of all units before (t is at least
    their sum), and A what a stage's units take at least in all, updates and reductions included, stage s of units c … d-1 needs

        t(c) + m (t(d) - t(c)) ≤ Z,   t(U) + (m - 1) (t(d) - t(c)) - (w_s - w_P-1) (t(d) - t(c) - b(d) + b(c)) ≤ Z,
        f(c) + A(c, d) ≤ Z

    and can take Z - f(c) in all at most, of which the stages need `whole_s` together: dynamic programming over where stages end
    finds whether some cuts meet these. Z is halved in on. What stage 0 takes beyond m t is in its t, which others wait for, or
    behind its last backward.
    """
    num = len(in_flight)
    forward = np.array([0.0, *itertools.accumulate(each.forward_s for each in least)])
    backward = np.array([0.0, *itertools.accumulate(each.backward_s for each in least)])
    taken = np.array([0.0, *itertools.accumulate(each.micro_s for each in least)])
    total = np.array([0.0, *itertools.accumulate(each.total_s(m) for each in least)])
    needs = forward[:, None] + total[None, :] - total[:, None]
    rows = np.repeat(needs[None], num, axis=0)
    if not splits_backward:
        own = taken[None, :] - taken[:, None]
        own_f = own - backward[None, :] + backward[:, None]
        early = np.array([min(depth, m) - min(in_flight[-1], m) for depth in in_flight])
        more = np.repeat((total[1] - m * taken[1]) / m * np.ones_like(own)[None], num, axis=0)  # of the first unit
        more[0] = (total - m * taken)[None, :] * (m - max(0.0, early[0])) / m
        rows = np.maximum(rows, taken[:, None] + m * own + more)
        rows = np.maximum(rows, taken[-1] + (m - 1) * own - early[:, None, None] * own_f + more)
    is_empty = np.tri(len(forward), dtype=bool)
    rows[:, is_empty] = np.inf

    def is_possible(step_s: float) -> bool:
        """Return true if some cuts meet all rows within `step_s`."""
        held = np.where(rows <= step_s, step_s - forward[:, None], -np.inf)
        most = held[0][0]
        for stage in range(1, num):
            most = (most[:, None] + held[stage]).max(axis=0)
        return bool(most[-1] >= whole_s * (1 - _EXACT))

    low, high = 0.0, whole_s + float(rows[np.isfinite(rows)].max())
    while high - low > _EXACT * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return low


def _of_any_pieces(least: Sequence[Least], whole_s: float, num_stages: int, num_micro_batches: int) -> float:
    """Return seconds that no step is below, whichever units each stage has: two pieces or more of a unit or more.

    Stage s has n[s, k] units of kind k; the first of all units is on the first stage, the last one on the last. Before stage s
    begins, the first micro-batch has come through s units at least, those at the beginning of the model.

        Z ≥ Σ_{u<s} f_u + Σ_k n[s, k] T_k + more[s],   Σ_s n[s, k] = n[k],   Σ_s more[s] ≥ whole - Σ_k n[k] T_k

    Whatever the pieces are, no micro-batch is done in less than all units take.
    """
    m, model = num_micro_batches, Model()
    kinds = [each.kind if each.kind >= 0 else -1 - place for place, each in enumerate(least)]
    total_s = {kind: each.total_s(m) for kind, each in zip(kinds, least)}
    step = model.column(cost=1.0)
    ahead_s = list(itertools.accumulate((each.forward_s for each in least), initial=0.0))
    counts: list[dict[int, int]] = []
    beyond = []
    for stage in range(num_stages):
        ends = [kinds[0]] * (stage == 0) + [kinds[-1]] * (stage == num_stages - 1)
        own = {kind: model.column(lower=ends.count(kind), upper=kinds.count(kind), integer=True) for kind in total_s}
        beyond.append(model.column())
        taken = [(own[kind], _MS * seconds) for kind, seconds in total_s.items()]
        model.row("stages", [*taken, (beyond[-1], 1.0), (step, -1.0)], upper=-_MS * ahead_s[min(stage, len(least) - 1)])
        model.row(STAGES, [(column, 1.0) for column in own.values()], lower=2.0)
        counts.append(own)
    for kind in total_s:
        model.row(STAGES, [(own[kind], 1.0) for own in counts], *[float(kinds.count(kind))] * 2)
    rest_s = whole_s - sum(total_s[kind] for kind in kinds)
    model.row("all stages together", [(column, 1.0) for column in beyond], lower=_MS * max(0.0, rest_s))
    through_s = sum(each.micro_s for each in least)
    found = model.solve(gap=_BOUND_GAP, time_limit_s=_BOUND_S)
    return max(through_s, round(found.bound / _MS, 9) if math.isfinite(found.bound) else 0.0)


@dataclass(frozen=True)
class Proposal:
    """The cuts that the program proposes, and its lower bound under one table and depth."""

    cuts: Cuts
    bound_s: float


def propose(
    table: Table, in_flight: Sequence[int], budget_bytes: float, fixed: Mapping[int, int] | None = None
) -> Proposal | None:
    """Return the cuts that minimise Z; None if none fit.

    fixed: units at which stages have to begin.
    """
    rows, num = _Rows(table, in_flight, budget_bytes), len(table.units)
    best: dict[int, tuple[float, Cuts]] = {0: (0.0, ())}
    for stage, depth in enumerate(in_flight):
        left = table.num_stages - 1 - stage
        own = (fixed or {}).get(stage + 1)
        found: dict[int, tuple[float, Cuts]] = {}
        for first, (most, cuts) in best.items():
            stops = [num] if not left else range(first + 1, num - left + 1) if own is None else [own]
            for stop in stops:
                if stop <= first or (stop in found and found[stop] <= (most, (*cuts, stop))):
                    continue
                row = max(most, rows.most_s(stage, first, stop, depth)), (*cuts, stop)
                if math.isfinite(row[0]) and (stop not in found or row < found[stop]):
                    found[stop] = row
        best = found
    return Proposal(best[num][1][:-1], best[num][0]) if num in best else None


class _Rows:
    """The rows of every stage, in seconds."""

    def __init__(self, table: Table, in_flight: Sequence[int], budget_bytes: float) -> None:
        self.table, self.m, self.budget_bytes = table, table.num_micro_batches, budget_bytes
        self.early = [min(depth, self.m) - min(in_flight[-1], self.m) for depth in in_flight]
        self.forward = _before(unit.forward_s for unit in table.units)
        self.taken = _before(unit.forward_s + unit.backward_s for unit in table.units)
        update_s = [sum(table.params[name].update_s for name in names) for names in _first_readers(table)]
        self.behind = _before(unit.reduce_s + own for unit, own in zip(table.units, update_s))
        self.there = [_least_hop(table, boundary, "given_bytes") for boundary in range(len(table.hops))]
        self.back = [_least_hop(table, boundary, "returned_bytes") for boundary in range(len(table.hops))]

    def most_s(self, stage: int, first: int, stop: int, depth: int) -> float:
        """Return the largest row of a stage of these units; infinity if they do not fit."""
        extra_s = self.table.extra_s(((first, stop),), (depth,), self.budget_bytes)
        if math.isinf(extra_s):
            return extra_s
        forward_s, own_s = self.forward[stop] - self.forward[first], self.taken[stop] - self.taken[first] + extra_s
        if self.table.tier is not None:
            forward_s += extra_s  # as much of it as transfers out may show
        all_s, there_s, crossing_s = self.taken[-1] + extra_s, sum(self.there[:stage]), sum(self.there) + sum(self.back)
        if self.table.overlaps:
            ahead_s, all_s = there_s + sum(self.back[:stage]), all_s + crossing_s
        else:  # transfers are their senders' own time
            sends_s = sum(self.there[stage : stage + 1]) + sum(self.back[stage - 1 : stage] if stage else ())
            forward_s, own_s = forward_s + sum(self.there[stage : stage + 1]), own_s + sends_s
            ahead_s, all_s = there_s + sum(self.back[: max(0, stage - 1)]), all_s + crossing_s
        behind_s = self.behind[stop] - self.behind[first]
        first_s = behind_s if stage == 0 else self.behind[1]
        return max(
            self.taken[first] + ahead_s + self.m * own_s + first_s,
            all_s + (self.m - 1) * own_s - self.early[stage] * forward_s + first_s,
            self.forward[first] + there_s + self.m * own_s + behind_s,
        )


def _before(values: Iterable[float]) -> list[float]:
    """Return the sum of the values before each, and of all of them."""
    return list(itertools.accumulate(values, initial=0.0))


def _least_hop(table: Table, boundary: int, what: str) -> float:
    """Return the least seconds of a transfer behind one stage, wherever the next one begins."""
    return min(table.hops[boundary].seconds(getattr(unit, what)) for unit in table.units[1:])


def _first_readers(table: Table) -> list[list[str]]:
    """Return each unit's parameters that no earlier unit reads; the last unit repeats those tied to the first one alone."""
    seen: set[str] = set()
    found = []
    for at, unit in enumerate(table.units):
        is_last = at == len(table.units) - 1
        own = [
            name
            for name in dict.fromkeys(unit.params)
            if name not in seen or (is_last and table.tied_params.get(name) == (0, at))
        ]
        seen.update(own)
        found.append(own)
    return found
