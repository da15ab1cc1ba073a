"""Explains why there is no plan: what was asked, where memory is fullest, and the ways out.

The budget that is named is that of the smallest plan found, as it was simulated. What holds least is looked for in the same way
under every budget (`Solver.least`), so the search that asks again with that budget finds it too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..artifacts import Refusal
from ..program.factors import leaves
from .budget import budget_for, usable_bytes
from .costs.resting import layers_of, there_bytes
from .costs.simulate import Simulation
from .costs.units import shown_bytes, size_text
from .model.outcome import Outcome
from .problem.strategies import batch_factor
from .search.answer import Infeasible
from .task import Place, Task


class NothingFits(Refusal):
    """Raised where no mesh of `task` has a plan. `failures` holds the reason for each mesh; `more` ends the message."""

    def __init__(self, task: Task, solver: str, failures: Sequence[tuple[Place, Infeasible]], more: str = "") -> None:
        self.task, self.solver, self.failures, self.more = task, solver, failures, more
        super().__init__(_text(task, solver, failures) + more)


def sought(failures: Sequence[tuple[Place, Infeasible]], task: Task) -> Sequence[tuple[Place, Infeasible]]:
    """Return the failures with the smallest plan among them, which no search has looked for where the budget is far too small.

    It is looked for in the last forms first, which hold least, and in no more than half the time of a question.
    """
    found, deadline = list(failures), task.deadline
    waiting = [(index, failure.seek) for index, (_, failure) in enumerate(found) if failure.seek is not None]
    if waiting:
        deadline.extend(task.time_limit_s / 2)
    for index, seek in reversed(waiting):
        if deadline.has_passed:
            break
        found[index] = found[index][0], seek(deadline)
    return found


def _smallest(failures: Sequence[tuple[Place, Infeasible]]) -> tuple[Place, Infeasible, Simulation] | None:
    """Return the mesh and the plan that hold least of those that were found and do not fit."""
    known = [
        (place, failure, failure.smallest.simulation) for place, failure in failures if failure.smallest is not None
    ]
    return min(known, key=lambda item: item[2].peak_bytes, default=None)


def _text(task: Task, solver: str, failures: Sequence[tuple[Place, Infeasible]]) -> str:
    """Return the message: where memory binds, and the ways out."""
    budget, smallest = task.budget_bytes, _smallest(failures)
    if smallest is None and any(failure.outcome is Outcome.STOPPED for _, failure in failures):
        less = ", or try fsdp, which has less to choose" if solver == "joint" else ""
        return (
            f"more time is needed: {solver} found no plan in {task.time_limit_s:g} s, nor a proof that there is none; "
            f"give --time-limit {max(10.0, 4 * task.time_limit_s):g}{less}"
        )
    proven = [failure.least_bytes for _, failure in failures if not failure.binding]
    if budget is not None and smallest is None and proven:
        return (
            f"a plan within {size_text(budget)} a device is needed; {solver} found none on {task.cluster.name}; "
            f"more than about {size_text(max(budget, math.floor(min(proven))))} is needed (an estimate)"
        )
    if budget is None or smallest is None:
        return f"a plan by {solver} is needed; there is none: {failures[0][1].binding[0]}; loosen the pins or try joint"
    place, failure, simulation = smallest
    least = shown_bytes(max(budget_for(simulation.peak_bytes, task.divisor), budget + 1))
    more = size_text(least - budget, up=True)
    enough = f"try a budget of {size_text(least, up=True)}, {more} more, for which there is a plan"
    if simulation.peak_bytes <= budget:
        kept = size_text(budget - usable_bytes(budget, task.divisor))
        known = size_text(simulation.peak_bytes)
        enough += f" (a peak of {known} is reached; {kept} of a budget are kept for what no simulation sees)"
    other = "" if solver == "joint" else ", or --solver joint"
    return (
        f"a plan within {size_text(budget)} a device is needed; {solver} found none on {task.cluster.name} (mesh {place.shape}); "
        f"memory is fullest in {listed(failure.binding)}{_full_tier(place, simulation)}; {enough}"
        f"{_smaller_batch(task, simulation)}{other}"
    )


def _full_tier(place: Place, smallest: Simulation) -> str:
    """Return a text on a tier that cannot hold all that might rest there; empty where there is none."""
    costs, task = place.problem.costs, place.task
    if costs.resting is None or costs.tier is None or costs.tier.capacity_bytes is None:
        return ""
    layers = layers_of(task.program, smallest.executor.local.decisions, costs, task.optimizer_cost)
    able = there_bytes([replace(each, param_stays=False, states_stay=False) for each in layers], costs.resting)
    if able <= costs.tier.capacity_bytes:
        return ""
    return (
        f"; the {costs.resting.place} holds {size_text(costs.tier.capacity_bytes)} a device (`capacity_bytes` in the hardware "
        f"file), and {size_text(able, up=True)} of parameters and states might rest there"
    )


def listed(names: Sequence[str]) -> str:
    """Write several names as one would say them.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _smaller_batch(task: Task, smallest: Simulation) -> str:
    """Return a text that estimates the batch that would fit, assuming that only activations shrink; may be empty."""
    static = sum(smallest.breakdown.get(kind, 0) for kind in ("param", "buffer", "grad", "optimizer"))
    size, usable = batch_size(task), task.usable_bytes
    if size is None or usable is None or static >= usable or smallest.peak_bytes <= static:
        return ""
    fits = min(size - 1, math.floor(size * (usable - static) / (smallest.peak_bytes - static)))
    if fits < 1:
        return ""
    what, cut = (
        ("micro-batch", "") if task.program.num_runs > 1 else ("batch", "; --micro-batches auto may cut this one")
    )
    return f", or a {what} of about {fits} instead of {size} (an estimate{cut})"


def batch_size(task: Task) -> int | None:
    """Return the number of samples; None where what most ops split is not the first dim, alone, of every batch entry."""
    samples = batch_factor(task.program)
    if samples is None:
        return None
    for tensor in task.program.inputs:
        if not tensor.shape or tensor.shape[0] == 1:
            continue
        first, *rest = ([id(factor) for factor in leaves(dim)] for dim in tensor.dims)
        if first != [id(samples)] or any(id(samples) in dim for dim in rest):
            return None
    return int(samples.size)
