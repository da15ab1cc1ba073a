"""Chooses whole logits or a loss in chunks: chunks where nothing fits without, or where allowed and faster.

Chunks compute nothing twice, and never make a step faster by themselves: their products are smaller. They take less
memory, so they are looked at where that binds. A step in chunks has no logits to give, so it is not taken unasked while the
other fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..artifacts import UserError
from ..program.program import Program
from .mesh_search import Found
from .model.deadline import Deadline
from .refusals import NothingFits

if TYPE_CHECKING:
    from .micro_batches import Variants
    from .task import Task


@dataclass(eq=False)
class ChunkedLoss:
    """The same step with its loss in chunks, captured when it is first asked for."""

    program_of: Callable[[], tuple[Program, Variants | None]]
    is_free: bool
    """True if the loss may be taken in chunks even where whole logits fit."""
    _made: tuple[Program, Variants | None] | None = None

    def task(self, task: Task) -> Task | None:
        """Return `task` with its loss in chunks; None where the step has no loss that can be taken so."""
        try:
            self._made = self._made or self.program_of()
        except UserError:
            return None
        program, variants = self._made
        return replace(task, program=program, variants=variants, chunked=None)


def whole_or_chunked(task: Task, chunked: ChunkedLoss, search: Callable[[Task], Found]) -> Found:
    """Return what `search` finds with whole logits, or with the loss in chunks; `NothingFits` where neither fits."""
    deadline = task.deadline
    whole = replace(task, chunked=None, deadline=deadline.first_part() if chunked.is_free else deadline)
    try:
        best = search(whole)
    except NothingFits:
        other = chunked.task(task)
        if other is None:
            raise
        if not chunked.is_free:
            other.deadline = Deadline(task.time_limit_s)
        return search(other)
    other = chunked.task(task) if chunked.is_free and best.answer.binds else None
    if other is None:
        return best
    try:
        found = search(other)
    except NothingFits:
        return best
    return found if found.price.step_s < best.price.step_s else best
