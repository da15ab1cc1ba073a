"""What a step waits for of what is on its way: by the objective as by the clocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tests.builders import task, tiny_program
from tests.grids import slow_but
from tests.models import plain
from trainwright.capture.cached import cached_capture
from trainwright.planner.best_first import solve_on
from trainwright.planner.costs.price import Price
from trainwright.planner.model.decode import decisions_from, read_choice
from trainwright.planner.model.milp import Solution
from trainwright.planner.model.outcome import Outcome
from trainwright.planner.problem.problem import Decision
from trainwright.planner.search.answer import Infeasible
from trainwright.planner.search.solve import Solver
from trainwright.planner.search.stages import held_at
from trainwright.planner.task import Place
from trainwright.program.decisions import Overlap
from trainwright.program.program import Program, build_program


@cache
def program_of(name: str) -> Program:
    """A small model of the zoo, or one of those that are written as anybody would."""
    build = getattr(plain, name, None)
    return tiny_program(name) if build is None else build_program(cached_capture(*build()))


def told(place: Place, way: Overlap, options: Mapping[Decision, int]) -> tuple[float, Price]:
    """The objective of a sharding whose parameters travel in one way, where everything is kept, and its price by the clocks.

    Next to nothing counts as exposed that the rows have as hidden.
    """
    solver = Solver(place.problem, place.simulate, way, way, 1e-6)
    model, sharding = solver.plain()
    solution = model.solve(fixed=held_at(sharding, options))
    decisions = replace(decisions_from(place.problem, read_choice(solution.values, sharding, None)), overlap=way)
    return solution.objective, place.price_of(decisions)


def drawn(place: Place, seed: int, number: int) -> Iterator[Mapping[Decision, int]]:
    """Shardings drawn at random: the best by costs that are."""
    rng = np.random.default_rng(seed)
    model, sharding = Solver(place.problem, place.simulate).plain()
    for _ in range(number):
        cost = {column: seconds * rng.lognormal(0, 0.7) for column, seconds in enumerate(model.cost) if seconds}
        for column in (column for columns in sharding.choice.values() for column in columns):
            cost[column] = cost.get(column, 0.0) + rng.exponential(2e-5)
        yield read_choice(model.solve(cost=cost, gap=0.2).values, sharding, None).options


CASES = [
    ("vit-tiny", "2xh100", (2,), 1e-3),
    ("resnet-tiny", "2xh100", (2,), 1e-3),
    ("llama-tiny", "2xh100", (2,), 2e-3),  # much is hidden
    ("bert-tiny", "8xa100", (8,), 1e-3),
    ("gpt2-tiny", "2xh100", (2,), 3e-3),  # two regions read the embedding
    ("vit-tiny", "2x4xa100", (2, 4), 1e-2),  # nodes and GPUs have links of their own
]


@pytest.mark.parametrize("max_num_ops", [400, 0])
@pytest.mark.parametrize(("name", "hardware", "mesh", "within"), slow_but([CASES[0]], CASES))
def test_what_a_region_waits_for_is_what_the_clocks_say(monkeypatch, name, hardware, mesh, within, max_num_ops):
    """Gathers that begin where their region begins are hidden by what runs before they are read, and by nothing else."""
    monkeypatch.setattr("trainwright.planner.problem.problem.MANY_OPS", max_num_ops)
    (place,) = task(tiny_program(name), hardware, mesh=mesh).places
    for recipe in ("ddp", "fsdp"):
        options = solve_on(place, recipe).choice.options
        exact = 1e-4 if recipe == "ddp" else within
        objective_s, price = told(place, "buckets", options)
        assert objective_s == pytest.approx(price.step_s, rel=exact), recipe


@pytest.mark.parametrize("way", ["buckets", "ahead"])
def test_sums_that_leave_before_the_first_region_s_backward_are_hidden_by_it(way):
    (place,) = task(tiny_program("vit-tiny"), "2xh100", mesh=(2,)).places
    whole, split = (solve_on(place, recipe).choice.options for recipe in ("ddp", "fsdp"))
    first = place.problem.program.regions[0]
    read_first = {use.source.decision for use in place.problem.uses if first in use.region_class.members}
    options = {decision: (split if decision in read_first else whole)[decision] for decision in whole}
    objective_s, price = told(place, way, options)
    assert price.hidden_comm_s > 5e-6, "the sum of what stays whole"
    assert objective_s == pytest.approx(price.step_s, rel=1e-3)
    # where the first region reads what is whole, the sum leaves when all is computed
    objective_s, price = told(place, way, whole)
    assert price.hidden_comm_s == pytest.approx(0.0, abs=1e-9)
    assert objective_s == pytest.approx(price.step_s, rel=1e-4)


DRAWN = [
    ("build_moe", "2x2xh100", (4,), 1e-3),
    ("build_transformer", "4xa100", (4,), 1e-3),
    ("build_transformer", "2x2xh100", (2, 2), 1e-2),
    ("build_cells", "2x2xh100", (2, 2), 1e-2),  # one region reads a weight in several places
    ("build_unet", "2x2xh100", (4,), 1e-3),
    ("build_tied", "4xa100", (4,), 1e-3),
    ("gpt2-tiny", "2xh100", (2,), 1e-3),
    ("vit-tiny", "2x2xh100", (2, 2), 1e-2),
    ("t5-tiny", "2xh100", (2,), 1e-3),
    ("resnet-tiny", "8xa100", (8,), 1e-3),
    ("mixtral-tiny", "4xa100", (4,), 1e-3),
]


@pytest.mark.parametrize("way", ["buckets", "ahead"])
@pytest.mark.parametrize(("name", "hardware", "mesh", "over"), slow_but(DRAWN[:2], DRAWN))
def test_no_sharding_is_faster_than_its_objective(name, hardware, mesh, over, way):
    """The objective bounds the price from below, so what is proven of it holds; and it is close, so it ranks plans."""
    (place,) = task(program_of(name), hardware, mesh=mesh).places
    for options in drawn(place, seed=0, number=6):
        objective_s, price = told(place, way, options)
        assert (1 - 0.1) * price.step_s <= objective_s <= (1 + over) * price.step_s


def test_where_exchanges_wait_for_sums_joint_is_no_slower_than_a_recipe():
    """An embedding that is split leaves an exchange behind the sum of the rest: the objective has to know that it waits."""
    (place,) = task(tiny_program("gpt2-tiny"), "2xh100", mesh=(2,)).places
    steps = {recipe: place.overlapped(solve_on(place, recipe))[1].step_s for recipe in ("joint", "ddp", "fsdp")}
    assert steps["joint"] <= min(steps.values())


@pytest.mark.parametrize("outcome", [Outcome.STOPPED, Outcome.SLOWER])
def test_a_search_that_was_stopped_proves_nothing(monkeypatch, outcome):
    (place,) = task(tiny_program("llama-tiny"), "2xh100", mesh=(2,), budget_bytes=2_000_000).places
    settings = replace(place.settings("joint"), cutoff_s=1.0, seeks_least=False)
    found = Solution(outcome, None, math.inf, 1.0 if outcome is Outcome.SLOWER else -math.inf)
    monkeypatch.setattr("trainwright.planner.search.fitting.solve_in_stages", lambda *_: found)
    refused = place.solver.within(settings, place.task.budget_bytes)
    assert isinstance(refused, Infeasible)
    assert (refused.outcome, refused.bound_s) == (outcome, 1.0 if outcome is Outcome.SLOWER else 0.0)


def test_an_exchange_over_one_of_two_links_waits_for_the_sums_on_it():
    """Behind it nothing is hidden any more, though another link is free."""
    (place,) = task(tiny_program("gpt2-tiny"), "2x4xa100", mesh=(2, 4)).places
    answer = solve_on(place, "joint")
    assert answer.objective_s == pytest.approx(place.overlapped(answer)[1].step_s, rel=5e-3)
