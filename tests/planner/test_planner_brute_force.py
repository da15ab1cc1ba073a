"""The joint problem against every plan there is, on small random cases: one to three blocks, one and two mesh axes."""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest
import torch
from torch import nn

from tests.builders import task
from tests.planner_oracle import Oracle
from trainwright.artifacts import Tier
from trainwright.capture.cached import cached_capture
from trainwright.capture.experts import experts
from trainwright.planner.model.memory import set_budget
from trainwright.planner.model.milp import Patience
from trainwright.planner.problem.recipes import Restriction
from trainwright.planner.search.effort import Effort
from trainwright.planner.search.solve import Settings
from trainwright.planner.search.stages import solve_in_stages
from trainwright.program.program import build_program

MAX_PLANS, MAX_PLANS_MORE = 1000, 4000
NUM_CASES, NUM_CASES_BRANCHED, NUM_CASES_SHORT = 120, 16, 8
STATE_SEEDS = (1, 7, 8)
TIED_SEEDS = (
    3,
    10,
    4006,
    4007,
    4032,
    4036,
    4042,
    4064,
    4069,
    4082,
    4092,
    4104,
    4105,
    4111,
    4116,
    4121,
    4123,
    4128,
    4131,
    4145,
)


class Mixed(nn.Module):
    """Blocks of one or two products around an activation, plain, gated or normalised."""

    def __init__(self, num_blocks: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(num_blocks if kind == "norm" else 0))
        self.ups = nn.ModuleList(nn.Linear(6, 10 if kind == "two" else 6, bias=False) for _ in range(num_blocks))
        self.downs = nn.ModuleList(nn.Linear(10, 6, bias=False) for _ in range(num_blocks if kind == "two" else 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, up in enumerate(self.ups):
            y = torch.tanh(up(self.norms[index](x) if self.kind == "norm" else x))
            if self.kind == "two":
                y = self.downs[index](y)
            x = x * y if self.kind == "gate" else x + y
        return x.square().mean()


class Residual(nn.Module):
    """A block of four small ops: the least that is found as one. Blocks of other scales are other classes."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.scale * torch.tanh(x)).square()


class TiedEnds(nn.Module):
    """Two blocks, and a matrix that is read before and behind them, and may be read between them."""

    def __init__(self, num_readers: int) -> None:
        super().__init__()
        self.end = nn.Linear(6, 6, bias=False)
        self.blocks = nn.ModuleList([Residual(0.5), Residual(0.25)])
        self.between = num_readers > 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.end(x))
        x = self.blocks[1](self.end(x) if self.between else x)
        return self.end(x).square().mean()


class Mixture(nn.Module):
    """A product, and six experts of which each row has two."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6, bias=False)
        self.w_in, self.w_out = nn.Parameter(torch.rand(6, 6, 6)), nn.Parameter(torch.rand(6, 6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        weights, ids = x.softmax(-1).topk(2)
        return experts(x, ids, weights, self.w_in, self.w_out, gate="gelu").mean()


@functools.cache
def mixture_program(batch: int):
    return build_program(cached_capture(Mixture(), (torch.ones(batch, 6),), lambda out, _: out))


@functools.cache
def program_of(num_blocks: int, kind: str, batch: int):
    model = nn.Sequential(nn.Linear(6, 6, bias=False), Mixed(num_blocks, kind))
    return build_program(cached_capture(model, (torch.ones(batch, 6),), lambda out, _: out))


@functools.cache
def tied_program(num_readers: int, batch: int):
    return build_program(cached_capture(TiedEnds(num_readers), (torch.ones(batch, 6),), lambda out, _: out))


def random_case(seed: int, tied: bool = False, mixture: bool = False):
    """A place, and for a few of its decisions two options to choose from, for the others one.

    tied: of a model with a matrix that several regions read, alike as a rule; whether they share a copy is open, and one
    other decision. mixture: of a model with experts, whose split is one of the open ones.
    """
    rng = random.Random(seed)
    if mixture:
        program = mixture_program(rng.choice([8, 64]))
    elif tied:
        program = tied_program(rng.choice([2, 3]), rng.choice([4, 64]))
    else:
        program = program_of(
            rng.choice([1, 1, 2, 3]), rng.choice(["plain", "gate", "norm", "two"]), rng.choice([4, 64])
        )
    several = [("cpu:2", (2,)), ("cpu:2", (2,)), ("cpu:4", (2, 2))]
    hardware, mesh = rng.choice(several if tied or mixture else [("cpu:1", (1,)), ("cpu:1", (1,)), *several])
    (place,) = task(program, hardware, mesh=mesh).places
    decisions = place.problem.decisions
    open_ones = set(rng.sample(range(len(decisions)), 1 if tied or mixture else 2))
    open_ones |= {index for index, decision in enumerate(decisions) if mixture and decision.key.endswith(":experts")}
    allowed = {}
    for index, decision in enumerate(decisions):
        num = min(2 if index in open_ones else 1, len(decision.options))
        allowed[decision] = frozenset(rng.sample(range(len(decision.options)), num))
    if tied:
        first, *others = (decision for decision in decisions if decision.key.startswith("end:"))
        alike = [decision for decision in others if decision.options == first.options]
        allowed.update(dict.fromkeys(alike, allowed[first]))
    return place, allowed, rng


def all_plans(problem, allowed, may_leave=(), states_may_leave=(), most=MAX_PLANS):
    """Every plan as (seconds, bytes); None where there are more than `most`, too many to try."""
    if math.prod(decision.count + 1 for decision in problem.groups) > MAX_PLANS:
        return None
    found = []
    for options in itertools.product(*(sorted(allowed[decision]) for decision in problem.decisions)):
        for oracle in every_sharing(problem, dict(zip(problem.decisions, options)), may_leave, states_may_leave):
            for plan in oracle.plans():
                found.append(plan)
                if len(found) > most:
                    return None
    return found


def may_share(problem, allowed) -> bool:
    """Whether one gathered copy may serve several regions, under some of the options."""
    every = itertools.product(*(sorted(allowed[decision]) for decision in problem.decisions))
    return any(Oracle(problem, dict(zip(problem.decisions, options))).may_share() for options in every)


def every_sharing(problem, options, may_leave, states_may_leave):
    """Yield an oracle for each choice of which gathered parameters serve several regions at once."""
    able = Oracle(problem, options).may_share()
    for chosen in itertools.product([False, True], repeat=len(able)):
        shared = list(itertools.compress(able, chosen))
        yield Oracle(problem, options, may_leave, states_may_leave, shared)


def offloading(place, allowed, rng):
    """Give the place a disk, and draw two kinds of tensors that may go there; all others are held on the device."""
    costs = place.problem.costs
    rate = rng.choice([1e7, 1e9, 1e10])
    costs.tier = Tier(
        write_bytes_per_s=rate, read_bytes_per_s=2 * rate, latency_s=1e-7, overlap=rng.choice([0.0, 0.5, 1.0])
    )
    recompute = place.solver.full()[2]
    kept = {}
    for (stored, _), column in recompute.keep.items():
        kept.setdefault(stored, []).append(column)
    for (decision, _), column in recompute.keep_inner.items():
        kept.setdefault(decision, []).append(column)
    for key, column in recompute.keep_copy.items():
        kept.setdefault(key, []).append(column)
    able = [key for key, columns in kept.items() if all(column in recompute.leaves for column in columns)]
    return rng.sample(able, min(2, len(able))), kept


def states_that_may_leave(place, allowed, rng, num):
    """Draw parameters whose optimizer states may go to the disk; all others are held on the device."""
    model, _, recompute, _ = place.solver.full()
    able = sorted({param for param, option in recompute.states if option in allowed[param]}, key=lambda p: p.index)
    chosen = rng.sample(able, min(num, len(able)))
    for (param, _), column in recompute.states.items():
        if param not in chosen:
            model.upper[column] = 0.0
    return chosen


def compare_with_all(
    seed: int, offload: bool = False, num_states: int = 0, tied: bool = False, effort: Effort | None = None,
    mixture: bool = False,
) -> int:  # fmt: skip
    """Solve one random case under several budgets; return how many were compared.

    num_states: of how many parameters the optimizer's states may be offloaded too, beside one kind of tensors.
    """
    place, allowed, rng = random_case(seed, tied, mixture)
    may_leave, kept = offloading(place, allowed, rng) if offload else ((), {})
    may_leave = may_leave[:1] if num_states else may_leave
    states = states_that_may_leave(place, allowed, rng, num_states) if offload else ()
    if tied and not may_share(place.problem, allowed):
        return 0
    plans = all_plans(place.problem, allowed, may_leave, states, MAX_PLANS_MORE if tied or mixture else MAX_PLANS)
    if not plans or (offload and not may_leave) or len(states) < num_states:
        return 0
    peaks = sorted({peak for _, peak in plans})
    budgets = {peaks[0], peaks[-1], *rng.sample(peaks, min(2, len(peaks)))}
    model, sharding, recompute, memory = place.solver.full()
    for key, columns in kept.items():
        for column in columns:
            if key not in may_leave and column in recompute.leaves:
                model.upper[recompute.leaves[column]] = 0.0
    for budget in sorted(budgets):
        best = min(seconds for seconds, peak in plans if peak <= budget)
        set_budget(model, memory, budget * (1 + 1e-9) + 1e-3)
        settings = Settings(budget, 60.0, Restriction(allowed, offload=offload), effort=effort or place.solver.effort)
        asked = settings.stages(model, sharding, recompute)
        asked.gap, asked.patience = 1e-7, Patience(60.0, 1e-7)
        solution = solve_in_stages(asked)
        assert solution.objective == pytest.approx(best, rel=1e-6), (seed, budget, solution.outcome, best)
    set_budget(model, memory, peaks[0] - 16)  # HiGHS holds rows, in MiB, to 1e-6: a byte
    assert solve_in_stages(asked).values is None, (seed, "less than the smallest")
    return len(budgets)


def test_the_best_of_all_plans_is_found_short():
    assert sum(compare_with_all(seed) > 0 for seed in range(NUM_CASES_SHORT)) >= NUM_CASES_SHORT // 2


def test_the_best_of_all_plans_that_may_offload_is_found_short():
    assert all(compare_with_all(seed, offload=True) > 0 for seed in (1, 2, 7, 8))  # others have too many plans to try


def test_the_best_of_all_plans_that_may_offload_states_is_found_short():
    assert all(compare_with_all(seed, offload=True, num_states=1) > 0 for seed in STATE_SEEDS)


@pytest.mark.slow
def test_the_best_of_all_plans_with_experts_is_found():
    assert sum(compare_with_all(seed, mixture=True) > 0 for seed in range(5000, 5012)) >= 6


@pytest.mark.slow
def test_the_best_of_all_plans_with_a_tied_parameter_is_found():
    assert all(compare_with_all(seed, tied=True) > 0 for seed in TIED_SEEDS)


@pytest.mark.slow
def test_the_best_of_all_plans_that_may_offload_states_is_found():
    compared = [compare_with_all(seed, offload=True, num_states=2) for seed in range(3000, 3000 + NUM_CASES)]
    assert sum(num > 0 for num in compared) >= 20


@pytest.mark.slow
def test_the_best_of_all_plans_that_may_offload_is_found():
    compared = [compare_with_all(seed, offload=True) for seed in range(2000, 2000 + NUM_CASES)]
    assert sum(num > 0 for num in compared) >= 20


@pytest.mark.slow
def test_branch_and_bound_finds_the_best_of_all():
    """Small models are one MIP; here they are branched on as large ones are."""
    branches = Effort(few_columns=0)
    solved = sum(compare_with_all(seed, effort=branches) > 0 for seed in range(100, 100 + NUM_CASES_BRANCHED))
    assert solved >= NUM_CASES_BRANCHED // 3


@pytest.mark.slow
def test_the_best_of_all_plans_is_found():
    compared = [compare_with_all(seed) for seed in range(1000, 1000 + 2 * NUM_CASES)]
    assert sum(num > 0 for num in compared) >= 100
    assert sum(compared) >= 250
