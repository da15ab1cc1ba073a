"""The search of one question: of all spaces that wait, the one with the least bound is searched next.

A space is a part of what may be chosen (`ways`, `forms`); searching one may add others to the queue. One incumbent holds the
fastest plan, what is proven, the clock and Ctrl-C (`incumbent`). A space takes at most half of the time that is left, so that
time remains for those behind it; where spaces of another priority wait, all spaces of one priority together take at most half.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace

from ..artifacts import Refusal
from ..profiler.threads import threads
from .forms import beginning, following
from .incumbent import Found, Incumbent
from .model.deadline import Deadline
from .model.outcome import Outcome
from .refusals import NothingFits, sought
from .search.answer import Answer, Infeasible
from .task import Place, Task
from .ways import Space, Ways

STOPPED = "the search was stopped by Ctrl-C; this is the best plan found by then"


def search(task: Task, recipe: str) -> Found:
    """Return the fastest plan found until the deadline, or Ctrl-C; `NothingFits` where there is none.

    Ctrl-C interrupts only where nothing is known yet.
    """
    task.deadline = deadline = Deadline(task.time_limit_s)
    with deadline.at_ctrl_c():
        try:
            found = best_first(task, recipe)
        except Refusal:
            if deadline.is_interrupted:
                raise KeyboardInterrupt from None
            raise
    return replace(found, notes=(*found.notes, STOPPED)) if deadline.is_interrupted else found


def best_first(task: Task, recipe: str) -> Found:
    """Return the fastest plan of a question; `NothingFits` where there is none."""
    incumbent = Incumbent(task, recipe, task.deadline)
    _look_through(incumbent, beginning(task, recipe))
    found = incumbent.found()
    if found is None:
        raise NothingFits(task, recipe, sought(incumbent.failures, task), _tried(incumbent))
    return found


def solve_on(place: Place, recipe: str, below_s: float = math.inf) -> Answer | Infeasible:
    """Return the fastest answer on one mesh that takes less than `below_s`, or why there is none."""
    incumbent = Incumbent(place.task, recipe, place.task.deadline, below_s)
    _look_through(incumbent, [Ways(place, recipe)], is_one_mesh=True)
    found = incumbent.found()
    if found is not None:
        return found.answer
    return sought(incumbent.failures, place.task)[-1][1] if incumbent.failures else Infeasible(Outcome.SLOWER)


def _look_through(incumbent: Incumbent, spaces: list[Space], is_one_mesh: bool = False) -> None:
    """Search the spaces with the threads that a rank will have: kernels' workspaces depend on them, in rows as in simulations."""
    with threads(incumbent.task.num_threads):
        _search_all(incumbent, spaces, is_one_mesh)


def _search_all(incumbent: Incumbent, spaces: list[Space], is_one_mesh: bool) -> None:
    order = itertools.count()
    queue: list[tuple[int, float, int, Space]] = [
        (space.priority, space.bound_s, next(order), space) for space in spaces
    ]
    heapq.heapify(queue)
    whole, priority = incumbent.deadline, -1
    while queue:
        if queue[0][0] > priority:
            if priority >= 0 and incumbent.best is None:
                whole.extend(incumbent.task.time_limit_s)  # nothing is known yet
            priority = queue[0][0]
            incumbent.deadline = whole if all(waits[0] == priority for waits in queue) else whole.first_part()
        space = heapq.heappop(queue)[-1]
        if not space.is_wanted(incumbent):
            continue
        for new in itertools.chain(space.search(incumbent, not queue), following(space, incumbent)):
            if isinstance(new, Ways) or not is_one_mesh:
                heapq.heappush(queue, (max(priority, new.priority), new.bound_s, next(order), new))


def _tried(incumbent: Incumbent) -> str:
    """Return the end of a refusal: which numbers of micro-batches were tried, and why others cannot be."""
    variants = incumbent.task.variants
    if variants is None or incumbent.task.pipeline is not None:
        return ""
    numbers = ", ".join(map(str, incumbent.numbers_that_do_not_fit))
    why = "".join(f"; {text}" for text in list(variants.refused.values())[:1])
    return f"; micro-batches that were tried: {numbers}{why}"
