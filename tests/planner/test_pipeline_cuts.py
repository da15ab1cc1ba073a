"""Cutting into stages: the search against brute force under the simulation, the proof rows against the optimum, recipes."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pipeline_tables import random_table
from trainwright.artifacts import Tier
from trainwright.planner.pipeline.cuts import (
    Judge,
    all_cuts,
    brute_force,
    depths,
    fastest,
    is_possible,
    neighbours,
    nothing_fits_bytes,
)
from trainwright.planner.pipeline.events import StageSeconds, Tied, least_step_s, one_f_one_b, simulated_step
from trainwright.planner.pipeline.frontier import Level
from trainwright.planner.pipeline.program import Least, bound_s, propose
from trainwright.planner.pipeline.recipes import PIPELINE_RECIPES, recipe_cuts
from trainwright.planner.pipeline.table import Hop, Table, Unit
from trainwright.rank.stage_actions import Schedule, interleaved_in_flight

CLOSE = 1e-9


def under_budget(seed: int, offloads: bool = False) -> Judge | None:
    """A judge with a budget between what must be held and what keeping everything takes."""
    table = random_table(seed, offloads)
    free = brute_force(Judge(table, math.inf))
    assert free is not None
    most = max(fit.peak_bytes for fit in free.fits)
    least, _ = nothing_fits_bytes(Judge(table, math.inf), [free.cuts])
    share = random.Random(seed).choice([0.05, 0.2, 0.5, 0.8, 1.1])
    return Judge(table, least + share * (most - least))


def starts_of(judge: Judge) -> list[tuple[int, ...]]:
    table = judge.table
    found = [
        propose(table, depth, judge.budget_bytes) for depth in depths(table.num_stages, table.num_micro_batches)[:2]
    ]
    cuts = [one.cuts for one in found if one is not None]
    recipes = [recipe_cuts(name, judge) for name in PIPELINE_RECIPES if name != "joint"]
    return cuts + [one for one in recipes if one is not None]


def check_against_brute_force(seeds: range, offloads: bool = False) -> int:
    num = 0
    for seed in seeds:
        judge = under_budget(seed, offloads)
        best = brute_force(judge)
        if best is None:
            continue
        found = fastest(judge, starts_of(judge))
        assert found is not None, seed
        assert found.step_s == pytest.approx(best.step_s, rel=CLOSE), (seed, found.cuts, best.cuts)
        num += 1
    return num


def test_the_search_finds_what_brute_force_finds() -> None:
    assert check_against_brute_force(range(25)) >= 20


@pytest.mark.slow
def test_the_search_finds_what_brute_force_finds_in_all_of_150_cases() -> None:
    assert check_against_brute_force(range(150)) >= 140


def test_the_search_finds_what_brute_force_finds_where_stages_may_offload() -> None:
    assert check_against_brute_force(range(20), offloads=True) >= 15


@pytest.mark.slow
def test_the_search_finds_what_brute_force_finds_where_stages_may_offload_in_all_of_100_cases() -> None:
    assert check_against_brute_force(range(20, 120), offloads=True) >= 90


def every_choice(table: Table, spans: tuple[tuple[int, int], ...], depths: tuple[int, ...]) -> list[tuple[float, ...]]:
    """Return the seconds that each choice of levels adds to a micro-batch of a one-piece stage, what it moves and what it holds."""
    units, tier = table.units[slice(*spans[0])], table.tier
    assert tier is not None
    found = []
    for levels in itertools.product(*(range(len(table.levels[unit.kind])) for unit in units)):
        chosen = [table.levels[unit.kind][level] for unit, level in zip(units, levels)]
        rerun = sum(level.rerun_s for level in chosen)
        shown = tier.exposed_s(sum(level.out_s for level in chosen), sum(unit.forward_s for unit in units))
        shown += tier.exposed_s(sum(level.back_s for level in chosen), sum(unit.backward_s for unit in units) + rerun)
        found.append((rerun + shown, table.peak_bytes(spans, depths, levels)))
    return found


def test_levels_are_the_fastest_of_all_that_fit() -> None:
    """Every choice of every unit's level, under the seconds that transfers show beside the whole stage."""
    num = 0
    for seed in range(30):
        table = random_table(seed, offloads=True)
        rng = random.Random(seed)
        first = rng.randrange(len(table.units))
        spans = ((first, min(len(table.units), first + rng.randint(1, 4))),)
        choices = every_choice(table, spans, (depth := rng.randint(1, 4),))
        sizes = sorted(size for _, size in choices)
        budget = sizes[0] + rng.random() * (sizes[-1] - sizes[0])
        best = min(seconds for seconds, size in choices if size <= budget)
        fit = table.fit(spans, (depth,), budget)
        assert fit is not None
        assert fit.extra_s == pytest.approx(best, rel=CLOSE, abs=1e-12), seed
        assert fit.peak_bytes <= budget * (1 + CLOSE)
        assert fit.peak_bytes == pytest.approx(table.peak_bytes(spans, (depth,), fit.levels))
        assert table.fit(spans, (depth,), sizes[0] * (1 - 1e-6)) is None
        num += fit.extra_s > fit.rerun_s
    assert num > 5, "transfers show"


def test_a_tier_takes_no_more_than_it_holds() -> None:
    num = 0
    for seed in range(10):
        table = random_table(seed, offloads=True)
        spans, depth = ((0, min(len(table.units), 4)),), (3,)
        free = table.fit(spans, depth, table.peak_bytes(spans, depth, [0] * 4) * 0.5 + 40)
        assert table.tier is not None
        full = replace(table, tier=table.tier.model_copy(update={"capacity_bytes": 15}), _fits={}, _frontiers={})
        tight = full.fit(spans, depth, table.peak_bytes(spans, depth, [0] * 4) * 0.5 + 40)
        if tight is not None and free is not None:
            chosen = [table.levels[unit.kind][at] for unit, at in zip(table.units, tight.levels)]
            assert 3 * sum(level.away_bytes for level in chosen) <= 15
            assert tight.extra_s >= free.extra_s - CLOSE
            num += tight.extra_s > free.extra_s + CLOSE
    assert num > 2, "it binds"


def many_blocks(seed: int) -> Table:
    """Forty equal blocks in one stage, with a dozen levels."""
    rng = random.Random(seed)
    own = [Level(10.0)]
    for share, seconds in ((0.55, 0.02), (0.2, 0.25), (0.1, 0.4)):
        own.append(Level(10 * share * rng.uniform(0.8, 1.2), seconds * rng.uniform(0.5, 1.5)))
    rate = rng.uniform(5, 20)
    tier = Tier(write_bytes_per_s=rate, read_bytes_per_s=rate)
    away = [
        replace(level, kept_bytes=level.kept_bytes - moved, out_s=moved / rate, back_s=moved / rate)
        for level in own
        for moved in (0.48 * level.kept_bytes, 0.95 * level.kept_bytes)
    ]
    blocks = tuple(Unit("" if at == 0 else f"b{at}", 0, 0.2, 0.4) for at in range(40))
    return Table(blocks, ((*own, *away),), {}, (Hop(0.0, 1.0),), 8, tier=tier)


def least_extra_s(table: Table, most_bytes: float) -> float:
    """The least seconds that levels of all units in one stage add, by a mixed-integer program."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    levels, num = table.levels[0], len(table.units)
    forward, backward = sum(unit.forward_s for unit in table.units), sum(unit.backward_s for unit in table.units)
    rows = [
        [*(level.kept_bytes for level in levels), 0.0, 0.0],
        [*(level.out_s for level in levels), -1.0, 0.0],
        [*(level.back_s - level.rerun_s for level in levels), 0.0, -1.0],
        [*(1.0 for _ in levels), 0.0, 0.0],
    ]
    found = milp(
        [*(level.rerun_s for level in levels), 1.0, 1.0],
        constraints=LinearConstraint(rows, [-math.inf] * 3 + [num], [most_bytes, forward, backward, num]),
        integrality=[1] * len(levels) + [0, 0],
        bounds=Bounds(0, math.inf),
    )
    return float(found.fun)


def test_levels_of_many_blocks_are_near_the_fastest() -> None:
    over = []
    for seed in range(2):
        table = many_blocks(seed)
        for share in (0.1, 0.2, 0.4, 0.6):
            fit = table.fit(((0, 40),), (4,), 4 * 400 * share)
            assert fit is not None
            assert fit.peak_bytes <= 4 * 400 * share * (1 + CLOSE)
            over.append(fit.extra_s - least_extra_s(table, 400 * share))
    stage_s = 40 * 0.6
    assert min(over) > -CLOSE
    assert max(over) < 0.003 * stage_s
    assert sum(over) / len(over) < 0.001 * stage_s


def bound_faults(seeds: range, offloads: bool = False) -> tuple[int, list[int]]:
    """How often a proven bound was compared, and where it was above the fastest of all cuts at its depth."""
    num, faults = 0, []
    for seed in seeds:
        judge = under_budget(seed, offloads)
        table = judge.table
        for depth in depths(table.num_stages, table.num_micro_batches):
            found = propose(table, depth, judge.budget_bytes)
            rows = [judge.judge(cuts, depth) for cuts in all_cuts(len(table.units), table.num_stages)]
            best = min((row.step_s for row in rows if row is not None), default=None)
            if found is None:
                assert best is None, f"seed {seed}: the program finds nothing where something fits"
            elif best is not None:
                num += 1
                faults += [seed] if found.bound_s > best * (1 + 1e-6) else []
    return num, faults


def test_what_the_program_proves_is_never_above_the_optimum() -> None:
    for offloads in (False, True):
        num, faults = bound_faults(range(10), offloads)
        assert num > 15
        assert not faults


@pytest.mark.slow
def test_what_the_program_proves_is_never_above_the_optimum_in_many_cases() -> None:
    num, faults = bound_faults(range(12, 150))
    assert num > 300
    assert not faults


def test_the_bound_over_all_layouts_is_below_every_cut() -> None:
    for seed in range(25):
        table = random_table(seed)
        tied = [name for name, at in table.tied_params.items() if at == (0, len(table.units) - 1)]
        assert len(tied) == len(table.tied_params)
        least, whole_s = least_of(table)
        proven = bound_s(least, whole_s, table.num_stages, table.num_micro_batches)
        looser = bound_s(
            [replace(each, all_s=0.0) for each in least], whole_s, table.num_stages, table.num_micro_batches
        )
        best = brute_force(Judge(table, math.inf))
        assert best is not None
        assert 0 < looser <= proven * (1 + 1e-6)
        assert proven <= best.step_s * (1 + 1e-6), seed


def least_of(table: Table) -> tuple[list[Least], float]:
    """Return the floors of a table's units, and of all of them together: here exactly their seconds, tied ends twice."""
    m, least = table.num_micro_batches, []
    for place, unit in enumerate(table.units):
        once_s = unit.reduce_s + sum(table.params[name].update_s for name in unit.params)
        all_s = m * (unit.forward_s + unit.backward_s) + once_s
        least.append(Least(unit.forward_s, unit.backward_s, all_s, kind=place))
    return least, sum(each.all_s for each in least)


def other_orders(seed: int) -> list[Judge]:
    """Judges of the same case with a split backward, and with two pieces a stage where there are units enough."""
    judge = under_budget(seed)
    rng = random.Random(seed)
    units = tuple(replace(unit, weight_s=rng.uniform(0, 0.5) * unit.backward_s) for unit in judge.table.units)
    table = replace(judge.table, units=units, _fits={}, _frontiers={})
    tables = [table.scheduled(splits_backward=True)]
    if table.num_micro_batches % table.num_stages == 0 and 2 * table.num_stages <= len(units):
        tables.append(table.scheduled(2))
    return [Judge(each, judge.budget_bytes) for each in tables]


def orders_against_brute_force(seeds: range) -> tuple[int, list[float]]:
    """How many cases of other orders there are, and how much longer the search's step is than the best of all cuts."""
    found = []
    for seed in seeds:
        for judge in other_orders(seed):
            best = brute_force(judge)
            recipes = [recipe_cuts(name, judge) for name in PIPELINE_RECIPES if name != "joint"]
            if best is None:
                continue
            chosen = fastest(judge, [one for one in recipes if one is not None])
            found.append(math.inf if chosen is None else chosen.step_s / best.step_s - 1)
    return len(found), found


def test_other_orders_are_near_the_best_of_all_cuts() -> None:
    num, over = orders_against_brute_force(range(20))
    assert num > 15
    assert sum(each < CLOSE for each in over) > 0.85 * num
    assert all(each > -CLOSE for each in over)


def test_bounds_of_other_orders_are_below_every_cut() -> None:
    num = 0
    for seed in range(25):
        for judge in other_orders(seed):
            table = judge.table
            least, whole_s = least_of(table)
            name = "zero-bubble" if table.splits_backward else "interleaved"
            proven = bound_s(least, whole_s, table.num_stages, table.num_micro_batches, name)
            best = brute_force(Judge(table, math.inf))
            assert best is not None
            assert 0 < proven <= best.step_s * (1 + 1e-6), (seed, name)
            num += 1
    assert num > 30


def test_even_stages_wait_as_the_papers_say() -> None:
    """f = 1, b = 2 of which weights take 1; P = 4, m = 8: bubbles of (P - 1)(f + b), (P - 1)(f + b)/v and (P - 1)(f + b - 2w)."""
    even = [StageSeconds(1.0, 2.0, weight_s=1.0)] * 4
    assert simulated_step(Schedule(8, (4, 3, 2, 1)), even).step_s == 24 + 9
    pieces = [StageSeconds(0.5, 1.0)] * 8
    depths = interleaved_in_flight(4, 2, 8)
    assert simulated_step(Schedule(8, depths, virtual=2), pieces).step_s == 24 + 4.5
    assert simulated_step(Schedule(8, (4,) * 4, splits_backward=True), even).step_s == 24 + 3
    assert simulated_step(Schedule(8, (7,) * 4, splits_backward=True), even).step_s <= 24 + 3


seconds = st.floats(0.05, 2.0)
stages = st.lists(st.tuples(seconds, seconds, st.floats(0, 1)), min_size=1, max_size=5)


@given(stages, st.integers(1, 9), st.integers(0, 2), st.floats(0, 0.5), st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_step_takes_what_each_stage_and_the_first_micro_batch_take(
    rows: list[tuple[float, float, float]], m: int, more: int, link_s: float, overlaps: bool
) -> None:
    own = [StageSeconds(f, b, update_s=u, hand_s=link_s, return_s=link_s) for f, b, u in rows]
    own[-1] = replace(own[-1], hand_s=0.0, return_s=0.0)
    depth = one_f_one_b(len(own), m, more)
    found = simulated_step(Schedule(m, depth), own, overlaps=overlaps, keep_spans=True)
    through = sum(stage.micro_s for stage in own) + 2 * (len(own) - 1) * link_s
    assert found.step_s >= through + own[0].update_s - CLOSE
    assert all(found.step_s >= m * stage.micro_s + stage.update_s - CLOSE for stage in own)
    longer = [replace(own[0], forward_s=own[0].forward_s * 1.1), *own[1:]]
    assert simulated_step(Schedule(m, depth), longer, overlaps=overlaps).step_s >= found.step_s - CLOSE
    spans = sorted(found.spans, key=lambda span: (span.stage, span.start_s))
    for one, other in itertools.pairwise(spans):
        assert one.stage != other.stage or one.end_s <= other.start_s + CLOSE


@given(
    st.lists(st.tuples(seconds, seconds, st.floats(0, 1), st.floats(0, 1)), min_size=6, max_size=9),
    st.integers(1, 3),
    st.integers(1, 3),
    st.floats(0, 0.5),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_what_a_step_takes_at_least_is_never_above_the_simulation(
    rows: list[tuple[float, float, float, float]],
    virtual: int,
    groups: int,
    link_s: float,
    splits: bool,
    overlaps: bool,
) -> None:
    num = len(rows) // virtual
    own = [
        StageSeconds(f, b, update_s=u, reduce_s=u / 2, hand_s=link_s, return_s=link_s, weight_s=w * b)
        for f, b, u, w in rows[: num * virtual]
    ]
    own[-1] = replace(own[-1], hand_s=0.0, return_s=0.0)
    m = groups * num
    if virtual > 1:
        schedules = [Schedule(m, interleaved_in_flight(num, virtual, m), virtual)]
    elif splits:
        schedules = [Schedule(m, (min(m, most),) * num, splits_backward=True) for most in (num, 2 * num - 1)]
    else:
        schedules = [Schedule(m, depth) for depth in depths(num, m)]
    for schedule in schedules:
        least_s = least_step_s(schedule, own, overlaps=overlaps)
        assert 0 < least_s <= simulated_step(schedule, own, overlaps=overlaps).step_s + CLOSE


def test_steps_that_are_known_by_hand() -> None:
    even = [StageSeconds(1.0, 2.0)] * 4
    assert simulated_step(Schedule(8, one_f_one_b(4, 8)), even).step_s == 33.0  # (m + P - 1) (f + b)
    assert simulated_step(Schedule(8, (8,) * 4), even).step_s == 33.0  # GPipe waits as much
    uneven = [StageSeconds(1.0, 1.0), StageSeconds(3.0, 3.0)]
    assert simulated_step(Schedule(4, (2, 1)), uneven).step_s == 1 + 4 * 6 + 1
    slow = [StageSeconds(1.0, 1.0, hand_s=0.5, return_s=0.5), StageSeconds(1.0, 1.0)]
    assert simulated_step(Schedule(1, (1, 1)), slow).step_s == 5.0
    assert simulated_step(Schedule(1, (1, 1)), slow, overlaps=False).step_s == 5.0
    tied = simulated_step(Schedule(1, (1, 1)), uneven, [Tied((0, 1), 0.25)])
    assert tied.step_s == 8.25
    assert tied.busy_s == [2.25, 6.25]


def test_a_transfer_that_nothing_hides_is_its_senders_time() -> None:
    slow = [StageSeconds(1.0, 1.0, hand_s=1.0, return_s=0.0), StageSeconds(1.0, 1.0)]
    hidden, paid = (simulated_step(Schedule(8, (3, 1)), slow, overlaps=way).step_s for way in (True, False))
    assert paid > hidden


def test_moves_keep_every_stage_its_block() -> None:
    assert all(is_possible(cuts, 5) for cuts in neighbours((1, 2, 4), 5))
    assert not is_possible((2, 2), 5)


def test_recipes_cut_as_they_say() -> None:
    blocks = tuple(
        Unit(
            "" if place == 0 else f"b{place}", 1 if 0 < place < 7 else 2 * (place == 7), 1.0 if place < 7 else 4.0, 0.0
        )
        for place in range(8)
    )
    table = Table(blocks, ((Level(0.0),),) * 3, {}, (Hop(0.0, 1.0),), 4)
    judge = Judge(table, math.inf)
    assert recipe_cuts("even", judge) == (4,)  # three of six blocks, and what stands at the ends
    assert recipe_cuts("balanced", judge) == (5,)  # five units of 1 s before, two and the last of 4 s behind
    joint = fastest(judge, [(4,)])
    assert joint is not None
    assert joint.step_s <= min(judge.judge((4,), joint.in_flight).step_s, judge.judge((5,), joint.in_flight).step_s)


def test_a_pinned_stage_stays_where_it_is() -> None:
    table = random_table(3)
    for unit in range(1, len(table.units) - table.num_stages + 2):
        judge = Judge(table, math.inf, {1: unit})
        found = propose(table, one_f_one_b(table.num_stages, table.num_micro_batches), math.inf, {1: unit})
        assert found is not None
        assert found.cuts[0] == unit
        best = fastest(judge, [found.cuts])
        assert best is not None
        assert best.cuts[0] == unit
