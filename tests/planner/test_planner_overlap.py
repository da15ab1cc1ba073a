"""The clocks on which a step is followed: what computation hides, what waits for what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import task, tiny_program
from tests.grids import slow_but
from trainwright.planner.best_first import solve_on
from trainwright.planner.costs.overlap import Trip, _Clocks

NODES, GPUS = 0, 1
APART, SHARED = (0, 1), (0, 0)


def trip(*steps: tuple[int | None, float], issued: int | None = 0) -> Trip:
    return Trip(steps, issued)


def test_a_gather_is_hidden_behind_what_is_computed_before_it_is_read():
    clocks = _Clocks(APART)
    clocks.issue("a", trip((GPUS, 3.0)))
    clocks.issue("b", trip((GPUS, 3.0)))
    clocks.run(4.0, 0.0, ())
    clocks.wait(["a"])
    assert clocks.compute_s == 4.0
    clocks.wait(["b"])
    assert clocks.compute_s == 6.0
    assert clocks.hidden_s == 4.0


@pytest.mark.parametrize(("links", "waits_s"), [(APART, 0.0), (SHARED, 5.0)])
def test_an_exchange_waits_for_what_is_on_its_way_over_the_same_link(links, waits_s):
    clocks = _Clocks(links)
    clocks.issue("a", trip((NODES, 5.0)))
    clocks.run(0.0, 1.0, [GPUS])
    assert clocks.compute_s == 1.0 + waits_s


def test_a_slice_moves_nothing_and_waits_for_nothing():
    clocks = _Clocks(SHARED)
    clocks.issue("a", trip((NODES, 5.0)))
    clocks.run(0.0, 1.0, [None])
    assert clocks.compute_s == 1.0
    clocks.wait(["a"])
    assert (clocks.compute_s, clocks.hidden_s) == (5.0, 1.0)


def test_of_a_way_along_two_axes_what_follows_the_first_collective_is_exposed():
    clocks = _Clocks(APART)
    clocks.issue("a", trip((None, 0.5), (NODES, 3.0), (GPUS, 2.0), issued=1))
    clocks.run(10.0, 0.0, ())
    clocks.wait(["a"])
    assert clocks.compute_s == 12.5
    assert clocks.hidden_s == 3.0


EVENT = st.tuples(st.sampled_from("cxiw"), st.integers(0, 9), st.sampled_from([NODES, GPUS]))


@given(st.lists(EVENT, max_size=30), st.sampled_from([APART, SHARED]))
def test_what_is_hidden_is_what_the_step_saves(events, links):
    """However it goes: the seconds of all, less those hidden, are the step; hidden is no more than was issued."""
    clocks, serial_s, issued_s = _Clocks(links), 0.0, 0.0
    for number, (kind, seconds, axis) in enumerate(events):
        if kind == "c":
            clocks.run(seconds, 0.0, ())
        elif kind == "x":
            clocks.run(0.0, seconds, [axis])
        elif kind == "i":
            clocks.issue(number, trip((axis, seconds)))
            issued_s += seconds
        else:
            clocks.wait(list(clocks.under_way))
        serial_s += seconds if kind != "w" else 0
    clocks.wait(list(clocks.under_way))
    assert clocks.compute_s + clocks.hidden_s == pytest.approx(serial_s)
    assert 0 <= clocks.hidden_s <= issued_s


CASES = [
    ("2xh100", (2,), "ddp", 1e-4),  # one buffer, sent when all is computed
    ("2xh100", (2,), "megatron", 1e-4),
    ("2xh100", (2,), "fsdp", 0.01),
    ("2x2xh100", (2, 2), "ddp", 1e-4),
    ("2x2xh100", (2, 2), "fsdp", 0.02),
    ("2x2xh100", (2, 2), "joint", 0.02),
]


@pytest.mark.parametrize(("hardware", "mesh", "recipe", "within"), slow_but([CASES[0], CASES[2]], CASES))
@pytest.mark.parametrize("max_num_ops", [400, 0])
def test_where_no_memory_binds_the_objective_is_what_the_clocks_say(
    monkeypatch, hardware, mesh, recipe, within, max_num_ops
):
    """Of short programs, and of long ones, where what is hidden has a price in place of a column."""
    monkeypatch.setattr("trainwright.planner.problem.problem.MANY_OPS", max_num_ops)
    (place,) = task(tiny_program("llama-tiny"), hardware, mesh=mesh).places
    answer = solve_on(place, recipe)
    price = place.overlapped(answer)[1]
    assert answer.objective_s == pytest.approx(price.step_s, rel=within)
    if recipe == "fsdp":
        assert price.hidden_comm_s > 0.2 * price.comm_s


@pytest.mark.parametrize(("hardware", "mesh", "links"), [("2x2xh100", (2, 2), (0, 1)), ("8xa100", (2, 4), (0, 0))])
def test_axes_laid_over_one_link_share_its_clock(hardware, mesh, links):
    (place,) = task(tiny_program("llama-tiny"), hardware, mesh=mesh).places
    assert place.problem.costs.links == links
