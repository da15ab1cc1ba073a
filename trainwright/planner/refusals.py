"""Explains why there is no plan: what was asked, where memory is fullest, and the ways out that were tried.

A budget is named as one that does only after a plan was found for it, by the search that asking again would make. Where none
was found in a few attempts, the largest is named as an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..artifacts import Refusal
from ..program.factors import leaves
from .budget import budget_for, usable_bytes
from .costs.resting import layers_of, there_bytes
from .costs.simulate import Simulation
from .costs.units import shown_bytes, size_text
from .model.deadline import Deadline
from .model.outcome import Outcome
from .problem.strategies import batch_factor
from .search.solve import Infeasible
from .task import Place, Task

_ATTEMPTS = 4


class NothingFits(Refusal):
    """Raised where no mesh of `task` has a plan. `failures` holds the reason for each mesh; `more` ends the message."""

    def __init__(self, task: Task, solver: str, failures: Sequence[tuple[Place, Infeasible]], more: str = "") -> None:
        self.task, self.solver, self.failures, self.more = task, solver, failures, more
        super().__init__(_text(task, solver, failures, None) + more)

    @property
    def least_bytes(self) -> int | None:
        """Return the smallest budget that the search knows of, rounded as it is shown; None if memory suffices."""
        smallest = _smallest(self.failures)
        if smallest is None or self.task.budget_bytes is None:
            return None
        least = budget_for(smallest[2].peak_bytes, self.task.divisor)
        return shown_bytes(max(least, self.task.budget_bytes + 1))

    def tried(self, search: Callable[[Task], object]) -> Refusal:
        """Return the refusal with a budget for which `search` does find a plan, or with an estimate."""
        budget = self.least_bytes
        deadline = Deadline(self.task.time_limit_s)
        for _ in range(_ATTEMPTS):
            if budget is None:
                return self
            try:
                search(replace(self.task, budget_bytes=budget, progress=None, deadline=deadline))
            except NothingFits as again:
                budget = again.least_bytes
            except KeyboardInterrupt:
                return self
            else:
                return Refusal(_text(self.task, self.solver, self.failures, budget) + self.more)
            if deadline.has_passed:
                break
        return self


def _smallest(failures: Sequence[tuple[Place, Infeasible]]) -> tuple[Place, Infeasible, Simulation] | None:
    """Return the mesh and the plan that hold least of those that were found and do not fit."""
    known = [
        (place, failure, failure.smallest.simulation) for place, failure in failures if failure.smallest is not None
    ]
    return min(known, key=lambda item: item[2].peak_bytes, default=None)


def _text(task: Task, solver: str, failures: Sequence[tuple[Place, Infeasible]], tried: int | None) -> str:
    """Return the message: where memory binds, and the ways out; `tried` is a budget for which there is a plan."""
    budget, smallest = task.budget_bytes, _smallest(failures)
    if smallest is None and any(failure.outcome is Outcome.STOPPED for _, failure in failures):
        less = ", or try fsdp, which has less to choose" if solver == "joint" else ""
        return (
            f"more time is needed: {solver} found no plan in {task.time_limit_s:g} s, nor a proof that there is none; "
            f"give --time-limit {max(10.0, 4 * task.time_limit_s):g}{less}"
        )
    if budget is None or smallest is None:
        return f"a plan by {solver} is needed; there is none: {failures[0][1].binding[0]}; loosen the pins or try joint"
    place, failure, simulation = smallest
    least = shown_bytes(budget_for(simulation.peak_bytes, task.divisor)) if tried is None else tried
    more = size_text(least - budget, up=True)
    enough = (
        f"try a budget of {size_text(least, up=True)}, {more} more, for which there is a plan"
        if tried is not None
        else f"at least about {size_text(least, up=True)} is needed, {more} more (an estimate)"
    )
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
