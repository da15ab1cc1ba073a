"""What rests on disks as columns: the convex search over swapped activations, and every plan of a small model, as oracles."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from tests.builders import task
from tests.grids import slow_but
from trainwright.artifacts import Tier
from trainwright.capture.cached import cached_capture
from trainwright.planner.model import offload
from trainwright.planner.model.decode import Choice, decisions_from
from trainwright.planner.model.offload import OFFLOAD_EPSILON_S
from trainwright.planner.plan import make_plan
from trainwright.planner.search.solve import Least
from trainwright.planner.task import Place
from trainwright.program.program import build_program
from trainwright.tiers import Policy, padded

WIDTH, INNER = 64, 256


class Block(nn.Module):
    """Two products and their activations: what is kept of the second costs more FLOPs a byte than what is kept of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.down(torch.tanh(self.up(x))))


@functools.cache
def program_of(num_blocks: int, batch: int):
    model = nn.Sequential(*(Block() for _ in range(num_blocks)))
    return build_program(cached_capture(model, (torch.ones(batch, WIDTH),), lambda out, _: out.square().mean()))


def place_of(num_blocks: int, batch: int, tier: Tier, policy: Policy, optimizer: str = "adamw") -> Place:
    asked = task(program_of(num_blocks, batch), "cpu:1", mesh=(1,), offload="disk")
    asked.cluster = asked.cluster.model_copy(update={"offload": {"disk": tier}})
    asked.tier = policy
    (place,) = asked.places
    return place


# The sheet's search


@dataclass(frozen=True)
class Sheet:
    """The sheet's model of a step: what a phase computes, moves whatever is swapped, and what swapping D bytes changes."""

    rate: float
    forward_s: float
    backward_s: float
    forward_read: float
    backward_read: float
    backward_written: float
    pieces: tuple[tuple[float, float], ...]
    """The bytes and seconds of each activation that may be swapped, the dearest to recompute a byte first."""

    def recompute_s(self, swapped: float) -> float:
        """The seconds of recomputing what is not among the first `swapped` bytes."""
        total = 0.0
        for num_bytes, seconds in self.pieces:
            share = min(1.0, max(0.0, swapped / num_bytes))
            total += (1 - share) * seconds
            swapped -= num_bytes
        return total

    def step_s(self, swapped: float) -> float:
        forward = max(self.forward_s, self.forward_read / self.rate, swapped / self.rate)
        compute = self.backward_s + self.recompute_s(swapped)
        read, written = (self.backward_read + swapped) / self.rate, self.backward_written / self.rate
        return forward + max(compute, read, written)


def smallest(function: Callable[[float], float], low: float, high: float) -> float:
    """The least value of a convex function, by thirds."""
    for _ in range(200):
        third = (high - low) / 3
        if function(low + third) <= function(high - third):
            high -= third
        else:
            low += third
    return function((low + high) / 2)


@dataclass(frozen=True)
class Piece:
    """Activations of a class of blocks that are swapped or recomputed, of all its instances together."""

    count: int
    num_bytes: float
    again_s: float


def pieces_of(place: Place, fixed: dict[int, float]) -> list[Piece]:
    """Leave only two kinds of activations to be swapped or recomputed, by `fixed` columns, and return them, dearest byte first.

    They are what the activations keep; what the products give is neither kept nor swapped, and the ends of blocks stay.
    """
    _, _, recompute, _ = place.solver.full()
    model, costs = place.solver.full()[0], place.problem.costs
    rerun = {decision.key: model.cost[column] for (decision, _), column in recompute.rerun.items()}
    found = []
    for (decision, _), column in recompute.keep_inner.items():
        block = decision.key.removesuffix(":tanh#2")
        fixed[recompute.resident[column]] = 0.0
        again_s = rerun[f"{block}.down:linear"] + rerun[decision.key]
        found.append(Piece(decision.count, decision.count * decision.inner_bytes[0], decision.count * again_s))
    for (stored, native), column in recompute.keep.items():
        decision = stored.source.decision
        if decision.key.endswith(":tanh"):
            fixed[recompute.resident[column]] = 0.0
            size = costs.local_bytes(stored.source.tensor, native)
            again_s = rerun[decision.key.removesuffix(":tanh") + ".up:linear"] + rerun[decision.key]
            found.append(Piece(decision.count, decision.count * size, decision.count * again_s))
        elif decision.key.endswith(":linear"):
            fixed[column] = 0.0
        elif column in recompute.leaves:
            fixed[recompute.leaves[column]] = 0.0
    return sorted(found, key=lambda piece: -piece.again_s / piece.num_bytes)


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_that_of_the_convex_search_over_the_swapped_amount(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything rests on disks; what the backward needs is swapped or recomputed, and none of it may stay."""
    monkeypatch.setattr(offload, "SHOWS", 0.0)  # the sheet hides all that can be hidden
    rng = random.Random(seed)
    tier = Tier(write_bytes_per_s=(rate := 10 ** rng.uniform(8, 10.5)), read_bytes_per_s=rate)
    place = place_of(8, rng.choice([256, 4096]), tier, Policy(window_bytes=1))
    model, _, recompute, _ = place.solver.full()
    fixed = dict.fromkeys([*recompute.params_stay.values(), *recompute.states_stay.values()], 0.0)
    pieces = pieces_of(place, fixed)
    assert sum(piece.count for piece in pieces) == 2 * 8
    params = sum(d.count * padded(d.rest_bytes[0]) for d in place.problem.params)
    groups, update_s = place.problem.groups, sum(d.count * d.backward_s[0] for d in place.problem.params)
    sheet = Sheet(
        rate,
        sum(d.count * d.forward_s[0] for d in groups),
        sum(d.count * d.backward_s[0] for d in groups) + update_s,
        params, 3 * params, 3 * params, tuple((piece.num_bytes, piece.again_s) for piece in pieces),
    )  # fmt: skip
    expected = smallest(sheet.step_s, 0.0, sum(piece.num_bytes for piece in pieces))
    relaxed = model.solve(relaxed=True, fixed=fixed)
    nothing = 100 * OFFLOAD_EPSILON_S  # what keeps things from leaving for no reason
    assert relaxed.objective == pytest.approx(expected, rel=1e-6, abs=nothing)
    best = min(in_blocks(sheet, pieces, each) for each in itertools.product(*(range(p.count + 1) for p in pieces)))
    whole = model.solve(fixed=fixed, gap=0.0)
    assert whole.objective == pytest.approx(best, rel=1e-6, abs=nothing)


def in_blocks(sheet: Sheet, pieces: list[Piece], numbers: tuple[int, ...]) -> float:
    """The step where of each piece so many whole blocks are swapped."""
    shares = [number / piece.count for piece, number in zip(pieces, numbers, strict=True)]
    swapped = sum(share * piece.num_bytes for share, piece in zip(shares, pieces, strict=True))
    again_s = sum((1 - share) * piece.again_s for share, piece in zip(shares, pieces, strict=True))
    return replace(sheet, backward_s=sheet.backward_s + again_s, pieces=()).step_s(swapped)


# Every plan


def every_plan(place: Place) -> list[tuple[int, float]]:
    """The peak and the step, simulated and priced, of every way to let parameters and states of two equal blocks rest on disks."""
    params = place.problem.params
    options = dict.fromkeys(place.problem.decisions, 0)
    found = []
    for away in itertools.product(*(range(d.count + 1) for d in params), repeat=2):
        values, states = away[: len(params)], away[len(params) :]
        choice = Choice(dict(options))
        choice.params = dict(zip(params, values, strict=True))
        choice.states = dict(zip(params, states, strict=True))
        simulation = place.simulate(decisions_from(place.problem, choice))
        found.append((simulation.peak_bytes, place.price(simulation).step_s))
    return found


@pytest.mark.parametrize("away", [(0, 0, 0, 0), (1, 1, 0, 0), (0, 0, 1, 0), (1, 1, 2, 2)])
def test_updates_hold_states_that_are_away_and_no_others(away: tuple[int, ...]) -> None:
    """The rows count no less than a run of the plan holds but steps' counters, and to 1 % no more."""
    place = place_of(3, 64, Tier(write_bytes_per_s=1e8, read_bytes_per_s=1e8), Policy(window_bytes=4 * WIDTH * INNER))
    choice = Choice(dict.fromkeys(place.problem.decisions, 0))
    choice.states = dict(zip(place.problem.params, away, strict=True))
    model, _, recompute, memory = place.solver.full()
    none = [*recompute.params.values(), *recompute.leaves.values(), *recompute.rerun.values()]
    states = {recompute.states[decision, 0]: float(num) for decision, num in choice.states.items()}
    rows = model.solve(fixed={**dict.fromkeys(none, 0.0), **states}, cost={memory.peak: 1.0}, gap=0.0)
    assert rows.values is not None
    peak = place.simulate(decisions_from(place.problem, choice)).peak_bytes
    assert peak - 64 <= memory.peak_bytes(rows.values) <= 1.01 * peak


def least_of(ranks: int, window_bytes: int) -> Least:
    asked = task(program_of(3, 8), f"cpu:{ranks}", mesh=(ranks,), offload="disk")
    asked.tier = Policy(window_bytes)
    (place,) = asked.places
    found = place.solver.travelling("none").least(place.settings("joint"))
    assert isinstance(found, Least)
    return found


@pytest.mark.parametrize("window_bytes", [20_000, 100_000, 400_000, 2_000_000])
@pytest.mark.parametrize("ranks", slow_but([2], [1, 2, 4]))
def test_updates_are_counted_in_their_layout(ranks: int, window_bytes: int) -> None:
    """Of a plan that cuts parameters, updates hold parts, where all of them fit into the window and where they do not."""
    least = least_of(ranks, window_bytes)
    assert least.rows_peak == pytest.approx(least.answer.simulation.peak_bytes, rel=0.02)


@pytest.mark.parametrize("ranks", [2, 4])
def test_values_that_were_read_are_counted_in_their_layout(ranks: int) -> None:
    """With a small window everything can be cut in as many parts as there are ranks, and the smallest plan does so."""
    whole, parts = (least_of(num, 20_000).answer.simulation.peak_bytes for num in (1, ranks))
    assert parts < 1.05 * whole / ranks


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e8, 3e9])
def test_no_plan_that_fits_is_faster(rate: float) -> None:
    """No plan is faster of all those that recompute and swap nothing; the search may do either besides."""
    tier = Tier(write_bytes_per_s=rate, read_bytes_per_s=rate)
    place = place_of(3, 64, tier, Policy(window_bytes=4 * WIDTH * INNER))
    plans = every_plan(place)
    peaks = sorted({peak for peak, _ in plans})
    for budget in (peaks[0], peaks[len(peaks) // 3], peaks[2 * len(peaks) // 3], peaks[-1]):
        best = min(seconds for peak, seconds in plans if peak <= budget)
        asked = place.task
        found = make_plan(
            program=asked.program, model_ref=asked.model_ref, cluster=asked.cluster, budget_bytes=budget + 4096,
            optimizer=asked.optimizer, optimizer_cost=asked.optimizer_cost, make_optimizer=asked.make_optimizer, mesh=(1,),
            offload="none", tier=asked.tier,
        )  # fmt: skip
        assert found.predicted.peak_bytes <= budget + 4096
        assert found.predicted.step_s <= best * 1.01
