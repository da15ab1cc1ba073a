"""Bounds what stages with layouts of their own could gain over one choice of layouts for all stages, cell by cell.

    python -m benchmarks.planner.pipeline_layouts [MODEL …] [--clusters NAME …] [--shares SHARE …] [--record]

The tables are those of the search, one for each of its layouts (with offloading too where a budget binds), each of which has
learned from runs of its own fastest stages. 1F1B and deeper warm-ups.

one       the fastest stages under one table, for all stages the same: by the tables, or as the search has planned them
each      each stage under a table of its own, chosen together with cuts, depths and levels
program   a lower bound on `each`: the mixed-integer program below, over all cuts and choices at every depth

For stage s a column z[s, c, d, l] says that it has the units c … d-1 in the layouts l; the columns of neighbouring stages agree
in where one ends and the next begins. With f, t, u′, h and g of a column (`planner/pipeline/program.py`), m micro-batches and w in
flight, and levels that are the fewest seconds that fit stage and depth, it minimises Z under the same three rows,

    Z ≥ Σ_{q<s} (t_q + h_q + g_q) + m t_s + u'_0
    Z ≥ Σ_q (t_q + h_q + g_q) + (m - 1) t_s - (w_s - w_P-1) f_s + u'_0
    Z ≥ Σ_{q<s} (f_q + h_q) + m t_s + u'_s

which are linear in z. Its cuts and choices, and those of the fastest tables, are improved by moves of single blocks and of
single stages' layouts, judged by the simulated step. That what crosses a boundary may have to change its layout there costs
nothing here, nor that a parameter of both ends may rest in two layouts: real plans gain less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import trainwright as tw
from trainwright.planner.model.milp import Model
from trainwright.planner.pipeline.cuts import Cuts, Judge, Staged, depths_of, fastest, leanest, neighbours
from trainwright.planner.pipeline.events import StageSeconds, Tied, simulated_step
from trainwright.planner.pipeline.measure import Measured
from trainwright.planner.pipeline.price import simulate_stages
from trainwright.planner.pipeline.program import propose
from trainwright.planner.pipeline.recipes import recipe_cuts
from trainwright.planner.pipeline.search import Case, learn
from trainwright.planner.pipeline.table import Fit, Table
from trainwright.planner.task import Task
from trainwright.program.stages import cut
from trainwright.request import PlanRequest

from .pipeline import CLUSTERS, MODELS, SHARES, question, recorded
from .pipeline import ROWS as CELLS

ROWS = CELLS.with_name("planner-pipeline-layouts.jsonl")
RESULT = ROWS.with_suffix(".md")
TIMES = 3
"""The most times that a table learns."""
STARTS = 4
"""The tables, the fastest ones, whose own stages are improved by moves."""
_MS = 1e3
_LESS = 1 - 1e-9

Choice = tuple[int, ...]
"""The table of each stage."""


@dataclass(frozen=True)
class Mixed:
    """Stages, each under a table of its own, and their simulated step."""

    step_s: float
    cuts: Cuts = ()
    choice: Choice = ()


@dataclass(eq=False)
class Mixture:
    """Tables of the same units, of which each stage may have another; stages have one piece, and transfers overlap."""

    tables: Sequence[Table]
    budget_bytes: float
    _known: dict[tuple[int, Cuts, tuple[int, ...]], tuple[list[StageSeconds | None], list[Tied]]] = field(
        default_factory=dict
    )

    def of_table(
        self, number: int, cuts: Cuts, in_flight: tuple[int, ...]
    ) -> tuple[list[StageSeconds | None], list[Tied]]:
        """Return the seconds of each stage under one table, None where it does not fit, and the sums of tied gradients."""
        key = number, cuts, in_flight
        if key not in self._known:
            table, spans = self.tables[number], self.tables[number].stages(cuts)
            fits = [table.fit(own, (depth,), self.budget_bytes) for own, depth in zip(spans, in_flight)]
            filled = [fit or Fit((0,) * (own[0][1] - own[0][0]), 0.0, 0.0) for fit, own in zip(fits, spans)]
            seconds = [own if fit else None for own, fit in zip(table.seconds(cuts, filled), fits)]
            self._known[key] = seconds, table.tied(cuts)
        return self._known[key]

    def judge(self, cuts: Cuts, in_flight: tuple[int, ...], choice: Choice) -> Mixed:
        """Return the simulated step; a tied sum takes the least that it takes under any of its stages' tables."""
        rows = [self.of_table(number, cuts, in_flight) for number in choice]
        stages = [row[0][stage] for stage, row in enumerate(rows)]
        if any(own is None for own in stages):
            return Mixed(math.inf, cuts, choice)
        tied = [
            Tied(group.stages, min(rows[stage][1][at].seconds for stage in group.stages))
            for at, group in enumerate(rows[0][1])
        ]
        schedule = self.tables[0].schedule(in_flight)
        return Mixed(simulated_step(schedule, stages, tied, overlaps=True).step_s, cuts, choice)  # type: ignore[arg-type]

    def moved(self, found: Mixed, in_flight: tuple[int, ...]) -> Mixed:
        """Return the local optimum that moves of blocks, and other tables for single stages, reach from `found`."""
        while True:
            best = found = self._chosen(found, in_flight)
            for cuts in neighbours(found.cuts, len(self.tables[0].units)):
                near = self._chosen(self._first_that_fits(cuts, in_flight, found.choice), in_flight)
                best = near if near.step_s < best.step_s * _LESS else best
            if best is found:
                return found
            found = best

    def _first_that_fits(self, cuts: Cuts, in_flight: tuple[int, ...], choice: Choice) -> Mixed:
        """Return the choice, with the first table that fits for each stage whose own does not."""
        order = [(own, *range(len(self.tables))) for own in choice]
        fitting = tuple(
            next((number for number in numbers if self.of_table(number, cuts, in_flight)[0][stage]), numbers[0])
            for stage, numbers in enumerate(order)
        )
        return self.judge(cuts, in_flight, fitting)

    def _chosen(self, found: Mixed, in_flight: tuple[int, ...]) -> Mixed:
        """Return the tables that changes of one stage at a time reach."""
        while math.isfinite(found.step_s):
            before = found
            for stage, number in itertools.product(range(len(found.choice)), range(len(self.tables))):
                choice = (*found.choice[:stage], number, *found.choice[stage + 1 :])
                other = self.judge(found.cuts, in_flight, choice)
                found = other if other.step_s < found.step_s * _LESS else found
            if found is before:
                break
        return found

    def program(self, in_flight: tuple[int, ...]) -> tuple[float, Mixed | None]:
        """Return the program's bound at one depth, in seconds, and the stages that it proposes, simulated."""
        return _Program(self, in_flight).solved()


@dataclass(frozen=True)
class _Column:
    """A stage with its units and table, and the seconds of its rows."""

    stage: int
    first: int
    stop: int
    number: int
    forward_s: float
    micro_s: float
    behind_s: float
    hand_s: float
    return_s: float

    @property
    def seconds(self) -> tuple[float, ...]:
        return self.forward_s, self.micro_s, self.behind_s, self.hand_s, self.return_s


class _Program:
    """The mixed-integer program over cuts and tables at one depth."""

    def __init__(self, mixture: Mixture, in_flight: tuple[int, ...]) -> None:
        self.mixture, self.in_flight, self.table = mixture, in_flight, mixture.tables[0]
        self.model = Model()
        self.step = self.model.column(cost=1.0)
        self.columns = {self.model.column(upper=1.0, integer=True): own for own in self._columns()}

    def _columns(self) -> Iterator[_Column]:
        """Yield what stages may be, but for what takes no less than another with the same units in all of its rows."""
        num, last = len(self.table.units), self.table.num_stages - 1
        for stage in range(last + 1):
            firsts = [0] if stage == 0 else range(stage, num - last + stage)
            stops = [num] if stage == last else range(stage + 1, num - last + stage + 1)
            for first, stop in itertools.product(firsts, stops):
                if first >= stop:
                    continue
                kept: list[_Column] = []
                for column in sorted(self._of_span(stage, first, stop), key=lambda own: own.seconds):
                    if not any(all(a <= b for a, b in zip(one.seconds, column.seconds)) for one in kept):
                        kept.append(column)
                yield from kept

    def _of_span(self, stage: int, first: int, stop: int) -> Iterator[_Column]:
        for number, table in enumerate(self.mixture.tables):
            fit = table.fit(((first, stop),), (self.in_flight[stage],), self.mixture.budget_bytes)
            if fit is None:
                continue
            units = table.units[first:stop]
            more_f, more_b = table.more_s(units, fit.levels)
            forward = sum(unit.forward_s for unit in units) + more_f
            held = table.params_of(((first, stop),))
            behind = sum(unit.reduce_s for unit in units) + sum(table.params[name].update_s for name in held)
            there = back = 0.0
            if stop < len(table.units):
                hop, after = table.hops[stage], table.units[stop]
                there, back = hop.seconds(after.given_bytes), hop.seconds(after.returned_bytes)
            micro = forward + sum(unit.backward_s for unit in units) + more_b
            yield _Column(stage, first, stop, number, forward, micro, behind, there, back)

    def solved(self) -> tuple[float, Mixed | None]:
        if {own.stage for own in self.columns.values()} != set(range(self.table.num_stages)):
            return math.inf, None
        self._add_path()
        for stage in range(self.table.num_stages):
            self._add_rows(stage)
        found = self.model.solve(gap=1e-4, time_limit_s=60.0)
        if found.values is None:
            return found.bound / _MS, None
        chosen = [own for at, own in self.columns.items() if found.values[at] > 0.5]
        chosen.sort(key=lambda own: own.stage)
        cuts, choice = tuple(own.first for own in chosen[1:]), tuple(own.number for own in chosen)
        return found.bound / _MS, self.mixture.judge(cuts, self.in_flight, choice)

    def _add_path(self) -> None:
        """One column a stage; each begins where the one before it ends."""
        self.model.row("one each", [(at, 1.0) for at, own in self.columns.items() if own.stage == 0], 1.0, 1.0)
        for stage, unit in itertools.product(range(self.table.num_stages - 1), range(1, len(self.table.units))):
            ends = [(at, 1.0) for at, own in self.columns.items() if (own.stage, own.stop) == (stage, unit)]
            begins = [(at, -1.0) for at, own in self.columns.items() if (own.stage, own.first) == (stage + 1, unit)]
            self.model.row("neighbours", [*ends, *begins], 0.0, 0.0)

    def _add_rows(self, stage: int) -> None:
        m = self.table.num_micro_batches
        early = min(self.in_flight[stage], m) - min(self.in_flight[-1], m)
        rows: list[list[tuple[int, float]]] = [[], [], []]
        for at, own in self.columns.items():
            is_before, is_own, is_first = (
                float(flag) for flag in (own.stage < stage, own.stage == stage, own.stage == 0)
            )
            through = own.micro_s + own.hand_s + own.return_s
            seconds = (
                is_before * through + is_own * m * own.micro_s + is_first * own.behind_s,
                through + is_own * ((m - 1) * own.micro_s - early * own.forward_s) + is_first * own.behind_s,
                is_before * (own.forward_s + own.hand_s) + is_own * (m * own.micro_s + own.behind_s),
            )
            for row, taken in zip(rows, seconds):
                row.append((at, _MS * taken))
        for row in rows:
            self.model.row("step", [*row, (self.step, -1.0)], upper=0.0)


def cell(name: str, hardware: str, given: dict[str, Any], model: Any, batch: Any) -> dict[str, Any]:
    """Return a row: the steps of one cell, in seconds."""
    began = time.process_time()
    asked = PlanRequest(model, batch, **question(hardware), memory=given["budget"], pipeline_schedule="1f1b").question()
    task = Task(**asked)
    case = Case(task, task.cluster, CLUSTERS[hardware]["pipeline"], (CLUSTERS[hardware]["mesh"],))
    measured = [case.measured(options) for options in case.layouts()]
    tier = case.place.problem.costs.tier
    if given["share"] < 1 and tier is not None:
        measured += [each.offloading(tier) for each in measured]
    known = [_learned(case, each) for each in measured]
    mixture = Mixture([table for table, _ in known], case.budget_bytes)
    one = [staged for _, staged in known if staged is not None]
    least = min((staged.step_s for staged in one), default=math.inf)
    found, bound_s = Mixed(math.inf), math.inf
    order = sorted(range(len(known)), key=lambda number: math.inf if (own := known[number][1]) is None else own.step_s)
    for number in order[:STARTS]:
        staged = known[number][1]
        if staged is not None:
            start = mixture.judge(staged.cuts, staged.in_flight, (number,) * case.num_stages)
            found = min(found, mixture.moved(start, staged.in_flight), key=lambda mixed: mixed.step_s)
    spent = time.process_time()
    for depth in depths_of(mixture.tables[0]):
        own_s, proposed = mixture.program(depth)
        bound_s = min(bound_s, own_s)
        if proposed is not None:
            found = min(found, mixture.moved(proposed, depth), key=lambda mixed: mixed.step_s)
    now = time.process_time()
    return {
        "model": name, "cluster": hardware, "budget": given["budget"], "share": given["share"], "tables": len(known),
        "plan": given["joint, 1F1B"], "one": _finite(least), "each": _finite(found.step_s), "program": _finite(bound_s),
        "cuts": found.cuts, "choice": found.choice, "program_s": round(now - spent, 1), "cpu_s": round(now - began, 1),
    }  # fmt: skip


def _learned(case: Case, measured: Measured) -> tuple[Table, Staged | None]:
    """Return a table that has learned from runs of its own fastest stages, or of its leanest where none fit, and those by it."""
    judge = case.judge(replace(measured, table=measured.table.scheduled()))
    for _ in range(TIMES):
        staged = fastest(judge, _starts(judge)) or leanest(judge, _starts(replace(judge, budget_bytes=math.inf)))
        if staged is None:
            break
        levels = [level for own in judge.table.by_piece(staged.cuts, staged.fits) for level in own]
        stages = [(stage,) for stage in cut(case.task.program, measured.begins(staged.cuts))]
        schedule, decisions = judge.table.schedule(staged.in_flight), measured.staged(levels)
        simulations = simulate_stages(case.place, stages, decisions, schedule, measured.runs, in_full=False)
        peaks = [simulation.peak_bytes for simulation in simulations]
        if max(peaks) <= case.budget_bytes and not any(fit.extra_s for fit in staged.fits):
            break
        learn(judge.table, staged, peaks)
        judge = Judge(judge.table, judge.budget_bytes, judge.fixed)
    return judge.table, fastest(judge, _starts(judge))


def _starts(judge: Judge) -> list[Cuts]:
    found = [recipe_cuts(name, judge) for name in ("even", "balanced", "pipeline-dp")]
    for depth in depths_of(judge.table)[:2]:
        proposal = propose(judge.table, depth, judge.budget_bytes)
        found.append(None if proposal is None else proposal.cuts)
    return [cuts for cuts in dict.fromkeys(found) if cuts is not None]


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _share(less: float | None, of: float | None) -> str:
    return "–" if less is None or of is None else f"{100 * max(0.0, 1 - less / of):.1f} %"


def _one_s(row: dict[str, Any]) -> float | None:
    return min((row[name] for name in ("one", "plan") if row[name] is not None), default=None)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the record's table: a row a cell, in milliseconds, with what each stage's own layouts gain over one choice."""
    lines = [
        "| model | cluster | budget | tables | one | each | gain | program | gain at most | program, CPU | CPU |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one_s = _one_s(row)
        steps = (one_s, row["each"], row["program"])
        one, each, bound = ("–" if seconds is None else f"{_MS * seconds:.2f}" for seconds in steps)
        lines.append(
            f"| {row['model']} | {row['cluster']} | {row['share']:.2f} · {row['budget'] / 2**30:.2f} GiB | {row['tables']} | "
            f"{one} | {each} | {_share(row['each'], one_s)} | {bound} | {_share(row['program'], one_s)} | "
            f"{row['program_s']} s | {row['cpu_s']} s |"
        )
    return "\n".join(lines)


def write(rows: Sequence[dict[str, Any]]) -> None:
    """Write the record."""
    gains = [1 - row["each"] / one_s for row in rows if row["each"] is not None and (one_s := _one_s(row)) is not None]
    RESULT.write_text(
        f"# Stages with layouts of their own: an upper bound of the gain\n\n{time.strftime('%Y-%m-%d')}. Steps in ms, predicted by "
        "the simulation from tables; no GPU ran. The cells are those of planner-pipeline.md. `one`: one table for all "
        "stages. `each`: a table for each stage, without what a change of layout between stages costs. `program`: a lower "
        "bound on `each`.\n"
        f"`python -m benchmarks.planner.pipeline_layouts --record`\n\n{table(rows)}\n\n"
        f"more than 2 % gained: {sum(gain > 0.02 for gain in gains)} of {len(gains)} cells; most: {100 * max(gains):.1f} %\n"
    )


def main() -> None:
    """Measure cells; with `--record` write them into the record, which has those of other runs too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS))
    parser.add_argument("--shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    cells, rows = [json.loads(line) for line in CELLS.read_text().splitlines()], []
    for name in given.models:
        model, batch = tw.zoo.build(name, dtype="bf16", **MODELS[name])
        for own in cells:
            if own["model"] == name and own["cluster"] in given.clusters and own["share"] in given.shares:
                rows.append(cell(name, own["cluster"], own, model, batch))
                print(json.dumps(rows[-1]), flush=True)
                if given.record:
                    write(recorded(rows, ROWS))
    print(table(rows))


if __name__ == "__main__":
    main()
