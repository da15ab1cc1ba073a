"""Which mesh: the cluster's own first, then others as long as they may be faster and the time lasts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .costs.price import Price
from .meshes import mesh_shapes
from .model.outcome import Outcome
from .search.effort import GAP
from .search.solve import Answer, Infeasible
from .task import Place, Task

if TYPE_CHECKING:
    from .pipeline.search import StagedAnswer

_SHARE = 8
"""Other meshes than the first get what it leaves of the time limit, and one part in so many, all together, however long it took."""
_GROWTH = 12.0
"""By how much one more axis lengthens the solution."""


@dataclass(frozen=True)
class Found:
    """The best answer, and where it was found."""

    place: Place
    answer: Answer
    price: Price
    notes: tuple[str, ...] = ()
    unseen_meshes: tuple[str, ...] = ()
    """Meshes that may have a faster answer: nobody searched them, or not to the end."""
    staged: StagedAnswer | None = None
    """Pipeline stages, where there are any; `place` is then one stage's."""

    @property
    def step_s(self) -> float:
        """The predicted seconds of a step."""
        return self.price.step_s if self.staged is None else self.staged.step_s


class MeshSearch:
    """Looks at one mesh after the other for the fastest answer.

    `best` is the fastest so far, `failures` says why meshes have none, `slower` names those that were given up.
    """

    def __init__(self, task: Task, solver: str, cutoff_s: float = math.inf) -> None:
        self.task, self.solver, self.cutoff_s = task, solver, cutoff_s
        self.places = task.places
        if solver == "megatron" and task.mesh is None and not task.pins:
            self.places = task.places_on(mesh_shapes(task.cluster, ordered=True))
        self.best: Found | None = None
        self.failures: list[tuple[Place, Infeasible]] = []
        self.slower: list[str] = []
        self.unseen: list[str] = []
        self._began_s = task.deadline.work_s
        self._others_began_s: float | None = None
        self._bound_of_found_s = math.inf
        """What no answer is below on the meshes that have one; the others are slower, or have none."""
        self._seconds: dict[int, float] = {}
        """By number of axes, the seconds of work that the bound of a mesh took."""

    def look_at(self, place: Place) -> None:
        """Solve on `place`, unless it cannot win or would take too long."""
        left_s = None if place is self.places[0] else self._left_s()
        is_late = left_s is not None and (self._expected_s(place) > left_s or self.task.deadline.is_interrupted)
        if is_late and self.best is not None:
            self.unseen.append(place.shape)
            return
        cutoff_s = self.cutoff_s if self.best is None else min(self.cutoff_s, self.best.price.step_s)
        if (len(self.places) > 1 or math.isfinite(cutoff_s)) and self._bound_s(place) >= cutoff_s * (1 - GAP):
            self.slower.append(place.shape)
            return
        answer = place.solve(self.solver, None if left_s is None else max(1.0, left_s), cutoff_s)
        if isinstance(answer, Infeasible):
            if answer.outcome is Outcome.SLOWER:
                self.slower.append(place.shape)
            else:
                self.failures.append((place, answer))
            return
        found = Found(place, *place.overlapped(answer))
        self._bound_of_found_s = min(self._bound_of_found_s, answer.bound_s)
        if self.best is None or found.price.step_s < self.best.price.step_s:
            self.best = found

    def found(self) -> Found | None:
        """Return the best answer, with what is proven of all meshes that were searched, and which were not."""
        if self.best is None:
            return None
        unfinished = (place.shape for place, failure in self.failures if failure.outcome is Outcome.STOPPED)
        unseen = (*self.unseen, *unfinished)
        answer = self.best.answer.bounded(min(self._bound_of_found_s, self.best.answer.bound_s))
        return replace(self.best, answer=answer, unseen_meshes=unseen, notes=self._notes())

    def _notes(self) -> tuple[str, ...]:
        if not self.unseen:
            return ()
        return (
            f"not searched: mesh {', '.join(self.unseen)}; other meshes than the first share what it leaves of --time-limit, "
            "an eighth at least, and a larger one gives them more",
        )

    def _left_s(self) -> float:
        """Return what is left for other meshes than the first: of the time limit, or of their own share."""
        now_s, limit_s = self.task.deadline.work_s, self.task.time_limit_s
        if self._others_began_s is None:
            self._others_began_s = now_s
        return max(limit_s - (now_s - self._began_s), limit_s / _SHARE - (now_s - self._others_began_s))

    def _bound_s(self, place: Place) -> float:
        bound_s, work_s = place.solver.relaxed
        self._seconds[len(place.axes)] = work_s
        self.task.deadline.count(work_s)
        return bound_s

    def _expected_s(self, place: Place) -> float:
        if not self._seconds:
            return 0.0
        near = max((num for num in self._seconds if num <= len(place.axes)), default=min(self._seconds))
        return self._seconds[near] * _GROWTH ** max(0, len(place.axes) - near)
