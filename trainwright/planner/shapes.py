"""Makes one plan for batches of several shapes, within one budget.

Decisions are taken at one shape, the largest, and carried over to the others (`decisions_at`), whose steps are simulated and
priced. Where shapes cannot be compared (more rows, but shorter) one of the others may hold more: then the search begins
again with less for the largest, lowered in the proportion in which the other has to become smaller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..artifacts import Plan, Refusal, ShapePlan, UserError
from ..program.other_shapes import decisions_at, entry_layout
from ..program.plan_text import decisions_of
from ..program.program import Program
from .budget import budget_for
from .costs.costs import OptimizerCost
from .costs.known_updates import MakeOptimizer
from .plan import make_plan, size_text, task_of

Shapes = Mapping[str, tuple[int, ...]]
MOST_TRIES = 4


@dataclass(frozen=True)
class Shaped:
    """The program of the same model, captured on a batch of other shapes."""

    program: Program
    shapes: Shapes

    @property
    def text(self) -> str:
        """Return the shapes as text."""
        return ", ".join(f"{name} {list(shape)}" for name, shape in self.shapes.items())


def largest(batches: Sequence[Shapes]) -> int:
    """Return the index of the batch to plan on: the one with the most elements.

    >>> largest([{"x": (8, 16)}, {"x": (8, 64)}, {"x": (4, 64)}])
    1
    """
    return max(range(len(batches)), key=lambda at: sum(math.prod(shape) for shape in batches[at].values()))


def check_alike(first: Shapes, other: Shapes) -> None:
    """Raise `UserError` unless two batches have the same entries, of as many dims."""
    if first.keys() != other.keys() or any(len(first[name]) != len(other[name]) for name in first):
        raise UserError(
            f"batches with the same entries, of as many dims, are needed to plan for several shapes; got {dict(first)} and "
            f"{dict(other)}; plan for each"
        )


def make_plan_for(others: Sequence[Shaped], budget_bytes: int | None, **question: Any) -> Plan:
    """Return the fastest plan on `question`'s program under which the steps of `others` fit the budget too.

    Raises `Refusal` where nothing fits, with the shape that is in the way.
    """
    limit, worst = budget_bytes, None
    for _ in range(MOST_TRIES):
        try:
            plan = make_plan(budget_bytes=limit, **question)
        except Refusal as refusal:
            raise refusal if worst is None else _none_for(worst, budget_bytes, str(refusal)) from None
        cost, make = question["optimizer_cost"], question["make_optimizer"]
        plan = with_shapes(plan, question["program"], others, cost, make)
        excess, worst = _worst(plan, others, budget_bytes, question)
        if excess <= 0 or limit is None or budget_bytes is None or worst is None:
            return plan if limit is None or limit == budget_bytes else _noted(plan, budget_bytes, limit)
        own = budget_for(plan.predicted.peak_bytes, task_of(plan, question["program"], cost, make).divisor)
        limit = min(limit, own) * budget_bytes // (budget_bytes + excess)
    assert worst is not None
    raise _none_for(worst, budget_bytes, f"{MOST_TRIES} searches came to none")


def _worst(
    plan: Plan, others: Sequence[Shaped], budget_bytes: int | None, question: Mapping[str, Any]
) -> tuple[int, Shaped | None]:
    """Return by how much the largest peak of the other shapes needs more than the budget, and the shape."""
    if budget_bytes is None:
        return 0, None
    cost, make = question["optimizer_cost"], question["make_optimizer"]
    needs = [
        budget_for(found.peak_bytes, task_of(plan, shaped.program, cost, make).divisor)
        for found, shaped in zip(plan.shapes, others)
    ]
    at = max(range(len(needs)), key=needs.__getitem__)
    return needs[at] - budget_bytes, others[at]


def _none_for(shaped: Shaped, budget_bytes: int | None, why: str) -> Refusal:
    return Refusal(
        f"a plan within {size_text(budget_bytes or 0)} for every shape is needed; there is none that holds a batch of "
        f"{shaped.text}; {why}; give more memory, or leave that shape out"
    )


def _noted(plan: Plan, budget_bytes: int | None, limit: int) -> Plan:
    note = f"planned within {size_text(limit)} at the largest shape, so that the others fit the budget as well"
    return plan.model_copy(update={"budget_bytes": budget_bytes, "notes": (*plan.notes, note)})


def with_shapes(
    plan: Plan, program: Program, others: Sequence[Shaped], cost: OptimizerCost, make: MakeOptimizer
) -> Plan:
    """Return `plan` with what the step takes at other shapes, simulated and priced anew."""
    decisions = decisions_of(program, plan)
    found = []
    for shaped in others:
        inputs = {name: entry_layout(entry, shaped.shapes[name]) for name, entry in plan.batch.items()}
        (place,) = task_of(plan, shaped.program, cost, make).places
        simulation = place.simulate(decisions_at(shaped.program, program, decisions, inputs))
        step_s = place.price(simulation).step_s
        found.append(ShapePlan(batch=dict(shaped.shapes), step_s=step_s, peak_bytes=simulation.peak_bytes))
    return plan.model_copy(update={"shapes": tuple(found)})


def check_shapes(
    plan: Plan, program: Program, others: Sequence[Shaped], cost: OptimizerCost, make: MakeOptimizer
) -> Plan:
    """Return a plan with its further shapes simulated anew; `Refusal` where one of them does not fit its budget."""
    found = with_shapes(plan, program, others, cost, make)
    question = {"optimizer_cost": cost, "make_optimizer": make}
    excess, worst = _worst(found, others, plan.budget_bytes, question) if others else (0, None)
    if excess > 0 and worst is not None:
        peak = max(each.peak_bytes for each in found.shapes)
        raise Refusal(
            f"a peak within {size_text(plan.budget_bytes or 0)} is needed for every shape; at {worst.text} this plan's is "
            f"{size_text(peak)}; {size_text(excess, up=True)} more would do, or recompute more"
        )
    return found
