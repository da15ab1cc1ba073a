"""Chooses exact or sampled gradients where both are allowed: exact ones unless a step that samples some is faster.

A problem in which linear maps may keep some rows has twice their options, and its search is the longer; what is exact is
searched first, in half of the time, so that allowing estimates never makes a plan slower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from .mesh_search import Found
from .refusals import NothingFits

if TYPE_CHECKING:
    from .task import Task


def exact_or_sampled(task: Task, search: Callable[[Task], Found]) -> Found:
    """Return what `search` finds with all gradients exact, or with some of them estimated where that is faster."""
    if any(pin.endswith("=sampled") for pin in task.pins):
        return search(task)
    exact = replace(task, sampled=0.0, deadline=task.deadline.first_part())
    exact.records = task.records
    try:
        best = search(exact)
    except NothingFits:
        found = search(task)
        return replace(found, notes=(*found.notes, "no plan was found with exact gradients"))
    try:
        found = search(task)
    except NothingFits:
        return best
    bound_s = min(found.answer.bound_s, best.answer.bound_s)
    if found.step_s < best.step_s:
        note = f"with exact gradients the fastest step that was found takes {1e3 * best.step_s:.4g} ms"
        return replace(found, notes=(*found.notes, note))
    note = "no linear map is sampled, all gradients are exact: none was found to make a step faster"
    return replace(best, answer=best.answer.bounded(bound_s), notes=(*best.notes, note))
