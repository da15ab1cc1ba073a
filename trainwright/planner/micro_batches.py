"""How many micro-batches: one first, then more as long as memory binds and their bound in seconds is below the best.

More micro-batches never make a step faster by themselves: they gather weights and start kernels once for each, and add
gradients up. They take less memory, so they are looked at when the plan without them does not fit, or has to give time
for memory. What the sharding alone would take rises with their number, so the first number whose bound is not below the
best ends the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..artifacts import UserError
from ..program.program import Program
from .mesh_search import Found
from .refusals import NothingFits
from .search.effort import GAP
from .task import Task

Search = Callable[[Task, float], Found | None]
"""The fastest answer of a task below some seconds on any mesh; `None`: there is none so fast; `Refusal`: none that fits."""


@dataclass(eq=False)
class Variants:
    """The programs of one batch, by the number of micro-batches that make a step of it."""

    numbers: Sequence[int]
    program_of: Callable[[int], Program]
    refused: dict[int, str] = field(default_factory=dict)
    """Why a number cannot be."""
    _tasks: dict[tuple[int, str], Task] = field(default_factory=dict)
    """By number and where it may offload to."""
    _programs: dict[int, Program] = field(default_factory=dict)

    def tasks(self, task: Task) -> Iterator[tuple[int, Task]]:
        """Yield the task of each number that can be, beginning with `task` itself."""
        for num in self.numbers:
            if (found := self.task_of(task, num)) is not None:
                yield num, found

    def task_of(self, task: Task, num: int) -> Task | None:
        """Return the task of one number, `task` itself where that is its own; None where that cannot be."""
        if num == task.program.num_runs:
            return task
        return None if num in self.refused else self._task(task, num)

    def _task(self, task: Task, num: int) -> Task | None:
        if (num, task.offload) not in self._tasks:
            try:
                program = self._programs.get(num) or self.program_of(num)
            except UserError as error:
                self.refused[num] = str(error)
                return None
            self._programs[num] = program
            self._tasks[num, task.offload] = replace(task, program=program, variants=None)
        return self._tasks[num, task.offload]


def fastest_number(task: Task, variants: Variants, search: Search, cutoff_s: float = math.inf) -> Found | None:
    """Return the fastest answer over all numbers of micro-batches; None if none beats `cutoff_s`; `Refusal` where none fits."""
    best: Found | None = None
    deadline = task.deadline
    refusals: dict[int, NothingFits] = {}
    unseen: list[int] = []
    for num in variants.numbers:
        below_s = cutoff_s if best is None else min(cutoff_s, best.price.step_s)
        if math.isfinite(below_s) and deadline.has_passed:
            unseen.append(num)
            continue
        if (variant := variants.task_of(task, num)) is None:
            continue
        variant.deadline = deadline.first_part()
        if math.isfinite(below_s) and min(p.solver.lower_bound_s() for p in variant.places) >= below_s * (1 - GAP):
            break
        try:
            found = search(variant, below_s)
        except NothingFits as refusal:
            refusals[num] = refusal
            continue
        if found is not None and (best is None or found.price.step_s < best.price.step_s):
            best = found
        if best is not None and not best.answer.binds:
            break  # it fits as it is, and more of them would not be faster
    if best is None and (math.isfinite(cutoff_s) or not refusals):
        return None
    if best is None:
        raise _refused(refusals, variants)
    return replace(best, notes=(*best.notes, *_notes(best, refusals, variants, unseen)))


def _notes(best: Found, refusals: dict[int, NothingFits], variants: Variants, unseen: list[int]) -> Iterator[str]:
    num = best.place.task.program.num_runs
    if num > 1:
        small = [str(other) for other in sorted(refusals) if other < num]
        why = f"{' and '.join(small)} would not fit" if small else "fewer would be slower in this memory"
        yield f"{num} micro-batches were chosen: {why}"
    elif variants.refused:
        yield f"one micro-batch alone can be: {next(iter(variants.refused.values()))}"
    if unseen:
        yield f"the time limit left no time for {', '.join(map(str, unseen))} micro-batches; a larger --time-limit does"


def _refused(refusals: dict[int, NothingFits], variants: Variants) -> NothingFits:
    """The refusal of the number that needs least, with what was looked at."""
    refused = refusals[max(refusals)]
    seen = f"; micro-batches that were tried: {', '.join(map(str, sorted(refusals)))}"
    why = "".join(f"; {text}" for text in list(variants.refused.values())[:1])
    return NothingFits(refused.task, refused.solver, refused.failures, seen + why)
