"""Trades time for memory: returns plans of which none is both slower and larger than another.

Budgets are spread evenly in logarithms from the smallest that has a plan to the one beyond which nothing is gained.
Every answer that was simulated on the way is a point; what another beats in both is left out, so time never rises with
memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..artifacts import Plan, Refusal, UserError
from .budget import budget_for
from .costs.units import size_text
from .incumbent import Found
from .plan import as_plan
from .search.solve import Answer
from .task import Place, Task

SOLVERS = ("joint", "fsdp")
"""The solvers that trade time for memory under a budget."""


def frontier(*, num_points: int = 8, solver: str = "joint", **question: Any) -> list[Plan]:
    """Return plans from the smallest peak to the fastest step, each with the smallest budget that it fits.

    question: what a `Task` holds; its budget is the largest memory of interest. num_points: budgets to solve for on each
    mesh, from 2 on. `Refusal` where nothing fits that budget; `UserError` for a solver that takes no budget.
    """
    if solver not in SOLVERS:
        raise UserError(f"a frontier is drawn by one of {', '.join(SOLVERS)}; got {solver!r}; try joint")
    if num_points < 2:
        raise UserError(f"at least 2 points are needed for a frontier; got {num_points}; try 8")
    began = time.perf_counter()
    task = Task(**question)
    found: list[Found] = []
    tasks = [task] if task.variants is None else (variant for _, variant in task.variants.tasks(task))
    for place in (place for variant in tasks for place in variant.places):
        spent_s = time.perf_counter() - began
        if found and spent_s > task.time_limit_s:
            break
        found += _points(place, solver, num_points)
    limit = task.usable_bytes
    fitting = [point for point in _undominated(found) if limit is None or point.answer.simulation.peak_bytes <= limit]
    if not found:
        raise Refusal("a plan without a budget is needed to begin from; none was found; give fewer pins, or more time")
    if not fitting:
        least = min(point.answer.simulation.peak_bytes for point in found)
        raise Refusal(
            f"a plan within {size_text(task.budget_bytes or 0)} a device is needed; the smallest found takes "
            f"{size_text(budget_for(least, task.divisor), up=True)}; raise the memory or shrink the batch"
        )
    plan_s = time.perf_counter() - began
    return [_plan_of(task, solver, point, plan_s) for point in fitting]


def _points(place: Place, solver: str, num_points: int) -> Iterator[Found]:
    """Yield the answers under rising budgets on one mesh; none where the smallest does not fit."""
    settings = replace(place.settings(solver), budget_bytes=None)
    fastest = place.solver.solve(settings)
    if not isinstance(fastest, Answer):
        return
    yield _found(place, fastest)
    smallest = place.solver.smallest(settings)
    if smallest is None:
        return
    yield _found(place, smallest)
    low, high = smallest.simulation.peak_bytes, fastest.simulation.peak_bytes
    for step in range(num_points - 1):
        budget = int(low * (high / low) ** (step / (num_points - 1)))
        limit = replace(settings, budget_bytes=budget, time_limit_s=settings.time_limit_s / num_points)
        answer = place.solver.solve(limit)
        if isinstance(answer, Answer):
            yield _found(place, answer)


def _found(place: Place, answer: Answer) -> Found:
    """Return the point of `answer`; prefetch is added to it only as far as that does not raise its peak."""
    answer = answer.overlapped(place.simulate, answer.simulation.peak_bytes, place.task.furthest_overlap)
    return Found(place, answer, place.price(answer.simulation))


def _undominated(points: Iterable[Found]) -> list[Found]:
    """Return the points in order of memory, each faster than all before it."""
    kept: list[Found] = []
    for point in sorted(points, key=lambda point: (point.answer.simulation.peak_bytes, point.price.step_s)):
        if not kept or point.price.step_s < kept[-1].price.step_s:
            kept.append(point)
    return kept


def _plan_of(task: Task, solver: str, point: Found, plan_s: float) -> Plan:
    budget = budget_for(point.answer.simulation.peak_bytes, task.divisor)
    return as_plan(solver, point, plan_s).model_copy(update={"budget_bytes": budget}).signed()
