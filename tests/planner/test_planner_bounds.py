"""Every column of the planner's models has bounds which lose no optimum, and no memory is free."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import task, tiny_program, with_disk
from tests.grids import slow_but
from trainwright.artifacts.cluster import Tier
from trainwright.hardware import resolve
from trainwright.planner.model.implied import bound_columns
from trainwright.planner.model.memory import set_budget
from trainwright.planner.model.milp import Model, Terms
from trainwright.planner.search import solve

DISK = Tier(write_bytes_per_s=1e9, read_bytes_per_s=1e9)


def solver_of(name: str, hardware: str, offload: str):
    cluster = with_disk(DISK, hardware) if offload == "disk" else resolve(hardware)
    mesh = tuple(axis.size for axis in cluster.mesh())
    (place,) = task(tiny_program(name), hardware, mesh=mesh, cluster=cluster, offload=offload).places
    return place.solver


known_solver = functools.cache(solver_of)


def terms_of(model: Model, row: int) -> Terms:
    places = slice(model.starts[row], model.starts[row + 1])
    return list(zip(model.indices[places], model.coefficients[places]))


PLACES = [
    ("gpt2-tiny", "2x2xh100", "none"),
    ("t5-tiny", "2xh100", "none"),
    ("mixtral-tiny", "2xh100", "none"),
    ("resnet-tiny", "8xa100", "none"),
    ("gpt2-tiny", "2xh100", "host"),
    ("vit-tiny", "cpu:2", "disk"),
]


@pytest.mark.parametrize("way", ["none", "buckets", "ahead"])
@pytest.mark.parametrize(("name", "hardware", "offload"), slow_but([PLACES[0], *PLACES[4:]], PLACES))
def test_every_column_has_bounds(name, hardware, offload, way) -> None:
    """A proof that a relaxation has no solution is spoiled by what rounding leaves of a column without one."""
    solver = known_solver(name, hardware, offload).travelling(way)
    for model in (solver.plain()[0], solver.full()[0]):
        assert np.isfinite(model.lower).all()
        assert np.isfinite(model.upper).all()


@pytest.mark.parametrize("way", ["none", "buckets", "ahead"])
@pytest.mark.parametrize(("name", "hardware", "offload"), slow_but([PLACES[0], *PLACES[3:]], PLACES))
def test_no_memory_is_free_in_what_rows_take_off(name, hardware, offload, way) -> None:
    """The rows take off what is released; a column of it that no row holds from above would be as large as the solver likes."""
    model, _, _, memory = known_solver(name, hardware, offload).travelling(way).full()
    taken_off = {column for row in memory.rows for column, coefficient in terms_of(model, row) if coefficient < 0}
    taken_off.remove(memory.peak)
    assert taken_off
    assert taken_off <= held_by_rows(model, set(range(model.num_rows)) - memory.rows.keys())


def held_by_rows(model: Model, rows: Collection[int]) -> set[int]:
    """The columns which are decisions, or which rows hold from above by such columns: however deep, as no solver is free to."""
    held = {column for column in range(model.num_columns) if model.integer[column]}
    sides: list[tuple[set[int], set[int]]] = []
    for row in rows:
        positive = {column for column, coefficient in terms_of(model, row) if coefficient > 0}
        negative = {column for column, coefficient in terms_of(model, row) if coefficient < 0}
        sides += [(positive, negative)] * math.isfinite(model.row_upper[row])
        sides += [(negative, positive)] * math.isfinite(model.row_lower[row])
    while True:
        found = {column for bounded, by in sides if by <= held for column in bounded} - held
        if not found:
            return held
        held |= found


@pytest.mark.parametrize(
    ("name", "hardware", "offload", "way"),
    [("gpt2-tiny", "2xh100", "none", "buckets"), (*PLACES[4], "buckets"), (*PLACES[5], "none")],
)
def test_no_optimum_needs_more_than_its_bounds(monkeypatch, name, hardware, offload, way) -> None:
    def optima() -> list[float]:
        solver = solver_of(name, hardware, offload).travelling(way)
        model, _, _, memory = solver.full()
        set_budget(model, memory, math.inf)
        least = model.solve(relaxed=True, cost={memory.peak: 1.0})
        found = [model.solve(relaxed=True).objective, least.objective]
        for share in (1.5, 1.01):
            set_budget(model, memory, share * memory.peak_bytes(least.values))
            found.append(model.solve(relaxed=True).objective)
        return found

    bounded = optima()
    monkeypatch.setattr(solve, "bound_columns", lambda model: None)
    assert optima() == pytest.approx(bounded, rel=1e-6)


@given(st.data())
def test_bounds_of_sums_of_the_largest_and_of_the_least_of_several_lose_nothing(data) -> None:
    """Each column is the sum of some before it, or no less than several sums, which costs, or no more, which pays."""
    numbers, model = st.integers(-3, 3), Model()
    sums = [model.column(data.draw(st.integers(1, 4)), data.draw(numbers)) for _ in range(3)]
    largest: list[int] = []
    for kind in data.draw(st.lists(st.sampled_from(["sum", "largest", "least"]), min_size=1, max_size=5)):
        cost = {"sum": data.draw(numbers), "largest": abs(data.draw(numbers)), "least": -abs(data.draw(numbers))}[kind]
        low, high = {"sum": (0.0, 0.0), "largest": (-math.inf, 0.0), "least": (0.0, math.inf)}[kind]
        parts = sums + largest if kind == "largest" else list(sums)
        made = model.column(cost=cost, lower=-math.inf)
        for _ in range(1 if kind == "sum" else data.draw(st.integers(1, 3))):
            # what is largest may be among the parts of another, never less than nothing of it
            terms = [
                (part, float(abs(data.draw(numbers)) if part in largest else data.draw(numbers))) for part in parts
            ]
            model.row(kind, [*terms, (made, -1.0)], low, high)
        if kind != "least":
            (sums if kind == "sum" else largest).append(made)
    free = model.solve(relaxed=True)
    bound_columns(model)
    assert np.isfinite(model.upper).all()
    assert model.solve(relaxed=True).objective == pytest.approx(free.objective, abs=1e-6)


def test_a_column_that_is_more_than_rows_ask_for_keeps_its_own_least() -> None:
    model = Model()
    part, most = model.column(2.0), model.column(lower=5.0, cost=1.0)
    model.row("largest", [(part, 1.0), (most, -1.0)], upper=0.0)
    bound_columns(model)
    assert model.solve(relaxed=True).objective == pytest.approx(5.0)
