"""What a step waits for of what is on its way: by the objective as by the clocks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.builders import task, tiny_program
from tests.grids import slow_but
from trainwright.planner.best_first import solve_on
from trainwright.planner.costs.price import Price
from trainwright.planner.model.decode import Choice, decisions_from
from trainwright.planner.model.memory import set_budget
from trainwright.planner.model.milp import Solution
from trainwright.planner.model.outcome import Outcome
from trainwright.planner.search.answer import Infeasible
from trainwright.planner.search.stages import held_at


def objective_s(place, way: str, options) -> float:
    """The objective of a sharding whose parameters travel in one way, when everything is kept."""
    model, sharding, recompute, memory = place.solver.travelling(way).full()
    set_budget(model, memory, math.inf)
    again = [*recompute.rerun.values(), *recompute.convert.values(), *recompute.leaves.values()]
    fixed = held_at(sharding, options) | dict.fromkeys(again, 0.0)
    return model.solve(fixed=fixed).objective


def price_of(place, way: str, options) -> Price:
    """The price of the same, by the clocks."""
    decisions = replace(decisions_from(place.problem, Choice(options)), overlap=way)
    return place.price(place.simulate(decisions))


CASES = [
    ("vit-tiny", "2xh100", (2,), 1e-3),
    ("resnet-tiny", "2xh100", (2,), 1e-3),
    ("llama-tiny", "2xh100", (2,), 2e-3),  # much is hidden, of which a share counts as exposed
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
        price = price_of(place, "buckets", options)
        assert objective_s(place, "buckets", options) == pytest.approx(price.step_s, rel=exact), recipe


@pytest.mark.parametrize("way", ["buckets", "ahead"])
def test_sums_that_leave_before_the_first_region_s_backward_are_hidden_by_it(way):
    (place,) = task(tiny_program("vit-tiny"), "2xh100", mesh=(2,)).places
    whole, split = (solve_on(place, recipe).choice.options for recipe in ("ddp", "fsdp"))
    first = place.problem.program.regions[0]
    read_first = {use.source.decision for use in place.problem.uses if first in use.region_class.members}
    options = {decision: (split if decision in read_first else whole)[decision] for decision in whole}
    price = price_of(place, way, options)
    assert price.hidden_comm_s > 5e-6, "the sum of what stays whole"
    assert objective_s(place, way, options) == pytest.approx(price.step_s, rel=1e-3)
    # where the first region reads what is whole, the sum leaves when all is computed
    price = price_of(place, way, whole)
    assert price.hidden_comm_s == pytest.approx(0.0, abs=1e-9)
    assert objective_s(place, way, whole) == pytest.approx(price.step_s, rel=1e-4)


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
