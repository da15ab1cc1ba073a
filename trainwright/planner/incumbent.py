"""The incumbent of one question: the fastest plan found, what is proven of all that was searched, and what was not searched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .costs.price import Price
from .model.deadline import Deadline
from .model.outcome import Outcome
from .search.answer import Answer, Infeasible
from .task import Place, Task

if TYPE_CHECKING:
    from .pipeline.search import StagedAnswer


@dataclass(frozen=True)
class Found:
    """An answer, and where it was found."""

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

    def bounded(self, bound_s: float, floor_s: float = 0.0, row_budget: float | None = None) -> Found:
        """Return a plan that no search found, with the bounds that a search proved, and the row budget if memory bound it."""
        answer = replace(self.answer, objective_s=self.step_s, floor_s=floor_s, row_budget=row_budget)
        return replace(self, answer=answer.bounded(bound_s))


@dataclass(eq=False)
class Incumbent:
    """The state that the search of one question shares."""

    task: Task
    """The question as it was asked."""
    recipe: str
    deadline: Deadline
    """The deadline of the spaces of one priority, at most the question's."""
    below_s: float = math.inf
    """A plan that takes as long is not wanted."""
    best: Found | None = None
    best_exact: Found | None = None
    """The fastest one before sampled gradients were looked at."""
    bound_s: float = math.inf
    """The least bound of all answers: no plan in the spaces that have one is faster."""
    failures: list[tuple[Place, Infeasible]] = field(default_factory=list)
    unseen: list[Place] = field(default_factory=list)
    """Meshes that may have a faster answer and were not searched for lack of time."""
    unseen_numbers: set[int] = field(default_factory=set)
    """The numbers of micro-batches that were not searched for lack of time."""
    unseen_stages: tuple[str, ...] = ()
    """Ways to cut into stages that were not looked at for lack of time."""
    opened: set[tuple[object, ...]] = field(default_factory=set)
    """The forms of the question that wait, or were searched."""
    said: list[str] = field(default_factory=list)
    """Sentences about spaces, for the plan's notes."""
    proposal: Found | None = None
    """A plan that took no search: what the first search of its mesh has to beat, and all there is where no search finds any."""
    relaxing_s: dict[int, float] = field(default_factory=dict)
    """By number of axes, the seconds of work that the bound of a mesh took."""
    _numbers_that_fit: set[int] = field(default_factory=set)

    @property
    def step_s(self) -> float:
        """The seconds that a plan has to beat: of the fastest step found, if there is one."""
        return self.below_s if self.best is None else min(self.below_s, self.best.step_s)

    @property
    def is_late(self) -> bool:
        """True if a plan is known, and no time is left to look for others."""
        return self.best is not None and self.deadline.has_passed

    def cutoff_s(self, place: Place) -> float:
        """Return the seconds of the fastest step found elsewhere: an answer on `place` that takes as long is not wanted."""
        return self.below_s if self.best is None or self.best.place is place else self.step_s

    def opens(self, kind: str, task: Task, by_offload: bool = True) -> bool:
        """Return true the first time that a form is asked for; by_offload: of each place to offload to apart."""
        key = kind, by_offload and task.offload, task.tier, task.sampled, task.program.captured.loss_chunks
        is_new = key not in self.opened
        self.opened.add(key)
        return is_new

    def leave_out(self, place: Place) -> None:
        """Note that there was no time for a mesh, or for a number of micro-batches."""
        if self.best is None or place.task.program.num_runs == self.best.place.task.program.num_runs:
            self.unseen.append(place)
        else:
            self.unseen_numbers.add(place.task.program.num_runs)

    def offer(self, found: Found) -> bool:
        """Take a plan with its bound; return true if it is the fastest so far."""
        self.bound_s = min(self.bound_s, found.answer.bound_s)
        self._numbers_that_fit.add(found.place.task.program.num_runs)
        is_faster = found.step_s < self.step_s
        if is_faster:
            self.best = found
        return is_faster

    def found(self) -> Found | None:
        """Return the fastest plan with what is proven of all spaces, and what was not searched; None where there is none."""
        if self.best is None and self.proposal is not None:
            floors_s = [failure.floor_s for at, failure in self.failures if at is self.proposal.place]
            budget = None if self.task.budget_bytes is None else float(self.task.budget_bytes)
            self.offer(self.proposal.bounded(max(floors_s, default=0.0), row_budget=budget))
        if self.best is None:
            return None
        answer = self.best.answer
        answer = replace(answer.bounded(min(self.bound_s, answer.bound_s)), solve_s=self.deadline.work_s)
        unfinished = [place for place, failure in self.failures if failure.outcome is Outcome.STOPPED]
        places = [place for place in (*self.unseen, *unfinished) if place is not self.best.place]
        stages = () if self.best.staged is not None else self.unseen_stages
        unseen = (*self.best.unseen_meshes, *dict.fromkeys(place.shape for place in places), *stages)
        return replace(self.best, answer=answer, unseen_meshes=unseen, notes=(*self.best.notes, *self._notes()))

    def _notes(self) -> Iterator[str]:
        assert self.best is not None
        yield from self.said if self.best.staged is None else ()
        yield from self._note_of_numbers(self.best.place.task)
        meshes = [place.shape for place in self.unseen]
        if meshes:
            yield (
                f"not searched: mesh {', '.join(dict.fromkeys(meshes))}; the time limit left no time for it, and a larger "
                "--time-limit does"
            )
        yield from self._note_of_sampling(self.best)

    def _note_of_numbers(self, task: Task) -> Iterator[str]:
        variants = self.task.variants
        if variants is None or self.best is None:
            return
        if self.best.staged is not None:
            if self.unseen_numbers:
                numbers = ", ".join(map(str, sorted(self.unseen_numbers)))
                yield f"the time limit left no time for plans without stages in {numbers} micro-batches; a larger --time-limit does"
            return
        num = task.program.num_runs
        if num > 1:
            small = [str(other) for other in self.numbers_that_do_not_fit if other < num]
            why = f"{' and '.join(small)} would not fit" if small else "fewer would be slower in this memory"
            yield f"{num} micro-batches were chosen: {why}"
        elif variants.refused:
            yield f"one micro-batch alone can be: {next(iter(variants.refused.values()))}"
        if self.unseen_numbers:
            numbers = ", ".join(map(str, sorted(self.unseen_numbers)))
            yield f"the time limit left no time for {numbers} micro-batches; a larger --time-limit does"

    def _note_of_sampling(self, best: Found) -> Iterator[str]:
        if not self.task.sampled or self.recipe != "joint":
            return
        is_sampled = best.place.task.sampled > 0
        if is_sampled and self.best_exact is None:
            yield "no plan was found with exact gradients"
        elif is_sampled and self.best_exact is not None:
            yield f"with exact gradients the fastest step that was found takes {1e3 * self.best_exact.step_s:.4g} ms"
        elif not is_sampled:
            yield "no linear map is sampled, all gradients are exact: none was found to make a step faster"

    @property
    def numbers_that_do_not_fit(self) -> list[int]:
        """The numbers of micro-batches of which no mesh has a plan."""
        return sorted({place.task.program.num_runs for place, _ in self.failures} - self._numbers_that_fit)
