"""Within a budget that binds, parameters that travel in buckets: their latencies, what they hold, what computation hides."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.builders import blocks_program, price_of, task, tiny_program
from tests.grids import slow_but
from trainwright.planner.best_first import solve_on
from trainwright.planner.model.deadline import LEAST_S, Deadline
from trainwright.planner.model.decode import Choice, decisions_from
from trainwright.planner.model.hidden import Hidden
from trainwright.planner.model.memory import set_budget
from trainwright.planner.model.milp import Solution
from trainwright.planner.model.outcome import Outcome
from trainwright.planner.search.answer import Answer, Infeasible
from trainwright.planner.search.solve import Solver
from trainwright.planner.search.stages import held_at, solve_in_stages


def bound(name: str, hardware: str, mesh: tuple[int, ...], share: float):
    """A place whose budget is so far between the least that a plan holds and what the fastest does."""
    (place,) = task(tiny_program(name), hardware, mesh=mesh, time_limit_s=12.0).places
    high = solve_on(place, "joint").simulation.peak_bytes
    low = place.solver.smallest(place.settings("joint")).simulation.peak_bytes
    place.task.budget_bytes = int(low + share * (high - low))
    return place


@pytest.mark.slow
def test_on_slow_links_a_plan_within_a_budget_is_found_for_the_buckets_that_run():
    place = bound("llama-tiny", "cpu:2", (2,), 0.7)
    one_by_one = place.solver.solve(place.settings("joint"))
    answer = solve_on(place, "joint")
    assert answer.decisions.overlap == "buckets"
    assert answer.simulation.peak_bytes <= place.task.usable_bytes
    assert answer.objective_s == pytest.approx(price_of(place, answer.decisions), rel=1e-4)
    # and not by a little: what was chosen one by one avoids what sends many small tensors
    assert place.overlapped(answer)[1].step_s < 0.75 * place.overlapped(one_by_one)[1].step_s
    # where another mesh takes longer than the buckets, and less than one by one, the buckets are still looked at
    between = 1.05 * place.overlapped(answer)[1].step_s
    assert isinstance(solve_on(place, "joint", between), Answer)
    for recipe in ("ddp", "fsdp", "megatron", "two-stage"):
        found = solve_on(place, recipe)
        if isinstance(found, Answer):
            assert place.overlapped(answer)[1].step_s <= place.overlapped(found)[1].step_s * 1.002, recipe


def test_what_reruns_gather_again_shares_latencies_too():
    (place,) = task(tiny_program("llama-tiny")).places
    solver = place.solver.travelling("buckets")
    answer = solver.smallest(place.settings("fsdp"))
    again = [
        len(bucket.joined_gathers(sorted(gathers)))
        for rerun in answer.simulation.executor.reruns.values()
        for bucket, gathers in rerun.gathers.items()
    ]
    assert any(again), "small parameters are gathered again, together"
    assert answer.objective_s == pytest.approx(price_of(place, answer.decisions), rel=1e-4)


@pytest.mark.parametrize(
    ("recipe", "hardware"),
    slow_but(
        [("ddp", "2xh100"), ("fsdp", "cpu:2")],
        [(recipe, hardware) for recipe in ("ddp", "fsdp") for hardware in ("cpu:2", "2xh100")],
    ),
)
def test_the_rows_know_what_buckets_hold(recipe, hardware):
    """Of a plan that keeps everything: neither far below the simulation, nor far above."""
    (place,) = task(tiny_program("llama-tiny"), hardware, mesh=(2,)).places
    options = solve_on(place, recipe).choice.options
    ways = ("buckets",) if hardware == "cpu:2" else ("buckets", "ahead")
    for way in ways:
        solver = place.solver.travelling(way)
        rows = rows_peak(solver, options)
        decisions = replace(decisions_from(place.problem, Choice(options)), overlap=way)
        simulated = place.simulate(decisions).peak_bytes
        assert 0.99 * simulated <= rows <= 1.15 * simulated, way
    if recipe == "ddp":
        assert rows_peak(place.solver.travelling("none"), options) < 0.98 * rows


def rows_peak(solver, options) -> float:
    """What the rows count of a sharding when everything is kept."""
    model, sharding, recompute, memory = solver.full()
    set_budget(model, memory, math.inf)
    again = [*recompute.rerun.values(), *recompute.convert.values(), *recompute.leaves.values()]
    fixed = held_at(sharding, options) | dict.fromkeys(again, 0.0)
    return memory.peak_bytes(model.solve(relaxed=True, fixed=fixed, cost={memory.peak: 1.0}).values)


def test_where_computation_hides_what_travels_the_objective_is_near_what_runs():
    (place,) = task(tiny_program("llama-tiny"), "8xa100", mesh=(8,)).places
    steps = {}
    for recipe in ("ddp", "fsdp", "megatron", "joint"):
        answer = solve_on(place, recipe)
        steps[recipe] = place.overlapped(answer)[1]
        assert answer.decisions.overlap == "ahead"
        assert answer.objective_s == pytest.approx(steps[recipe].step_s, rel=0.03), recipe
    assert steps["fsdp"].serial_s > 1.05 * steps["fsdp"].step_s
    assert steps["joint"].step_s <= min(price.step_s for price in steps.values()) * 1.005


@pytest.mark.parametrize(
    ("outcome", "follows"),
    [(Outcome.DOES_NOT_FIT, "none"), pytest.param(Outcome.SLOWER, "ahead", marks=pytest.mark.slow)],
)
def test_where_nothing_fits_what_holds_less_is_searched_and_where_all_is_slower_what_hides_more(
    monkeypatch, outcome, follows
):
    (place,) = task(tiny_program("gpt2-tiny"), "2xh100", mesh=(2,), budget_bytes=1_500_000).places
    nothing = Infeasible(outcome, ("a row",))
    solve, searched = Solver.solve, []

    def pretended(self, *arguments):
        searched.append(self.travel_within)
        return nothing if self.travel_within == "buckets" else solve(self, *arguments)

    monkeypatch.setattr(Solver, "solve", pretended)
    answer = solve_on(place, "joint")
    assert searched[:2] == ["buckets", follows]
    assert answer.binds
    assert answer.simulation.peak_bytes <= place.task.usable_bytes


def test_that_memory_binds_is_not_forgotten_when_a_later_way_finds_nothing(monkeypatch):
    """More micro-batches are looked at as long as it does."""
    (place,) = task(blocks_program(2, 2048), "2xh100", mesh=(2,), budget_bytes=220_000).places
    monkeypatch.setattr("trainwright.planner.ways.CLOSE", -1.0)  # all ways are searched
    assert solve_on(place, "joint").binds
    place.task.budget_bytes = None
    assert not solve_on(place, "joint").binds


def test_each_way_has_a_part_of_the_time_and_the_same_ctrl_c():
    whole = Deadline(60.0)
    part = whole.first_part().first_part()
    assert part.limited(60.0) == 15
    whole.count(10)
    assert part.limited(60.0) == 5, "what one part takes, all of them have taken"
    whole.interrupt()
    assert part.has_passed
    assert part.limited(60.0) == LEAST_S


@pytest.mark.parametrize("share", slow_but([None], [None, 0.3]))
def test_in_a_long_program_a_price_stands_for_what_is_hidden(monkeypatch, share):
    """What its search proves holds of the seconds with E, which that of a short program has in its rows."""
    place = bound("llama-tiny", "2xh100", (2,), share or 1.0)
    settings = replace(place.settings("joint"), time_limit_s=10.0)

    def solved(max_num_ops: int) -> tuple[Solution, Hidden | None]:
        monkeypatch.setattr("trainwright.planner.problem.problem.MANY_OPS", max_num_ops)
        solver = Solver(place.problem, place.simulate, "ahead", "ahead")
        if share is None:
            model, sharding = solver.plain()
            return solve_in_stages(settings.stages(model, sharding)), sharding.hidden
        model, sharding, recompute, memory = solver.full()
        set_budget(model, memory, place.task.budget_bytes)
        return solve_in_stages(settings.stages(model, sharding, recompute)), sharding.hidden

    exact, hidden = solved(10**6)
    assert hidden is None, "E itself is a column"
    found, hidden = solved(0)
    assert hidden is not None
    assert hidden.waits
    assert found.bound <= exact.objective * (1 + 1e-6)
    assert exact.bound <= found.objective * (1 + 1e-6)
    assert found.objective == pytest.approx(exact.objective, rel=0.01)


SHARES_HIDDEN = [
    # a recipe within its own budget chooses other shardings than those that are known beforehand
    pytest.param(400, 0.33, marks=pytest.mark.slow),
    pytest.param(0, 0.3, marks=pytest.mark.slow),
    pytest.param(400, 0.3, marks=pytest.mark.slow),
    pytest.param(400, 0.31, marks=pytest.mark.slow),
    pytest.param(0, 0.33, marks=pytest.mark.slow),
    pytest.param(0, 0.4, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("max_num_ops", "share"), SHARES_HIDDEN)
def test_no_recipe_is_faster_within_a_budget_where_travel_is_hidden(monkeypatch, max_num_ops, share):
    monkeypatch.setattr("trainwright.planner.problem.problem.MANY_OPS", max_num_ops)
    place = bound("llama-tiny", "2xh100", (2,), share)
    answers = {recipe: solve_on(place, recipe) for recipe in ("joint", "fsdp", "two-stage")}
    steps = {name: place.overlapped(found)[1].step_s for name, found in answers.items() if isinstance(found, Answer)}
    assert len(steps) > 1
    assert steps["joint"] <= 1.002 * min(steps.values())


def test_where_exchanges_wait_for_gathers_a_plan_without_them_is_found():
    """The objective knows nothing of that; the step of its first answer shows it."""
    (place,) = task(tiny_program("resnet-tiny"), "8xa100", mesh=(8,)).places
    steps = {
        recipe: place.overlapped(solve_on(place, recipe))[1].step_s for recipe in ("joint", "megatron", "ddp", "fsdp")
    }
    assert steps["joint"] == min(steps.values())
