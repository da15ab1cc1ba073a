"""Chooses cuts by a small mixed-integer program, and gives a lower bound over all cuts, levels and layouts.

    z[s, c] ∈ {0, 1}     stage s begins at unit c                    Σ_c z[s, c] = 1,  Σ_c c (z[s+1, c] - z[s, c]) ≥ 1
    n[s, k]              units of kind k in stage s                  = Σ_c before_k(c) (z[s+1, c] - z[s, c])
    x[s, k, l] ∈ 0..     of these, those at level l                  Σ_l x[s, k, l] = n[s, k]

A stage's seconds are linear in these: its forward f, forward and backward t, and work once a step u (u' after the last
backward). With m micro-batches of which w_s are in flight, transfers h and g (there and back), for every stage s

    stages   Z ≥ Σ_{q<s} (t_q + h_q + g_q) + m t_s + u'_0
    warm-up  Z ≥ Σ_q t_q + Σ_q (h_q + g_q) + (m - 1) t_s - (w_s - w_P-1) f_s + u'_0
    update   Z ≥ Σ_{q<s} (f_q + h_q) + m t_s + u'_s

    memory   fixed(s) + w_s Σ_{k, l} kept[k, l] x[s, k, l] ≤ budget

The rows hold for every schedule in which w_s forwards of stage s precede its first backward, and w does not rise from a stage to
the next: a first backward waits for the last stage's, behind the w_P-1-th micro-batch. min Z gives cuts to begin from, which the
simulation judges. `bound_s` has the same rows over any layouts: every unit takes what `floors` finds at least, and all of them
together what the best sharding of the whole program takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..model.milp import MIB, Model, Solution
from .cuts import Cuts, depths
from .table import Table

STAGES = "stages one behind the other"
MEMORY = "memory of a stage"
_MS = 1e3
"""Seconds are counted in milliseconds, so that coefficients stay near 1."""

_BOUND_GAP, _BOUND_S = 1e-3, 0.2
"""A bound over any pieces is sought to so much of it, and no longer than so many seconds of work."""
_EXACT = 1e-6
"""The share of a bound to which it is found."""

Terms = list[tuple[int, float]]


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

    >>> bound_s([Least(1.0, 2.0)] * 4, 48.0, 2, 4)   # two stages of 6 s, three micro-batches behind the first
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
    num, m = len(in_flight), float(m)
    forward = np.array([0.0, *itertools.accumulate(each.forward_s for each in least)])
    backward = np.array([0.0, *itertools.accumulate(each.backward_s for each in least)])
    taken = np.array([0.0, *itertools.accumulate(each.micro_s for each in least)])
    total = np.array([0.0, *itertools.accumulate(each.total_s(int(m)) for each in least)])
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
    """Return the cuts that minimise Z; None if the program finds that none fit.

    fixed: units at which stages have to begin.
    """
    model = Model()
    grid = _Grid(model, len(table.units), table.num_stages, fixed or {})
    rows = _Rows(model, table.num_stages, table.num_micro_batches, in_flight)
    own = _first_readers(table)
    update_s = [sum(table.params[name].update_s for name in names) for names in own]
    held = [sum(table.params[name].held_bytes for name in names) for names in own]
    for stage, depth in enumerate(in_flight):
        reruns, kept = _levels(model, grid, table, stage)
        rows.forward[stage] += grid.terms(stage, [_MS * unit.forward_s for unit in table.units])
        rows.backward[stage] += [*grid.terms(stage, [_MS * unit.backward_s for unit in table.units]), *reruns]
        behind = [unit.reduce_s + each for unit, each in zip(table.units, update_s)]
        rows.behind[stage] = grid.terms(stage, [_MS * seconds for seconds in behind])
        if stage:
            _add_hop(grid, rows, table, stage)
        static = [(unit.other_bytes + each) / MIB for unit, each in zip(table.units, held)]
        given = grid.at(stage, [depth * unit.given_bytes / MIB for unit in table.units]) if stage else []
        room = budget_bytes - _least_work(table, stage)
        terms = [*grid.terms(stage, static), *given, *((column, depth * size) for column, size in kept)]
        model.row(MEMORY, terms, upper=room / MIB)
    rows.add()
    found = model.solve(gap=1e-4, time_limit_s=5.0)
    return None if found.values is None else Proposal(grid.cuts(found), max(0.0, found.bound) / _MS)


def _add_hop(grid: _Grid, rows: _Rows, table: Table, stage: int) -> None:
    """Add the transfers over a stage's first boundary; without overlap they take the sender's own time."""
    hop = table.hops[stage - 1]
    there = grid.at(stage, [_MS * hop.seconds(unit.given_bytes) for unit in table.units])
    back = grid.at(stage, [_MS * hop.seconds(unit.returned_bytes) for unit in table.units])
    if table.overlaps:
        rows.there[stage - 1], rows.back[stage - 1] = there, back
    else:
        rows.forward[stage - 1] += there
        rows.backward[stage] += back


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


def _least_work(table: Table, stage: int) -> float:
    """Return the bytes that the memory rows reserve: the least working set, and the excess learned for stages of this kind."""
    is_last = stage == table.num_stages - 1
    work = table.units[-1].work_bytes if is_last else min(unit.work_bytes for unit in table.units)
    return work + table.excess_bytes.get((stage == 0, is_last), 0.0)


def _levels(model: Model, grid: _Grid, table: Table, stage: int) -> tuple[Terms, Terms]:
    """Add the columns of a stage's levels; return the terms of its reruns in ms, and of its kept bytes in MiB."""
    reruns: Terms = []
    kept: Terms = []
    for kind, levels in enumerate(table.levels):
        members = [float(unit.kind == kind) for unit in table.units]
        if not any(members):
            continue
        columns = [model.column(upper=sum(members), integer=True) for _ in levels]
        model.row(
            "levels of all units", [*grid.terms(stage, members), *((column, -1.0) for column in columns)], 0.0, 0.0
        )
        reruns += [(column, _MS * level.rerun_s) for column, level in zip(columns, levels)]
        kept += [(column, level.kept_bytes / MIB) for column, level in zip(columns, levels)]
    return reruns, kept


class _Grid:
    """The columns for where each stage begins; any sum over a stage's units is linear in them."""

    def __init__(self, model: Model, num_units: int, num_stages: int, fixed: Mapping[int, int] | None = None) -> None:
        self.num_units, self.num_stages = num_units, num_stages
        self.one = model.column(lower=1.0, upper=1.0)
        self.begins: list[dict[int, int]] = [{0: self.one}]
        """For each stage, and for the end of the last one: the unit at which it may begin → the column."""
        for stage in range(1, num_stages):
            last = num_units - (num_stages - stage)
            own = (fixed or {}).get(stage)
            units = range(stage, last + 1) if own is None else [own]
            columns = {unit: model.column(upper=1.0, integer=True) for unit in units}
            model.row(STAGES, [(column, 1.0) for column in columns.values()], 1.0, 1.0)
            self.begins.append(columns)
        self.begins.append({num_units: self.one})
        for stage in range(num_stages):
            model.row(STAGES, self.terms(stage, [1.0] * num_units), lower=1.0)

    def terms(self, stage: int, values: Sequence[float]) -> Terms:
        """Return the terms of the sum of `values` over the units of a stage."""
        before = [0.0, *itertools.accumulate(values)]
        ahead = [(column, before[unit]) for unit, column in self.begins[stage + 1].items()]
        return ahead + [(column, -before[unit]) for unit, column in self.begins[stage].items()]

    def at(self, stage: int, values: Sequence[float]) -> Terms:
        """Return the terms of the value of the unit at which a stage begins."""
        return [(column, values[unit]) for unit, column in self.begins[stage].items()]

    def cuts(self, found: Solution) -> Cuts:
        assert found.values is not None
        values = found.values
        return tuple(max(columns, key=lambda unit: values[columns[unit]]) for columns in self.begins[1:-1])


class _Rows:
    """Collects the terms of each stage in ms, and adds the rows over them."""

    def __init__(self, model: Model, num_stages: int, num_micro_batches: int, in_flight: Sequence[int]) -> None:
        self.model, self.num, self.m, self.in_flight = model, num_stages, num_micro_batches, in_flight
        self.forward: list[Terms] = [[] for _ in range(num_stages)]
        self.backward: list[Terms] = [[] for _ in range(num_stages)]
        self.behind: list[Terms] = [[] for _ in range(num_stages)]
        self.there: list[Terms] = [[] for _ in range(num_stages)]
        self.back: list[Terms] = [[] for _ in range(num_stages)]

    def add(self, splits_backward: bool = False) -> None:
        """Add the objective and the rows; with a split backward, only the rows that hold for it."""
        model, m, num = self.model, float(self.m), self.num
        step = model.column(cost=1.0)
        forward = [self._column(terms) for terms in self.forward]
        whole = [self._column([*there, *back]) for there, back in zip(self.forward, self.backward)]
        behind = [self._column(terms) for terms in self.behind]
        there = [self._column(terms) for terms in self.there]
        back = [self._column(terms) for terms in self.back]
        hops = [(column, 1.0) for q in range(num - 1) for column in (there[q], back[q])]
        for s in range(num):
            first = [(column, 1.0) for q in range(s) for column in (forward[q], there[q])]
            model.row("update", [*first, (whole[s], m), (behind[s], 1.0), (step, -1.0)], upper=0.0)
            if splits_backward:
                continue
            ahead = [(whole[q], 1.0) for q in range(s)]
            model.row("stages", [*ahead, *hops[: 2 * s], (whole[s], m), (behind[0], 1.0), (step, -1.0)], upper=0.0)
            early = (forward[s], float(min(self.in_flight[-1], self.m) - min(self.in_flight[s], self.m)))
            all_once = [(column, 1.0) for column in whole]
            model.row(
                "warm-up", [*all_once, *hops, (whole[s], m - 1), early, (behind[0], 1.0), (step, -1.0)], upper=0.0
            )

    def _column(self, terms: Terms) -> int:
        """Return a new column that equals the sum of the terms."""
        column = self.model.column(lower=0.0)
        self.model.row("sums", [*terms, (column, -1.0)], 0.0, 0.0)
        return column
