"""Lists the collectives that lead from one layout to another. The planner prices these steps, the runtime runs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from .layout import PARTIAL, REPLICATE, Layout, Slot, axes_of, local_sizes, slots_in_order

Kind = Literal["slice", "reduce_scatter", "all_reduce", "all_to_all", "all_gather"]


@dataclass(frozen=True)
class ReshardStep:
    """One collective along one mesh axis, or a slice, which communicates nothing."""

    kind: Kind
    axis: int
    slot: int
    """The slot that is cut, joined or scattered; -1 for `all_reduce`."""
    source: int
    """The slot that an `all_to_all` joins; else -1."""
    before: Layout
    after: Layout

    def of_slots(self, places: Sequence[int]) -> ReshardStep:
        """Return the step of a tensor whose slots are those of `places` in turn."""
        new = {slot: place for place, slot in enumerate(places)}
        slot, source = (new.get(each, each) for each in (self.slot, self.source))
        before, after = (tuple(new.get(at, at) for at in layout) for layout in (self.before, self.after))
        return ReshardStep(self.kind, self.axis, slot, source, before, after)


@lru_cache(maxsize=100_000)
def transition(source: Layout, target: Layout) -> tuple[ReshardStep, ...]:
    """Return the steps that lead from `source` to `target`; nothing leads to a partial sum that was none before.

    Free slices come first, then what shrinks the tensor, then gathers, so that each collective moves little.

    >>> [step.kind for step in transition((PARTIAL, 0), (0, REPLICATE))]
    ['all_gather', 'reduce_scatter']
    """
    steps: list[ReshardStep] = []
    current = source
    while current != target:
        kind, axis, slot, origin = _next(current, target)
        after = (*current[:axis], REPLICATE if kind in ("all_reduce", "all_gather") else slot, *current[axis + 1 :])
        steps.append(ReshardStep(kind, axis, slot, origin, current, after))
        current = after
    return tuple(steps)


def _next(current: Layout, target: Layout) -> tuple[Kind, int, int, int]:
    differing = [axis for axis in range(len(current)) if current[axis] != target[axis]]
    for axis in differing:
        if current[axis] == REPLICATE and target[axis] >= 0 and _can_nest(current, target, axis):
            return "slice", axis, target[axis], -1
    for axis in differing:
        if current[axis] == PARTIAL and target[axis] >= 0 and _can_nest(current, target, axis):
            return "reduce_scatter", axis, target[axis], -1
    for axis in differing:
        if current[axis] == PARTIAL and target[axis] == REPLICATE:
            return "all_reduce", axis, -1, -1
    for axis in differing:
        innermost = axes_of(current, current[axis])[-1] == axis
        if current[axis] >= 0 and target[axis] >= 0 and innermost and _can_nest(current, target, axis):
            return "all_to_all", axis, target[axis], current[axis]
    for axis in reversed(differing):
        if current[axis] >= 0 and axes_of(current, current[axis])[-1] == axis:
            return "all_gather", axis, current[axis], -1
    # An axis that is right stands inside one that is not: take it out first.
    for axis in reversed(range(len(current))):
        if current[axis] >= 0 and any(current[a] == current[axis] or target[a] == current[axis] for a in differing):
            return "all_gather", axis, current[axis], -1
    for axis in differing:
        if current[axis] == PARTIAL and target[axis] != PARTIAL:
            return "all_reduce", axis, -1, -1
    raise ValueError(f"no way leads from layout {current} to {target}: a partial sum cannot be made of a whole")


def _can_nest(current: Layout, target: Layout, axis: int) -> bool:
    """Return True if `axis` may split its target slot now: that slot's outer axes are in place, no inner one is."""
    slot = target[axis]
    held = [a for a in axes_of(current, slot) if a != axis]
    return held == [a for a in axes_of(target, slot) if a < axis]


def step_bytes(step: ReshardStep, slots: Sequence[Slot], itemsize: int, mesh: Sequence[int]) -> int:
    """Return the bytes that `step` handles on the fullest rank: the gathered or reduced tensor, or what is exchanged."""
    layout = step.after if step.kind == "all_gather" else step.before
    count = itemsize
    for size in local_sizes(slots, layout, mesh, None):
        count *= size
    return count


def held_bytes(
    step: ReshardStep, slots: Sequence[Slot], itemsize: int, mesh: Sequence[int], order: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """Return the bytes that one step of a reshard allocates beside its operand, by tensor, and those that its result lies in.

    order: the dims as they lie in memory. Parts that are not consecutive in memory are copied before they are sent and after they
    have come. A gather brings as much from every rank, so a result that is not copied lies in memory that is padded.
    """
    before, after = (local_sizes(slots, layout, mesh, None) for layout in (step.before, step.after))
    given, left = itemsize * math.prod(before), itemsize * math.prod(after)
    each = slots_in_order(slots, order)
    is_consecutive = step.slot < 0 or math.prod(before[slot] for slot in each[: each.index(step.slot)]) == 1
    if step.kind == "all_gather":
        padded = given * mesh[step.axis]
        return ((padded,), padded) if is_consecutive else ((padded, left), left)
    if step.kind == "reduce_scatter":
        padded = left * mesh[step.axis]
        return (padded, left if is_consecutive or padded == given else padded), left
    if step.kind == "all_to_all":
        return (left, left if is_consecutive else max(given, left)), left
    return (left,), left


def gradient_layout(layout: Layout) -> Layout:
    """Return the layout in which the gradient of a tensor is due at its producer: whole where the tensor is partial."""
    return tuple(REPLICATE if at == PARTIAL else at for at in layout)
