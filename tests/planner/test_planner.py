"""The planner against oracles: brute force, its own prices read off the local program, real gradients."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch

from tests.builders import (
    Blocks,
    blocks_program,
    make_optimizer,
    price_of,
    question,
    task,
    tiny_program,
    whole_price_of,
)
from tests.grids import slow_but
from tests.planner_ranks import run_ranks, shard, whole_values
from trainwright import optim
from trainwright.artifacts import Plan, Refusal, UserError
from trainwright.capture.cached import cached_capture
from trainwright.hardware import resolve
from trainwright.launch.cores import num_cores
from trainwright.planner import RECIPES, check, compare, explain, make_plan
from trainwright.planner.best_first import solve_on
from trainwright.planner.budget import budget_for, usable_bytes
from trainwright.planner.costs.known_updates import Update
from trainwright.planner.costs.price import price
from trainwright.planner.costs.simulate import Simulation
from trainwright.planner.model.deadline import Deadline
from trainwright.planner.model.decode import Choice, decisions_from
from trainwright.planner.model.outcome import Outcome
from trainwright.planner.search.effort import GAP
from trainwright.planner.search.proposals import first_that_fits
from trainwright.planner.search.solve import Answer, Infeasible
from trainwright.planner.task import Place
from trainwright.planner.ways import Ways
from trainwright.profiler.saved import whole_program
from trainwright.program.plan_text import decisions_of
from trainwright.program.program import build_program
from trainwright.rank.execute import Executor
from trainwright.rank.local import build_local
from trainwright.rank.reshard import SimulatedCommunicator

presets = importlib.import_module("trainwright.hardware.presets")


TIGHT_BYTES = 1_400_000


@functools.cache
def tight_plan(solver: str) -> Plan:
    """A plan of gpt2-tiny on two ranks, within a budget that binds; a recipe's is found in seconds."""
    return make_plan(**question(tiny_program("gpt2-tiny"), budget_bytes=TIGHT_BYTES), solver=solver)


by_either = pytest.mark.parametrize("solver", slow_but(["fsdp"], ["fsdp", "joint"]))


@pytest.mark.parametrize(("num_blocks", "num_priced"), slow_but([(2, 500)], [(2, 500), (2, 1500), (3, 1500)]))
def test_the_sharding_is_the_cheapest_of_all(num_blocks, num_priced):
    (place,) = task(blocks_program(num_blocks)).places
    problem = place.problem
    assert any(decision.count == num_blocks for decision in problem.groups), "tied blocks are what is tested"
    answer = solve_on(place, "joint")
    combinations = list(itertools.product(*(range(len(decision.options)) for decision in problem.decisions)))
    assert 100 < len(combinations) < 200_000
    # A spread of them, and the solver's own, each priced from its local program.
    own = tuple(answer.choice.options[decision] for decision in problem.decisions)
    prices = {}
    for options in {*combinations[:: max(1, len(combinations) // num_priced)], own}:
        decisions = decisions_from(problem, Choice(dict(zip(problem.decisions, options))))
        prices[options] = price_of(place, decisions, "buckets")
    assert answer.decisions.overlap == "buckets"
    assert answer.objective_s == pytest.approx(prices[own], rel=1e-6)
    assert prices[own] <= min(prices.values()) * (1 + 1.1e-3)


def test_changing_any_one_decision_gains_nothing():
    (place,) = task(tiny_program("gpt2-tiny")).places
    answer = solve_on(place, "joint")
    best = price_of(place, answer.decisions)
    for decision in place.problem.decisions:
        for option in range(len(decision.options)):
            changed = Choice({**answer.choice.options, decision: option})
            found = price_of(place, decisions_from(place.problem, changed), answer.decisions.overlap)
            assert found >= best * (1 - 1.1e-3)


@pytest.mark.slow
def test_recomputation_comes_close_to_the_best_of_all():
    """Every number of reruns of every group, simulated and priced; rows see less than the simulation, hence 5 %."""
    num_blocks = 3
    (place,) = task(blocks_program(num_blocks, 512), "cpu:1").places
    problem = place.problem
    plain = solve_on(place, "joint")
    smallest = place.solver.smallest(place.settings("joint"))
    low, high = smallest.simulation.peak_bytes, plain.simulation.peak_bytes
    assert low < 0.9 * high
    inside = [decision for decision in problem.groups if decision.count == num_blocks]
    found = []
    for counts in itertools.product(range(num_blocks + 1), repeat=len(inside)):
        decisions = decisions_from(problem, Choice(dict(plain.choice.options), dict(zip(inside, counts))))
        found.append((place.simulate(decisions).peak_bytes, price_of(place, decisions)))
    for share in (0.3, 0.7):
        place.task.budget_bytes = int(low + share * (high - low))
        answer = solve_on(place, "joint")
        best = min(step_s for peak, step_s in found if peak <= usable_bytes(place.task.budget_bytes))
        assert answer.simulation.peak_bytes <= usable_bytes(place.task.budget_bytes)
        assert price_of(place, answer.decisions) <= 1.05 * best


@pytest.mark.slow
@pytest.mark.parametrize(("num_cores", "flags"), [(2, ""), (4, "avx512f"), (16, "avx512f avx512_bf16")])
def test_every_plan_fits_and_joint_is_fastest_on_other_machines(num_cores, flags, monkeypatch):
    monkeypatch.setattr(presets, "num_cores", lambda: num_cores)
    monkeypatch.setattr(presets.machine, "cpu_flags", lambda: frozenset(flags.split()))
    for name, share in itertools.product(("gpt2-tiny", "llama-tiny"), (0.3,)):
        test_every_plan_fits_and_joint_is_fastest(name, "cpu:2", (2,), share)


@pytest.mark.parametrize(
    ("name", "hardware", "mesh", "share"),
    [
        ("blocks", "cpu:2", (2,), 0.3),
        pytest.param("gpt2-tiny", "cpu:2", (2,), 0.15, marks=pytest.mark.slow),
        pytest.param("gpt2-tiny", "cpu:2", (2,), 0.6, marks=pytest.mark.slow),
        pytest.param("llama-tiny", "cpu:2", (2,), 0.15, marks=pytest.mark.slow),
        pytest.param("llama-tiny", "cpu:2", (2,), 0.6, marks=pytest.mark.slow),
        pytest.param("llama-tiny", "cpu:4", (4,), 0.15, marks=pytest.mark.slow),
        pytest.param("llama-tiny", "cpu:4", (4,), 0.6, marks=pytest.mark.slow),
        pytest.param("gpt2-tiny", "cpu:4", (2, 2), 0.4, marks=pytest.mark.slow),
    ],
)
def test_every_plan_fits_and_joint_is_fastest(name, hardware, mesh, share):
    program = blocks_program(3, 2048) if name == "blocks" else tiny_program(name)
    (place,) = task(program, hardware, mesh=mesh).places
    high = solve_on(place, "joint").simulation.peak_bytes
    low = place.solver.smallest(place.settings("joint")).simulation.peak_bytes
    place.task.budget_bytes = budget = int(low + share * (high - low))
    answers = {solver: solve_on(place, solver) for solver in RECIPES}
    assert isinstance(answers["joint"], Answer)
    found = {s: place.overlapped(a)[1].step_s for s, a in answers.items() if isinstance(a, Answer)}
    assert found["joint"] <= min(found.values()) * 1.002
    for solver, answer in answers.items():
        if isinstance(answer, Answer):
            assert answer.simulation.peak_bytes <= usable_bytes(budget), solver
            # by the way to travel that it was searched for; it runs with parameters as far ahead as they fit
            prices = [price_of(place, answer.decisions, way) for way in ("none", "buckets")]
            assert any(answer.objective_s == pytest.approx(price, rel=1e-4) for price in prices), solver
        else:
            assert answer.smallest is None or answer.smallest.simulation.peak_bytes > usable_bytes(budget), solver


@pytest.mark.parametrize(
    ("num", "hardware", "budget"),
    slow_but(
        [(2, "2xh100", None)],
        [(2, "2xh100", None), (2, "2xh100", 1_607_000), (8, "8xa100", 1_429_504)],
    ),
)
def test_joint_is_no_slower_than_a_recipe_where_the_objective_is_off(num, hardware, budget):
    """By the objective `ddp` is 0.1 % slower on two, and 0.2 % faster by the price; `two-stage` 0.7 % slower, and 0.4 % faster.

    On eight memory binds, and `two-stage` recomputes.
    """
    (place,) = task(tiny_program("resnet-tiny"), hardware, mesh=(num,), budget_bytes=budget).places
    answers = {}
    for recipe in RECIPES:
        place.task.deadline = Deadline(place.task.time_limit_s, clock_s=math.inf)
        answers[recipe] = solve_on(place, recipe)
    found = {recipe: place.overlapped(answer) for recipe, answer in answers.items() if isinstance(answer, Answer)}
    assert found["joint"][1].step_s == min(takes.step_s for _, takes in found.values())
    for running, takes in found.values():
        assert place.price_of(running.decisions).step_s == takes.step_s


def test_where_everything_fits_two_stage_takes_the_fastest_sharding():
    """Shardings for a share of the budget are chosen by the objective of plans within one, which ranks others first."""
    (place,) = task(tiny_program("resnet-tiny"), "2xh100", mesh=(2,), budget_bytes=2**30).places
    steps = {recipe: place.overlapped(solve_on(place, recipe))[1].step_s for recipe in ("joint", "two-stage")}
    assert steps["two-stage"] == steps["joint"]


@pytest.mark.parametrize(
    "budget", [None, *(pytest.param(size, marks=pytest.mark.slow) for size in (TIGHT_BYTES, 1_700_000))]
)
def test_comparing_joint_is_never_slower(budget):
    found = compare(**question(tiny_program("gpt2-tiny"), budget_bytes=budget, time_limit_s=10.0))
    assert set(found) == set(RECIPES)
    plans = {solver: plan for solver, plan in found.items() if isinstance(plan, Plan)}
    assert plans["joint"].predicted.step_s == min(plan.predicted.step_s for plan in plans.values())
    assert all(plan.predicted.peak_bytes <= usable_bytes(budget or 2**60) for plan in plans.values())


@pytest.mark.parametrize("finds", [True, False])
def test_a_first_plan_that_the_search_does_not_beat_is_the_answer(finds, monkeypatch):
    """Its gap is that of its step to what the search proved: a bound, or that nothing is faster."""
    (place,) = task(tiny_program("gpt2-tiny"), "cpu:2", mesh=(2,), budget_bytes=2**30).places
    first = place.overlapped(first_that_fits(place, "joint", place.settings("joint")))[1]
    slower, overlapped = replace(solve_on(place, "fsdp"), gap=0.9), Place.overlapped

    def slowed(self, answer):
        found, price = overlapped(self, answer)
        return found, replace(price, compute_s=1e3) if answer.gap == slower.gap else price

    monkeypatch.setattr(Place, "overlapped", slowed)
    asked, result = [], slower if finds else Infeasible(Outcome.SLOWER)
    monkeypatch.setattr(Ways, "_solve", lambda self, settings: asked.append(settings) or result)
    found = solve_on(place, "joint")
    assert asked[0].cutoff_s == pytest.approx(first.step_s * (1 - GAP))
    assert found.objective_s == pytest.approx(first.step_s)
    assert found.objective_s == pytest.approx(price_of(place, found.decisions))
    assert found.bound_s == pytest.approx(slower.bound_s if finds else first.step_s * (1 - GAP))


STEPS = [("gpt2-tiny", "fsdp"), ("gpt2-tiny", "joint"), ("llama-tiny", "joint")]


@pytest.mark.parametrize(("name", "solver"), slow_but(STEPS[:1], STEPS))
def test_a_step_is_the_sum_of_its_parts(name, solver):
    other = question(tiny_program("llama-tiny"), "cpu:4", mesh=(4,), budget_bytes=1_500_000)
    found = tight_plan(solver) if name == "gpt2-tiny" else make_plan(**other)
    assert found.predicted.peak_bytes <= found.budget_bytes - 4096, "what the simulation does not see has its reserve"
    assert found.predicted.step_s == pytest.approx(
        found.predicted.compute_s + found.predicted.exposed_comm_s + found.predicted.recompute_s
    )


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_a_group_that_runs_again_takes_what_is_run(name):
    """Its last addition, which the next block reads, is kept: it is not run, and not charged."""
    (place,) = task(tiny_program(name)).places
    plain = solve_on(place, "ddp")
    is_partial = []
    for decision in place.problem.groups:
        option = plain.choice.options[decision]
        if decision.count == 1 or not any(op.requires_grad for op in decision.group.ops):
            continue
        decisions = decisions_from(place.problem, Choice(dict(plain.choice.options), {decision: 1}))
        executor = Executor(build_local(place.problem.program, decisions, SimulatedCommunicator(decisions.mesh)))
        found = price(executor, place.problem.costs, place.task.optimizer_cost)
        assert found.recompute_s == pytest.approx(decision.rerun_s[option], rel=1e-9, abs=1e-12), decision.key
        is_partial.append(decision.rerun_s[option] < 0.99 * decision.forward_s[option])
    assert any(is_partial)
    assert not all(is_partial)


@pytest.mark.parametrize("name", ["gpt2-tiny", "vit-tiny"])
def test_sums_for_which_nothing_waits_are_free(name):
    """The count of labels is summed up from the step's begin on, the loss behind the backward: gradients alone are waited for."""
    (place,) = task(tiny_program(name)).places
    answer = solve_on(place, "ddp")
    found = place.price(answer.simulation)
    of_loss = [seconds for key, seconds in found.by_op.items() if "cross_entropy.out" in key]
    assert of_loss == [0.0]
    assert all(
        decision.inner_comm_s[option] == (0.0, 0.0)
        for decision, option in answer.choice.options.items()
        if decision.group is not None
    )
    assert answer.objective_s == pytest.approx(found.serial_s, rel=1e-6)


def test_data_parallelism_reduces_every_gradient_once():
    program = tiny_program("llama-tiny")
    (place,) = task(program).places
    simulation = solve_on(place, "ddp").simulation
    num_bytes = sum(tensor.num_bytes for tensor in program.params)
    extra = simulation.comm_bytes["all_reduce"] - num_bytes
    assert set(simulation.comm_bytes) == {"all_reduce"}
    assert 0 <= extra <= 16, "the loss and its count of labels"


def test_fsdp_gathers_every_weight_and_scatters_every_gradient():
    program = tiny_program("llama-tiny")
    (place,) = task(program).places
    answer = solve_on(place, "fsdp")
    num_bytes = sum(tensor.num_bytes for tensor in program.params)
    assert all(at >= 0 for layout in answer.decisions.params.values() for at in layout)
    sent = answer.simulation.comm_bytes
    # An odd vocabulary is padded to even shards.
    assert num_bytes <= sent["all_gather"] <= 1.01 * num_bytes
    assert num_bytes <= sent["reduce_scatter"] <= 1.01 * num_bytes
    place.task.budget_bytes = int(0.9 * answer.simulation.peak_bytes)
    tight = solve_on(place, "fsdp")
    assert isinstance(tight, Answer)
    assert tight.simulation.comm_bytes["reduce_scatter"] == sent["reduce_scatter"]


def test_megatron_reduces_four_activations_a_layer():
    program = tiny_program("llama-tiny")
    num_layers = 2
    activation = 4 * 32 * 64 * 4
    (place,) = task(program).places
    answer = solve_on(place, "megatron")
    assert set(answer.simulation.comm_bytes) <= {"all_reduce", "all_gather"}
    large = answer.simulation.comm_bytes["all_reduce"] // activation
    # Two forward and two backward a layer, and at most one each for the embedding and the head.
    assert 4 * num_layers <= large <= 4 * num_layers + 2


@pytest.mark.parametrize("name", slow_but(["resnet-tiny"], ["bert-tiny", "vit-tiny", "resnet-tiny", "mixtral-tiny"]))
@pytest.mark.parametrize(
    ("hardware", "mesh"),
    [("cpu:2", (2,)), pytest.param("cpu:4", (4,), marks=pytest.mark.slow), ("cpu:4", (2, 2))],
)
def test_megatron_always_has_a_plan(name, hardware, mesh):
    program = tiny_program(name)
    plan = make_plan(**question(program, hardware, mesh=mesh), solver="megatron")
    without_rule = [key for key in plan.modules if key.endswith(":conv2d")]
    assert bool(without_rule) == (name in ("vit-tiny", "resnet-tiny"))
    assert all(any(key in note for note in plan.notes) for key in without_rule)
    assert all(set(plan.modules[key].split) == {"n"} for key in without_rule), "data parallelism"
    linear = [found.split[-1] for key, found in plan.modules.items() if key.endswith(":linear")]
    assert linear
    assert not {"b0", "R"} & set(linear)


@by_either
def test_a_plan_reads_back_as_the_same_decisions(solver):
    program = tiny_program("gpt2-tiny")
    plan = tight_plan(solver)
    again = decisions_of(program, Plan.parse(plan.to_json()))
    assert decisions_of(program, plan) is not again
    assert again.recomputed
    (place,) = task(program, budget_bytes=TIGHT_BYTES).places
    assert place.simulate(again).peak_bytes == plan.predicted.peak_bytes
    assert price_of(place, again) == pytest.approx(plan.predicted.step_s)
    assert check(plan, program, TIGHT_BYTES, optim.record("adamw"), make_optimizer).predicted == plan.predicted
    with pytest.raises(Refusal, match="peak of at most"):
        check(plan, program, 1_000_000, optim.record("adamw"), make_optimizer)


@by_either
def test_a_plan_fits_the_smallest_budget_for_its_peak_and_none_below(solver):
    program, plan = tiny_program("gpt2-tiny"), tight_plan(solver)
    fits = budget_for(plan.predicted.peak_bytes)
    assert check(plan, program, fits, optim.record("adamw"), make_optimizer).budget_bytes == fits
    with pytest.raises(Refusal, match="a budget of 1 B more would do"):
        check(plan, program, fits - 1, optim.record("adamw"), make_optimizer)


@pytest.mark.parametrize("name", ["gpt2-tiny", "resnet-tiny"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum"])
def test_the_peak_is_that_of_two_whole_steps(monkeypatch, name, optimizer):
    program = tiny_program(name)
    (place,) = task(program, make_optimizer=lambda params: optim.create(optimizer, params)).places
    answer = solve_on(place, "ddp")
    module, peaks = sys.modules[Simulation.__module__], []
    run_step = module._step

    def run_two_steps(executor, sources, update, tracker, *others):
        for _ in range(2):
            update.optimizer.zero_grad(set_to_none=True)
            run_step(executor, sources, update, tracker, *others)
            peaks.append(tracker.peak_bytes)

    monkeypatch.setattr(Update, "warm_up", lambda *_: None)
    monkeypatch.setattr(module, "_step", run_two_steps)
    monkeypatch.setattr(place, "_updates", None)
    assert place.simulate(answer.decisions).peak_bytes == answer.simulation.peak_bytes
    assert peaks[0] < peaks[1], "the first step holds no states"


def test_the_simulation_knows_how_many_threads_a_rank_has():
    before = torch.get_num_threads()
    seen = []

    def recording(params):
        seen.append(torch.get_num_threads())
        return make_optimizer(params)

    cluster = resolve("cpu:64")
    found = task(blocks_program(2), cluster=cluster, mesh=(64,), make_optimizer=recording)
    elsewhere = task(blocks_program(2), cluster=cluster.model_copy(update={"fingerprint": "other"}), mesh=(64,))
    assert elsewhere.num_threads is None
    try:
        torch.set_num_threads(3)
        solve_on(found.places[0], "ddp")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {max(1, num_cores() // 64)}


def test_a_refusal_says_what_binds_and_what_would_do():
    program = blocks_program(2, 2048)
    with pytest.raises(Refusal, match="memory is fullest in the backward of") as refused:
        make_plan(**question(program, budget_bytes=90_000))
    assert "for which there is a plan" in str(refused.value)
    with pytest.raises(Refusal, match="--solver joint"):
        make_plan(**question(program, budget_bytes=220_000), solver="ddp")


@pytest.mark.slow  # test_planner_promises.py asks again with the budgets of smaller models
def test_the_smallest_budget_would_do():
    program = tiny_program("gpt2-tiny")
    (place,) = task(program, budget_bytes=400_000).places
    failure = solve_on(place, "joint")
    assert isinstance(failure, Infeasible)
    smallest = failure.smallest.simulation.peak_bytes
    plan = make_plan(**question(program, budget_bytes=budget_for(smallest), time_limit_s=10.0))
    assert plan.predicted.peak_bytes <= smallest


@pytest.mark.parametrize("solver", slow_but(["two-stage"], ["fsdp", "two-stage", "joint"]))
def test_what_pins_say_of_recomputing_holds_for_every_solver(solver):
    asked = {**question(blocks_program(3, 2048), "2xh100", budget_bytes=300_000), "pins": ("*=recompute",)}
    again = [
        op.recomputed for key, op in make_plan(**asked, solver=solver).modules.items() if "tanh" in key or "up:" in key
    ]
    assert again == [{"out": "all"}] * 2
    with pytest.raises(Refusal, match="is needed"):
        make_plan(**{**asked, "pins": ("*=keep",)}, solver=solver)


def test_pins_hold():
    program = tiny_program("gpt2-tiny")
    plan = make_plan(**question(program, pins=("h.*.attn:sdpa=shard(b0)@cpu", "h.*.mlp.act=recompute")))
    assert plan.modules["transformer.h.{0-1}.attn:sdpa"].split == ("b0",)
    assert plan.modules["transformer.h.{0-1}.mlp.act:gelu"].recomputed["out"] == "all"
    free = make_plan(**question(program))
    assert free.predicted.step_s < plan.predicted.step_s


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("attn:sdpb=keep", "matches nothing; near are"),
        ("h.*.mlp.c_fc=shard(z)@cpu", r"there are shard\(b0\)"),
        ("h.*.mlp.c_fc=shard(o)@gpu", "the axes are cpu"),
        ("h.*.mlp.c_fc=split", "a pin is PATTERN"),
        ("h.*=begin(1)", "add --pipeline"),
    ],
)
def test_pins_that_cannot_be_obeyed(pin, message):
    with pytest.raises(UserError, match=message):
        make_plan(**question(tiny_program("gpt2-tiny"), pins=(pin,)))


def test_unknown_solvers():
    with pytest.raises(UserError, match="a solver is one of"):
        make_plan(**question(tiny_program("gpt2-tiny")), solver="best")
    with pytest.raises(UserError, match="a solver is one of even, balanced, pipeline-dp, joint"):
        make_plan(**question(tiny_program("gpt2-tiny")), solver="ddp", pipeline=2)


def test_explain_names_the_choice_and_the_next_best():
    program = tiny_program("gpt2-tiny")
    plan = make_plan(**question(program))
    found = explain(plan, program, "transformer.h.1.mlp.c_fc", optim.record("adamw"))
    row = next(row for row in found.rows if row.key.endswith("c_fc:linear"))
    assert row.option == plan.modules[row.key].split
    assert row.alternative.option != row.option
    assert row.alternative.estimated_extra_s >= -1e-3 * plan.predicted.step_s
    assert row.key in found.text()
    with pytest.raises(UserError, match="names nothing"):
        explain(plan, program, "nowhere", optim.record("adamw"))


def test_explain_prices_the_other_option_as_check_does_an_edited_plan():
    given = question(tiny_program("gpt2-tiny"), budget_bytes=1_300_000)
    plan = make_plan(**given, solver="fsdp")
    record, make = optim.record("adamw"), given["make_optimizer"]
    found = explain(plan, given["program"], "transformer.h.1.mlp.c_proj", record, make)
    row = next(row for row in found.rows if row.key.endswith("c_proj:linear"))
    other = row.alternative
    entry = plan.modules[row.key].model_copy(update={"split": other.option})
    edited = plan.model_copy(update={"modules": {**plan.modules, row.key: entry}, "budget_bytes": None})
    priced = check(edited, given["program"], None, record, make).predicted
    assert (other.step_s, other.peak_bytes) == (priced.step_s, priced.peak_bytes)
    first, time_line, memory_line, *_ = found.text().splitlines()
    assert plan.verdict in first
    assert "recomputation" in time_line
    assert memory_line.startswith("memory  binds: a step pays")
    assert "(the batch)" in found.text()
    assert ("does not fit" in found.text()) == any(
        each.alternative is not None and (each.alternative.peak_bytes or 0) > plan.budget_bytes for each in found.rows
    )


@pytest.mark.parametrize(("hardware", "mesh"), [("cpu:2", (2,)), ("cpu:4", (2, 2))])
@pytest.mark.parametrize("num_blocks", [3])
def test_gradients_under_any_plan_are_those_of_one_process(hardware, mesh, num_blocks):
    """Solved plans, tight and loose, run on ranks that are threads; float64, so that only rounding is left."""
    torch.manual_seed(0)
    model, batch = Blocks(num_blocks).double(), (torch.randn(512, 6, dtype=torch.float64),)
    program = build_program(cached_capture(model, batch, lambda out, _: out))
    values = whole_values(program, model, {"0": batch[0]})
    loss, gradients = run_ranks(program, whole_program(program).decisions, values)
    (place,) = task(program, hardware, mesh=mesh).places
    tried = [solve_on(place, solver) for solver in RECIPES] + [place.solver.smallest(place.settings("joint"))]
    assert tried[-1].decisions.recomputed
    for answer in tried:
        if isinstance(answer, Answer):
            found_loss, found = run_ranks(program, answer.decisions, values)
            assert found_loss == pytest.approx(loss, rel=1e-12)
            for tensor in program.params:
                whole = gradients[tensor.key][0][1]
                for coords, part in found[tensor.key]:
                    wanted = shard(tensor, whole, answer.decisions.params[tensor], mesh, coords)
                    torch.testing.assert_close(part, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("hardware", ["cpu:2", "8xa100"])
def test_where_no_memory_binds_latencies_are_shared_as_in_the_buckets_that_run(hardware, monkeypatch):
    """What each parameter would pay alone is several times as much, and would make another plan the fastest."""
    monkeypatch.setattr("trainwright.planner.model.hidden.EXPOSED", 1.0)  # nothing counts as hidden
    (place,) = task(tiny_program("llama-tiny"), hardware, mesh=(resolve(hardware).num_devices,)).places
    prices = {}
    for solver in ("ddp", "fsdp", "megatron", "joint"):
        answer = solve_on(place, solver)
        assert answer.decisions.overlap == place.task.furthest_overlap
        prices[solver] = price_of(place, answer.decisions)
        assert answer.objective_s == pytest.approx(prices[solver], rel=1e-6), solver
    assert prices["joint"] <= min(prices.values()) * (1 + 1e-3)
    ddp = solve_on(place, "ddp").decisions
    assert whole_price_of(place, ddp, "none").comm_s > 5 * whole_price_of(place, ddp).comm_s
