"""Where the search of a large model finds no proof: what is tried then, and that nothing is lost by it."""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trainwright as tw
from benchmarks.planner.places import place_of
from tests.builders import blocks_program, deep_program, peaks, simulated, task, tiny_program
from tests.grids import slow_but
from trainwright.capture.cached import cached_capture
from trainwright.models import zoo
from trainwright.planner import best_first, ways
from trainwright.planner.best_first import solve_on
from trainwright.planner.budget import budget_for
from trainwright.planner.model import deadline, milp
from trainwright.planner.model.deadline import LEAST_S, Deadline
from trainwright.planner.model.memory import set_budget
from trainwright.planner.model.milp import MIB, Model, Patience, Solution
from trainwright.planner.model.outcome import Outcome
from trainwright.planner.search import fitting, guard, solve, stages
from trainwright.planner.search.answer import Answer, Infeasible
from trainwright.planner.search.effort import GAP
from trainwright.planner.search.fitting import Fitting
from trainwright.planner.search.proposals import first_that_fits
from trainwright.planner.search.solve import Least, Solver
from trainwright.planner.search.two_stage import solve_two_stage
from trainwright.planner.task import Place
from trainwright.planner.ways import Ways
from trainwright.program.program import build_program

NUM_DEEP = 3
"""Layers of the deep model: groups stand for all of them, so that more add to simulations alone."""


@pytest.fixture
def place():
    """A model of many layers under a budget that binds."""
    low, high = peaks(NUM_DEEP)
    (found,) = task(deep_program(NUM_DEEP), "2xh100", budget_bytes=int(low + 0.4 * (high - low))).places
    return found


@functools.cache
def answered(recipe: str = "fsdp"):
    """Such a place, and an answer, which a recipe finds in seconds; for tests that change neither."""
    low, high = peaks(NUM_DEEP)
    (found,) = task(deep_program(NUM_DEEP), "2xh100", budget_bytes=int(low + 0.4 * (high - low))).places
    return found, solve_on(found, recipe)


@pytest.mark.slow
def test_what_the_relaxation_mixes_is_searched_and_loses_nothing(monkeypatch):
    """Both searches go on to a proof of 0.1 %: the half per cent that does after two seconds says nothing of the look."""
    (free,) = task(deep_program(NUM_DEEP), "2x2xh100").places
    budget = solve_on(free, "joint").simulation.peak_bytes // 2
    patience = Patience(math.inf, stages.GAP)

    def found(**fields):
        (place,) = task(deep_program(NUM_DEEP), "2x2xh100", budget_bytes=budget).places
        place.solver.effort = replace(
            place.solver.effort, patience=patience, patience_in_buckets=patience, patience_within=None, **fields
        )
        return solve_on(place, "joint")

    known, asked, narrow = found(), [], stages._among_mixed
    monkeypatch.setattr(stages, "_among_mixed", lambda *args: asked.append(narrow(*args)) or asked[-1])
    answer = found(looks_among_mixed_after_s=-1.0, far_gap=-1.0, few_columns=0)
    assert asked
    assert answer.simulation.peak_bytes <= budget
    assert known.objective_s * (1 - known.gap) <= answer.objective_s <= known.objective_s * (1 + stages.GAP)


@pytest.mark.slow
def test_a_search_beside_an_answer_is_no_worse_than_the_answer(place):
    settings = place.settings("joint")
    fsdp = place.solver.solve(place.settings("fsdp"))
    found = Fitting(place.solver, settings, settings.budget_bytes).beside(fsdp)
    assert found is not None
    assert found.simulation.peak_bytes <= settings.budget_bytes
    assert found.objective_s <= fsdp.objective_s * (1 + stages.GAP)


@pytest.mark.parametrize("near", slow_but([False], [True, False]))
def test_a_recipe_answers_where_the_search_found_nothing_but_missed_by_little(place, monkeypatch, near):
    _, fsdp = answered()
    if not near:
        place.task.budget_bytes = fsdp.simulation.peak_bytes // 2
    refused = Infeasible(Outcome.DOES_NOT_FIT, ("a row",), fsdp)
    monkeypatch.setattr(Solver, "solve", lambda *_: refused)
    found = solve_on(place, "joint")
    if near:
        assert isinstance(found, Answer)
        assert found.objective_s == pytest.approx(fsdp.objective_s, rel=2 * stages.GAP)
        # the recipe's own gap says nothing of the whole space
        assert found.objective_s * (1 - found.gap) <= place.solver.lower_bound_s() * (1 + 1e-9)
    else:
        assert found is refused


def test_a_use_knows_where_what_it_reads_was_made():
    place = place_of("t5-tiny", {}, "2xh100", (2,))
    program = place.task.program
    made_at = {tensor: op.region.index for op in program.ops if op.region is not None for tensor in op.outputs}
    far = 0
    for use in place.problem.uses:
        if not use.source.is_param:
            place_of_tensor = use.region_class.representative.externals
            for member, (made, read) in zip(use.members, use.reaches()):
                region = use.region_class.members[member]
                tensor = use.tensor if use.inside else region.externals[place_of_tensor.index(use.tensor)]
                assert read == region.index
                assert made == (read if use.inside else made_at[tensor])
                far += read - made > 1
    assert far >= 4  # what the encoder leaves, and position biases, are read by layers far behind


def test_the_rows_count_gradients_that_wait_and_what_reruns_hold():
    place = place_of("t5-tiny", {}, "2xh100", (2,))
    problem, (model, sharding, recompute, memory) = place.problem, place.solver.full()
    columns = {model.row_names[row]: {column for column, _ in terms} for row, terms in memory.rows.items()}
    far = {use.source for use in problem.uses if not use.source.is_param and use.tensor.requires_grad
           and any(read - made > 2 for made, read in use.reaches())}  # fmt: skip
    assert far
    for source in far:
        reaches = [reach for use in problem.uses if use.source is source for reach in use.reaches()]
        first, last = min(made for made, _ in reaches), max(read for _, read in reaches)
        between = [
            member.ops[decision.group.head.position].key
            for decision in problem.groups
            for member in (decision.region_class.members[0], decision.region_class.members[-1])
            if first < member.index < last
        ]
        assert between
        for key in between:
            assert columns[f"the backward of {key}"] & set(sharding.choice[source.decision]), (source.tensor.key, key)
    rows = [row for row, name in enumerate(model.row_names) if name == "what a group's backward holds for a moment"]
    counted = {column for row in rows for column in model.indices[model.starts[row] : model.starts[row + 1]]}
    reruns = {column for (d, k), column in recompute.rerun.items() if d.rerun_bytes[k] > 0}
    assert reruns <= counted
    tops = {max(model.indices[model.starts[row] : model.starts[row + 1]]) for row in rows}
    assert all(any(top in terms for terms in columns.values()) for top in tops)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("times", [1.0, 1.35])
def test_an_encoder_with_a_decoder_on_two_axes_is_planned_no_slower_than_by_a_recipe(times):
    (place,) = task(build_program(cached_capture(*zoo.build("t5-tiny"))), "2x2xh100").places
    smallest = place.solver.smallest(place.settings("fsdp"))  # `joint` has plans below it
    place.task.budget_bytes = int(budget_for(smallest.simulation.peak_bytes) * times)
    found = []
    for recipe in ("joint", "fsdp"):
        place.task.deadline = Deadline(
            place.task.time_limit_s, clock_s=math.inf
        )  # a busy machine has the same question
        found.append(solve_on(place, recipe))
    joint, fsdp = found
    assert joint.simulation.peak_bytes <= place.task.budget_bytes
    assert place.overlapped(joint)[1].step_s <= place.overlapped(fsdp)[1].step_s * (1 + stages.GAP)


@pytest.mark.parametrize(("outcome", "is_known"), [(Outcome.STOPPED, False), (Outcome.INFEASIBLE, True)])
def test_no_answer_in_time_is_not_called_a_contradiction(place, monkeypatch, outcome, is_known):
    nothing = Solution(outcome, None, math.inf, -math.inf)
    for module in (solve, fitting):
        monkeypatch.setattr(module, "solve_in_stages", lambda *args: nothing)
    refused = place.solver.solve(place.settings("joint"))
    assert isinstance(refused, Infeasible)
    assert refused.outcome is outcome
    assert any("contradict" in why for why in refused.binding) is is_known


@pytest.mark.parametrize("outcome", [Outcome.SLOWER, Outcome.STOPPED])
def test_shares_that_were_not_looked_at_to_their_end_say_nothing_about_memory(place, monkeypatch, outcome):
    smallest = place.solver.smallest(place.settings("joint"))
    given = itertools.chain([Infeasible(Outcome.DOES_NOT_FIT, (), smallest)], itertools.repeat(Infeasible(outcome)))
    monkeypatch.setattr(Solver, "first_stage", lambda *_: dict.fromkeys(place.problem.decisions, 0))
    monkeypatch.setattr(Solver, "solve", lambda *_: next(given))
    refused = solve_two_stage(place.solver, place.settings("joint"))
    assert isinstance(refused, Infeasible)
    assert refused.outcome is outcome


def test_a_search_within_a_budget_that_ends_without_an_answer_looks_at_known_shardings(place, monkeypatch):
    """The rows' search and the one for what holds least find nothing: one sharding at a time still does."""
    found, nothing = [], Solution(Outcome.STOPPED, None, math.inf, -math.inf)
    real = fitting.solve_in_stages
    monkeypatch.setattr(Fitting, "_solve", lambda self, cutoff_s: nothing)
    monkeypatch.setattr(Solver, "least", lambda self, settings: Outcome.STOPPED)
    monkeypatch.setattr(fitting, "solve_in_stages", lambda asked: found.append(real(asked)) or found[-1])
    settings = place.settings("joint")
    answer = place.solver.within(settings, settings.budget_bytes)
    assert isinstance(answer, Answer)
    assert found
    assert answer.simulation.peak_bytes <= settings.budget_bytes


@pytest.mark.slow
def test_past_the_deadline_every_solve_is_short_and_what_is_known_is_not_held_against_recipes(monkeypatch):
    place, known = answered()
    late = replace(place.settings("joint"), deadline=Deadline(0))
    assert late.stages(*place.solver.plain()).time_limit_s == LEAST_S
    answer = replace(known, row_budget=float(late.budget_bytes))
    monkeypatch.setattr(Fitting, "fitted", lambda *_: pytest.fail("a known sharding was fitted past the deadline"))
    assert guard.no_slower_than_known(place.solver, late, answer, lambda answer: answer.objective_s) is answer


def test_a_known_sharding_that_is_not_solved_in_time_is_passed_over(place, monkeypatch):
    known = place.solver.of_recipes(place.settings("joint"))
    monkeypatch.setattr(place.solver, "of_recipes", lambda _: known)
    stopped = Solution(Outcome.STOPPED, None, math.inf, 0.0)
    monkeypatch.setattr(solve, "solve_in_stages", lambda *_: stopped)
    assert known
    assert not list(guard.faster_kept(place.solver, place.settings("joint"), math.inf, lambda _: 0.0))


def test_what_holds_least_is_found_though_the_clock_has_ended_the_question(monkeypatch):
    """So the budget that a refusal names succeeds on a slow machine too, where nothing else was found in the time."""
    for module in (deadline, milp):
        monkeypatch.setattr(module, "LEAST_S", 1e-3)
    found = []
    for until in (Deadline(), Deadline(0)):
        (place,) = task(tiny_program("gpt2-tiny"), "cpu:2").places
        found.append(place.solver.least(replace(place.settings("joint"), deadline=until)))
    in_time, late = found
    assert isinstance(late, Least)
    assert late.rows_peak == in_time.rows_peak


def test_a_deadline_that_ends_before_anything_is_found_is_refused_with_more_time(place, monkeypatch):
    monkeypatch.setattr(Ways, "_solve", lambda *_: Infeasible(Outcome.STOPPED))
    monkeypatch.setattr(ways, "first_that_fits", lambda *_: None)
    with pytest.raises(tw.Refusal, match=r"more time is needed: joint found no plan in 30 s.*--time-limit 120"):
        best_first.search(place.task, "joint")
    assert place.task.deadline.limited(1e9) <= 30


@pytest.mark.parametrize(("proven", "stated"), [(0.0, 0.5), (0.9, 0.1), (math.inf, 0.0)])
def test_a_way_in_which_nothing_was_found_binds_what_is_proven_of_all(
    monkeypatch, proven: float, stated: float
) -> None:
    """What rows let in, and does not fit, proves nothing of what else they let in: another way's proof is of that way alone."""
    place, known = answered()
    answer = replace(known, gap=0.0, row_budget=float(place.task.budget_bytes))
    floor_s = 0.5 * answer.objective_s
    refused = Infeasible(Outcome.DOES_NOT_FIT, floor_s=floor_s, bound_s=proven * answer.objective_s)
    monkeypatch.setattr(Ways, "_solve", lambda self, _: refused if self.turn == 0 else answer)
    monkeypatch.setattr(ways, "first_that_fits", lambda *_: None)
    found = solve_on(place, "joint")
    assert isinstance(found, Answer)
    assert found.gap == pytest.approx(stated, abs=1e-9)


@pytest.mark.parametrize(("outcome", "stated"), [(Outcome.STOPPED, 0.25), (Outcome.SLOWER, 0.0)])
def test_a_way_that_ends_without_proof_binds_what_is_proven_where_nothing_is_hidden_too(monkeypatch, outcome, stated):
    """What is proven one by one says nothing of what travels in buckets, on CPUs as on GPUs."""
    (place,) = task(tiny_program("gpt2-tiny"), "cpu:2", mesh=(2,), budget_bytes=1 << 30).places
    known = place.solver.travelling("none").solve(place.settings("joint"))
    assert isinstance(known, Answer)
    step_s = place.overlapped(known)[1].step_s
    answer = replace(
        known, gap=0.0, objective_s=step_s, row_budget=float(place.task.budget_bytes), floor_s=0.5 * step_s
    )
    refused = Infeasible(outcome, floor_s=0.5 * step_s, bound_s=0.75 * step_s)
    monkeypatch.setattr(Ways, "_solve", lambda self, _: answer if self.turn == 0 else refused)
    monkeypatch.setattr(Ways, "_is_worth_it", lambda *_: True)
    monkeypatch.setattr(
        Solver, "relaxed", (0.0, 0.0)
    )  # else this plan, which keeps everything, is known to be the best
    monkeypatch.setattr(Ways, "_beside", lambda *_: iter(()))
    monkeypatch.setattr(ways, "first_that_fits", lambda *_: None)
    found = solve_on(place, "joint")
    assert isinstance(found, Answer)
    assert found.gap == pytest.approx(stated, abs=1e-9)


@pytest.mark.parametrize(("share", "bound_s"), [(1.01, math.inf), (0.99, 0.125)])
def test_that_nothing_fits_is_proven_where_the_smallest_by_the_rows_is_above_the_budget(
    place, monkeypatch, share, bound_s
):
    """Else what was proven under a row budget from the true one on is all there is."""
    search = Fitting(place.solver, place.settings("joint"), budget=1000)
    larger = Answer(None, None, SimpleNamespace(peak_bytes=1100), 0.0, 1.0)
    search._proofs[1000.0] = 0.125
    monkeypatch.setattr(Fitting, "_solve", lambda *_: Solution(Outcome.INFEASIBLE, None, math.inf, math.inf))
    monkeypatch.setattr(Solver, "lets_nothing_into", lambda *_: False)
    monkeypatch.setattr(Solver, "least", lambda *_: Least(larger, 1000 * share, 1000 * share, ("a row",)))
    found = search.run()
    assert isinstance(found, Infeasible)
    assert (found.outcome, found.bound_s) == (Outcome.DOES_NOT_FIT, bound_s)


@pytest.fixture
def ctrl_c():
    """Press Ctrl-C; where these tests run in the background, it may be ignored otherwise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("beside", slow_but(["relaxation"], ["relaxation", "joint"]))
def test_ctrl_c_ends_the_search_with_the_best_plan_found(place, monkeypatch, ctrl_c, beside):
    place.task.offload = "none"
    real, presses = stages.solve_in_stages, []

    def pressed(*args):
        found = real(*args)
        if not presses:
            presses.append(ctrl_c())
        return found

    monkeypatch.setattr(fitting, "solve_in_stages", pressed)
    monkeypatch.setattr(Fitting, "fitted", lambda *_: pytest.fail("recipes were looked at after Ctrl-C"))
    found = best_first.search(place.task, "joint")
    assert presses
    assert found.answer.simulation.peak_bytes <= place.task.budget_bytes
    least_s = place.solver.lower_bound_s()
    if beside == "joint":
        monkeypatch.undo()
        other, expected = answered("joint")
        least_s = other.overlapped(expected)[1].step_s * (1 - stages.GAP)
    assert found.price.step_s >= least_s
    assert best_first.STOPPED in found.notes
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("num_presses", [1, 2])
def test_ctrl_c_interrupts_where_nothing_is_known_or_when_pressed_again(place, monkeypatch, ctrl_c, num_presses):
    went_on = []

    def pressed(*_):
        for _ in range(num_presses):
            ctrl_c()
        went_on.append(True)
        return Infeasible(Outcome.STOPPED)

    monkeypatch.setattr(Ways, "_solve", pressed)
    monkeypatch.setattr(ways, "first_that_fits", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        best_first.search(place.task, "joint")
    assert bool(went_on) is (num_presses == 1)


def knapsacks() -> Model:
    rng, model = np.random.default_rng(0), Model()
    columns = [model.column(cost=-float(rng.integers(5, 60)), integer=True, upper=1.0) for _ in range(80)]
    for row in range(25):
        model.row(f"{row}", [(column, float(rng.integers(5, 60))) for column in columns], upper=600.0)
    return model


def test_a_solve_that_runs_ends_with_what_it_has_when_it_is_told_to():
    deadline = Deadline()
    deadline.interrupt()
    found = knapsacks().solve(gap=0.0, deadline=deadline, time_limit_s=math.inf)
    assert (found.outcome, found.values is not None) == (Outcome.FEASIBLE, True)
    assert found.bound <= found.objective


def test_the_solver_tells_the_pivots_of_branch_and_bound_while_it_goes_on(monkeypatch):
    """They stand in its log alone, which may change with a release."""
    model, seen, tells = knapsacks(), [0], milp.pivots_in
    monkeypatch.setattr(milp, "pivots_in", lambda line: seen.append(tells(line) or seen[-1]) or seen[-1])
    deadline = Deadline()
    model.solve(gap=0.0, deadline=deadline, time_limit_s=1.0)
    assert len(set(seen)) > 10
    assert seen == sorted(seen)
    work = model._work(relaxed=False)
    work.pivots = seen[-1]
    assert work.seconds == pytest.approx(deadline.work_s, rel=0.05)


def test_a_solve_ends_at_a_count_of_work_however_long_that_takes(monkeypatch):
    """Twice the same point, the second time on a machine that is so busy that each look at the clock is a minute later."""
    ends = []
    for _ in range(2):
        deadline = Deadline()
        found = knapsacks().solve(gap=0.0, deadline=deadline, time_limit_s=2.0)
        ends.append((found.objective, found.bound, found.outcome, deadline.work_s))
        clock = iter(range(0, 10**9, 60))
        monkeypatch.setattr(time, "perf_counter", lambda clock=clock: float(next(clock)))
    assert ends[0] == ends[1]
    assert ends[0][2] is Outcome.FEASIBLE
    assert 2.0 < ends[0][3] < 2.1


@pytest.mark.parametrize(("fast_from", "expected"), [(850, "found"), (2000, "cut off")])
def test_a_search_that_fell_below_what_is_fast_enough_goes_up_again(place, monkeypatch, fast_from, expected):
    """What a large budget of the rows lets in does not fit, what a small one does is too slow: between them is the answer."""
    search = Fitting(place.solver, replace(place.settings("joint"), cutoff_s=1.0), budget=1000)
    aims = []

    def solved(self, cutoff_s):
        aims.append(self.search.aim)
        good = aims[-1] >= fast_from or len(aims) == 1
        return Solution(Outcome.OPTIMAL if good else Outcome.SLOWER, np.zeros(1) if good else None, 0.5, 0.5)

    def noted(self, solution):
        held = SimpleNamespace(peak_bytes=990 if self.search.aim <= 900 else 1200)
        self.search.note(Answer(None, None, held, 0.0, 0.5))

    monkeypatch.setattr(Fitting, "_solve", solved)
    monkeypatch.setattr(Fitting, "_note", noted)
    found = search.run()
    assert aims[1] < 850 < 900 < aims[0]
    if expected == "found":
        assert found.simulation.peak_bytes == 990
    else:
        assert isinstance(found, Infeasible)
        assert found.outcome is Outcome.STOPPED, (
            "the whole budget lets in what is faster, and only that was seen not to fit"
        )
        assert 2 < len(aims) <= 1 + search.effort.corrections


@pytest.mark.parametrize("share", slow_but([0.9], [0.9, 1.3]))
def test_the_smallest_plan_is_the_same_for_every_budget(share):
    """So that asking again, with the budget that a refusal names, finds it again."""
    (free,) = task(deep_program(NUM_DEEP), "2xh100").places
    free.solver.effort = replace(free.solver.effort, few_columns=0)
    least = free.solver.least(free.settings("joint"))
    (place,) = task(deep_program(NUM_DEEP), "2xh100").places
    place.solver.effort = free.solver.effort
    place.task.budget_bytes = int(share * least.answer.simulation.peak_bytes)
    settings = place.settings("joint")
    settings.floor_s = place.solver.without_memory(settings).bound
    found = place.solver.least(settings)
    assert found.rows_peak == least.rows_peak
    assert found.answer.simulation.peak_bytes == least.answer.simulation.peak_bytes
    assert [*found.answer.choice.options.values()] == [*least.answer.choice.options.values()]


def test_what_holds_least_keeps_more_of_the_same_sharding_where_the_budget_allows() -> None:
    (place,) = task(deep_program(NUM_DEEP), "2xh100").places
    settings = place.settings("joint")
    least = place.solver.least(settings)
    budget = 1.1 * least.answer.simulation.peak_bytes
    more = place.solver.keeping_more(least, budget, settings).answer
    assert more.choice.options == least.answer.choice.options
    assert least.answer.simulation.peak_bytes < more.simulation.peak_bytes <= budget
    assert more.objective_s < least.answer.objective_s


@pytest.mark.parametrize(("budget", "peak_bytes"), [(800, 850), (860, 850), (950, 900)])
def test_what_holds_least_is_recomputed_more_where_that_holds_less(place, monkeypatch, budget, peak_bytes) -> None:
    """So a refusal names the smaller of two plans with one sharding, and the question with that budget finds it."""
    found = Least(simulated(900), 900.0, 900.0, (), simulated(850))
    monkeypatch.setattr(place.solver, "_least_by_rows", lambda settings: found)
    monkeypatch.setattr(place.solver, "starts", lambda settings: [])
    least = place.solver.least(replace(place.settings("joint"), budget_bytes=budget))
    assert least.answer.simulation.peak_bytes == peak_bytes


def test_a_later_way_begins_with_the_row_budget_that_fitted(place, monkeypatch) -> None:
    aims, room = [], 2.0 * place.task.usable_bytes
    monkeypatch.setattr(Solver, "within", lambda self, settings, budget, aim=None, wider=None: aims.append(aim))
    settings = place.settings("joint")
    place.solver._under_budget(place.solver.without_memory(settings), replace(settings, row_budget=room))
    assert aims == [room]


def test_what_is_fastest_without_memory_is_found_once_for_all_ways(monkeypatch) -> None:
    """Each way asks with a restriction of its own that says the same; one that was stopped is asked again."""
    (place,) = task(deep_program(NUM_DEEP), "2xh100").places
    outcomes: list[Outcome] = []
    given = [Outcome.STOPPED]

    def counted(asked: stages.Stages) -> Solution:
        found = stages.solve_in_stages(asked)
        outcomes.append(given.pop() if given else found.outcome)
        return replace(found, outcome=outcomes[-1])

    monkeypatch.setattr(solve, "solve_in_stages", counted)
    for way in ("none", "buckets", "none"):
        found = place.solver.travelling(way).without_memory(place.settings("joint"))
    assert outcomes == [Outcome.STOPPED, Outcome.OPTIMAL]
    assert found.outcome is Outcome.OPTIMAL
    place.solver.without_memory(place.settings("fsdp"))
    assert len(outcomes) == 3


def test_a_held_sharding_is_solved_once(place, monkeypatch) -> None:
    """Branch and bound begins with the heaviest options, which are those of its only leaf."""
    settings, solver = place.settings("joint"), place.solver
    model, sharding, recompute, memory = solver.full()
    set_budget(model, memory, place.task.usable_bytes)  # counts are not whole in the relaxation, which proves less
    asked = settings.held_to(solver.starts(settings)[1]).stages(model, sharding, recompute)
    asked.effort, asked.gap, asked.patience = replace(asked.effort, few_columns=0), 0.0, Patience(math.inf, 0.0)
    solves, solve = [], stages._Held.solve
    monkeypatch.setattr(stages._Held, "solve", lambda self, *args: solves.append(args) or solve(self, *args))
    assert stages.solve_in_stages(asked).values is not None
    assert len(solves) == 1


@pytest.mark.slow
def test_where_nothing_is_fast_enough_one_solve_says_so(monkeypatch) -> None:
    """Smaller row budgets hold less, and what does not fit need not be simulated."""
    (place,) = task(tiny_program("resnet-tiny"), "2xh100", mesh=(2,), budget_bytes=795_648).places
    solver, asked = place.solver.travelling("buckets"), place.settings("joint")
    proven = Fitting(solver, asked, place.task.usable_bytes)._solve(math.inf).bound  # more than the relaxation says
    search = Fitting(solver, replace(asked, cutoff_s=proven), place.task.usable_bytes)
    solves, solve = [], Fitting._solve
    monkeypatch.setattr(Fitting, "_solve", lambda self, cutoff_s: solves.append(solve(self, cutoff_s)) or solves[-1])
    monkeypatch.setattr(Fitting, "_note", lambda *_: pytest.fail("a plan was simulated that is too slow"))
    found = search.run()
    assert isinstance(found, Infeasible)
    assert found.outcome is Outcome.SLOWER
    assert [solution.outcome for solution in solves] == [Outcome.SLOWER]


@pytest.mark.parametrize(("times", "asks"), [(1.0, False), (1.05, True)])
def test_what_lies_beside_an_answer_is_searched_where_its_objective_says_little_of_its_step(monkeypatch, times, asks):
    place, known = answered()
    answer = replace(known, gap=0.0, row_budget=float(place.task.budget_bytes))
    asked = []
    monkeypatch.setattr(Fitting, "beside", lambda *_: asked.append(_))
    monkeypatch.setattr(Fitting, "fitted", lambda *_: None)
    found = guard.no_slower_than_known(
        place.solver, place.settings("joint"), answer, lambda answer: times * answer.objective_s
    )
    assert found is answer
    assert bool(asked) == asks


def test_where_rows_count_too_much_the_smallest_plan_by_them_proves_nothing(monkeypatch):
    """It misses the budget by 4 %, and they count half as much again: under its row budget there is one that fits."""
    (place,) = task(blocks_program(4, 2048), "cpu:2").places
    solver, larger = place.solver, place.solver.within(place.settings("joint"), 312_000)
    assert isinstance(larger, Answer)
    place.task.budget_bytes = budget = int(larger.simulation.peak_bytes / 1.04)
    excess = budget // 2
    memory = solver.full()[3]
    memory.static_mib += excess / MIB
    asked: list[Any] = []
    monkeypatch.setattr(
        Solver,
        "least",
        lambda *_: asked.append(_) or Least(larger, larger.simulation.peak_bytes + excess, 0.0, ("a row",)),
    )
    found = solver.within(place.settings("joint"), budget)
    assert asked
    assert isinstance(found, Answer)
    assert found.simulation.peak_bytes <= budget


def test_the_solver_prints_nothing(capfd) -> None:
    """Some releases print their name where a solver is made; a plan on the standard output is to be JSON alone."""
    model = Model()
    model.row("one", [(model.column(cost=1.0), 1.0)], lower=1.0)
    assert model.solve().objective == 1.0
    assert model.solve(relaxed=True).objective == 1.0
    assert capfd.readouterr() == ("", "")


def test_a_forbidden_sharding_is_not_proposed_again(place) -> None:
    """Each is slower than those before, and the model is as it was afterwards."""
    solver, settings = place.solver, place.settings("joint")
    model, sharding = solver.plain()
    before = list(model.row_names), list(model.indices), list(model.starts)
    found: list[tuple[tuple[int, ...], float]] = []
    with model.extra_rows():
        for _ in range(3):
            solution = stages.solve_in_stages(settings.stages(model, sharding))
            assert solution.values is not None
            options = stages.chosen(sharding, solution.values)
            found.append((tuple(options.values()), solution.objective))
            stages.forbid(model, sharding, options)
    assert len({options for options, _ in found}) == 3
    assert found[1][1] >= found[0][1] * (1 - GAP)
    assert found[2][1] >= found[1][1] * (1 - GAP)
    assert (model.row_names, model.indices, model.starts) == before


def slow_answer(place: Place) -> Answer:
    """A plan that takes no search, as an answer of which little is proven within a budget that binds."""
    known = first_that_fits(place, "joint", place.settings("joint"))
    assert known is not None
    return replace(known.bounded(0.9 * known.objective_s), row_budget=float(place.task.budget_bytes or 0))


def test_shardings_that_are_good_one_by_one_are_proposed(place) -> None:
    takes = lambda found: place.overlapped(found)[1].step_s  # noqa: E731
    known = slow_answer(place)
    found = guard.proposed_one_by_one(place.solver, place.settings("joint"), known, takes)
    assert takes(found) < takes(known)
    assert found.simulation.peak_bytes <= place.task.budget_bytes
    assert guard.proposed_one_by_one(place.solver, place.settings("joint"), found, takes) is found


@pytest.mark.slow  # searches one by one to their end
def test_a_sharding_that_is_good_one_by_one_is_fitted_for_travel_further_ahead() -> None:
    (place,) = task(tiny_program("gpt2-tiny"), "2xh100", mesh=(2,), budget_bytes=1_000_000).places
    answer = place.solver.travelling("none").solve(place.settings("joint"))
    assert isinstance(answer, Answer)
    takes = lambda found: place.overlapped(found)[1].step_s  # noqa: E731
    known = answer.bounded(0.9 * answer.objective_s)
    found = guard.proposed_one_by_one(place.solver, place.settings("joint"), known, takes)
    assert takes(found) < takes(known)
    assert found.decisions.overlap != "none"
    assert found.simulation.peak_bytes <= place.task.budget_bytes
    assert found.bound_s == pytest.approx(known.bound_s), "it proves nothing of other shardings"


@pytest.mark.parametrize(("gap", "proposes"), [(0.001, False), (0.3, True)])
def test_they_are_proposed_where_little_is_proven_of_buckets(monkeypatch, place, gap, proposes) -> None:
    answer = slow_answer(place)
    asked = []
    monkeypatch.setattr(ways, "proposed_one_by_one", lambda *each: asked.append(each) or each[2])
    monkeypatch.setattr(Ways, "_solve", lambda *_: answer.bounded((1 - gap) * answer.objective_s))
    solve_on(place, "joint")
    assert bool(asked) == proposes


def test_a_relaxation_that_is_stopped_does_not_prove_that_nothing_fits(place, monkeypatch) -> None:
    assert place.solver.lets_nothing_into(1.0, place.settings("joint"))
    monkeypatch.setattr(milp.Relaxation, "solve", lambda *_, **__: Outcome.STOPPED)
    assert not place.solver.lets_nothing_into(1.0, place.settings("joint"))


@pytest.mark.slow  # two searches to the end of their work
def test_more_memory_is_no_slower_where_buckets_are_not_proven() -> None:
    """By the rows of buckets the faster sharding fits too, and their own search does not come upon it."""
    place = place_of("resnet-tiny", {}, "8xa100", (8,))
    seconds = []
    for place.task.budget_bytes in (357_376, 364_523):
        place.task.deadline = Deadline(place.task.time_limit_s, clock_s=math.inf)
        seconds.append(place.overlapped(solve_on(place, "joint"))[1].step_s)
    assert seconds[1] <= seconds[0] * (1 + GAP)
