"""The forms of a question, each captured when its turn comes, and pipeline stages, as spaces of the search.

A form trains the same model on the same batch in another program: in more micro-batches, with its loss in chunks, without
offloading, resting on the host, with sampled gradients. Only the last makes a step faster by itself. The others take less
memory, or are solved sooner, so they are searched where memory binds. Stages come behind plans without any or, where memory
binds those, before them. `Priority` has the order of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..artifacts import UserError
from .incumbent import Incumbent
from .meshes import mesh_shapes
from .model.outcome import Outcome
from .pipeline.search import NoStagesFit, NotAllSeen, come_first, fastest_stages
from .search.effort import GAP, NEAR
from .task import Place, Task
from .ways import Priority, Space, Ways


def spaces_of(task: Task, recipe: str, priority: Priority = Priority.PLAIN) -> list[Space]:
    """Return the spaces that a question begins with."""
    if task.pipeline is not None:
        staged = Stages(task, recipe, max(priority, Priority.STAGES))
        if task.pipeline != "auto" or recipe != "joint":
            return [staged]
        alone = _with(task, pipeline=None)
        if come_first(alone):
            staged.priority = priority
            return [staged, *spaces_of(alone, recipe, priority)]
        return [*spaces_of(alone, recipe, priority), staged]
    return [Ways(place, recipe, priority=priority) for place in _places(task, recipe)]


def beginning(task: Task, recipe: str) -> list[Space]:
    """Return the spaces of the form of a question that is looked at first, and the forms that are looked at in any case.

    Where offloading is left to the planner, what fits without is among what is searched with it.
    """
    may_offload = task.offload == "auto" and recipe == "joint" and not task.goes_again
    first, later = (_with(task, tier=None) if _may_stay(task) else task), list[Space]()
    if may_offload and task.has_host and task.budget_bytes is not None and task.pipeline is None:
        first = _with(first, offload="host")
    if task.sampled and recipe == "joint" and not any(pin.endswith("=sampled") for pin in task.pins):
        later.append(Form(partial(_with, first), recipe, priority=Priority.SAMPLED))
        first = _with(first, sampled=0.0)
    if first.chunked is not None and first.chunked.is_free:
        later.append(
            Form(partial(first.chunked.task, first), recipe, priority=Priority.CHUNKS, is_needed=_may_gain_by_chunks)
        )
    if first.tier is not task.tier:
        later.append(Form(partial(_with, first, tier=task.tier), recipe, is_needed=_is_bound))
    return [*spaces_of(first, recipe), *later]


def _may_stay(task: Task) -> bool:
    """Return true if nothing needs to rest on the task's tier: the host has no steps to go on from, as disks have."""
    return task.tier is not None and task.tier.place == "host" and task.tier.keep_bytes is None


def _with(task: Task, **changes: object) -> Task:
    found = replace(task, **changes)  # type: ignore[arg-type]
    found.records = task.records
    return found


def _places(task: Task, recipe: str) -> Sequence[Place]:
    if recipe == "megatron" and task.mesh is None and not task.pins:
        return task.places_on(mesh_shapes(task.cluster, ordered=True))
    return task.places


@dataclass(eq=False)
class Form(Space):
    """The question in another form; `make` captures it, and returns None where there is no such form."""

    make: Callable[[], Task | None]
    recipe: str
    bound_s: float = 0.0
    priority: Priority = Priority.PLAIN
    is_needed: Callable[[Incumbent], bool] = lambda incumbent: True
    task: Task | None = None
    """The question, where the number of micro-batches makes the form."""
    number: int = 0
    """That number."""
    may_fit: Callable[[Incumbent, Place], bool] = lambda incumbent, place: True
    """Tells of which meshes the form is looked at."""

    def is_wanted(self, incumbent: Incumbent) -> bool:
        if not self.is_needed(incumbent) or self.bound_s >= incumbent.step_s * (1 - GAP):
            return False
        if incumbent.is_late and self.number:
            incumbent.unseen_numbers.add(self.number)
        return not incumbent.is_late

    def search(self, incumbent: Incumbent, is_last: bool) -> Iterator[Space]:
        if self.priority == Priority.SAMPLED and incumbent.best_exact is None:
            incumbent.best_exact = incumbent.best
        task = self.make()
        if task is None:
            if self.task is not None:
                yield from _more_micro_batches(self.task, self.number, self.recipe, self.bound_s, self.priority)
            return
        for space in spaces_of(task, self.recipe, self.priority):
            if isinstance(space, Ways) and not self.may_fit(incumbent, space.place):
                continue
            space.bound_s = max(space.bound_s, self.bound_s)
            yield space


def following(space: Space, incumbent: Incumbent) -> Iterator[Space]:
    """Yield the forms that may be faster where memory binds the question of `space`, each once.

    More micro-batches never make a step faster by themselves: they gather weights and start kernels once for each, and add
    gradients up. A loss in chunks does not either: its products are smaller. A problem without offloading has half the columns,
    so where the answer is far from what is proven, it may be solved better.
    """
    if not isinstance(space, Ways):
        return
    task, recipe = space.place.task, space.recipe
    if space.is_beside or not space.is_bound:
        return
    if task.variants is not None and incumbent.opens(f"more than {task.program.num_runs}", task):
        yield from _more_micro_batches(task, task.program.num_runs, recipe, space.bound_s, space.priority)
    chunked = task.chunked if recipe == "joint" else None
    # the form in chunks asks without offloading itself
    if chunked is not None and not chunked.is_free and incumbent.opens("chunks", task, by_offload=False):
        yield Form(
            partial(chunked.task, task), recipe, priority=max(space.priority, Priority.CHUNKS), is_needed=_is_nothing
        )
    yield from _offloading(task, space, incumbent)


def _offloading(task: Task, space: Ways, incumbent: Incumbent) -> Iterator[Form]:
    """Yield the question without offloading or, where it was not looked at first since stages may be asked for, with it."""
    recipe, asked = space.recipe, incumbent.task
    if asked.offload != "auto" or recipe != "joint" or not task.has_host or not incumbent.opens("offload", task):
        return
    if task.offload == "host":
        without = partial(_with, task, offload="none")
        yield Form(without, recipe, space.bound_s, space.priority, _is_far, may_fit=_may_fit_without)
    elif task.offload == "auto" and asked.pipeline == "auto":
        yield Form(partial(_with, task, offload="host"), recipe, priority=Priority.CHUNKS, is_needed=_is_nothing)


def _more_micro_batches(task: Task, num: int, recipe: str, bound_s: float, priority: Priority) -> Iterator[Form]:
    """Yield the form of the next number of micro-batches, which computes no less than the one before."""
    assert task.variants is not None
    if more := [number for number in task.variants.numbers if number > num]:
        yield Form(
            partial(task.variants.task_of, task, min(more)), recipe, bound_s, priority, _is_bound, task, min(more)
        )


def _may_fit_without(incumbent: Incumbent, place: Place) -> bool:
    """Return false where no plan fits a mesh even with offloading, which is more than a search that ended early can tell."""
    program = place.task.program
    return not any(
        other.shape == place.shape and other.task.program is program and failure.outcome is not Outcome.STOPPED
        for other, failure in incumbent.failures
    )


def _is_nothing(incumbent: Incumbent) -> bool:
    return incumbent.best is None


def _is_bound(incumbent: Incumbent) -> bool:
    """Return true unless the best plan fits as it is: then what takes less memory is not faster."""
    return incumbent.best is None or incumbent.best.answer.binds


def _may_gain_by_chunks(incumbent: Incumbent) -> bool:
    """Return true unless the best plan fits as it is, which of stages is not known."""
    return _is_bound(incumbent) or (incumbent.best is not None and incumbent.best.staged is not None)


def _is_far(incumbent: Incumbent) -> bool:
    best = incumbent.best
    if best is None:
        return any(failure.outcome is Outcome.STOPPED for _, failure in incumbent.failures)
    return best.staged is None and best.step_s > (1 + NEAR) * best.answer.floor_s


@dataclass(eq=False)
class Stages(Space):
    """All cuts of the model into pipeline stages."""

    task: Task
    recipe: str
    priority: Priority = Priority.STAGES

    @property
    def _is_free(self) -> bool:
        """True if no stages may be better than any."""
        return self.task.pipeline == "auto" and self.recipe == "joint"

    def is_wanted(self, incumbent: Incumbent) -> bool:
        return True

    def search(self, incumbent: Incumbent, is_last: bool) -> Iterator[Space]:
        self.task.deadline = incumbent.deadline if is_last else incumbent.deadline.first_part()
        try:
            found = fastest_stages(self.task, self.recipe, incumbent.step_s)
        except NotAllSeen as cut_short:
            incumbent.said.append(str(cut_short))
            incumbent.unseen_stages = cut_short.unseen
            return
        except (NoStagesFit, UserError) as refused:
            in_chunks = self._in_chunks() if isinstance(refused, NoStagesFit) else None
            if in_chunks is not None:
                yield in_chunks
            elif not self._is_free:
                raise
            if self._is_free:
                incumbent.said.append(f"no pipeline stages: {refused}")
            return
        if found is not None:
            incumbent.offer(found)
        elif self._is_free:
            incumbent.said.append("pipeline stages were looked at: none are faster than none")

    def _in_chunks(self) -> Form | None:
        """Return the question with its loss in chunks, for where nothing fits without; None if there is no such loss."""
        if self.task.chunked is None or self.recipe != "joint":
            return None
        chunked = self.task.chunked.task(self.task)
        if chunked is None:
            return None
        return Form(lambda: chunked, self.recipe, priority=max(self.priority, Priority.CHUNKS), is_needed=_is_nothing)
