"""Finds the entries of a plan that have no effect: values that the backward never reads, copies that nobody makes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...artifacts import Plan
from ...program.layout import Layout
from ...program.plan_text import entries_of, param_classes, span
from ...program.program import Program, Tensor
from ...rank.execute import Executor
from ...rank.instructions import Compute
from ...rank.local import LocalProgram

NO_EFFECT = "these entries have no effect"
_MOST_NAMED = 6


def without_effect(plan: Plan, program: Program, executors: Sequence[Executor]) -> tuple[str, ...]:
    """Return a note that lists the entries of `plan` without effect; `executors` have run the simulated step, of all stages."""
    idle = [*_idle_values(plan, program, executors), *_idle_copies(program, executors)]
    decisions = executors[0].local.decisions
    if plan.offload is not None and not decisions.offloaded and not plan.offloads_states:
        idle.append("offload, since nothing is offloaded")
    if not idle:
        return ()
    more = f" and {len(idle) - _MOST_NAMED} more" if len(idle) > _MOST_NAMED else ""
    return (f"{NO_EFFECT}: {'; '.join(idle[:_MOST_NAMED])}{more}",)


def _idle_values(plan: Plan, program: Program, executors: Sequence[Executor]) -> Iterator[str]:
    recomputed, offloaded = (set().union(*map(each, executors)) for each in (_recomputed, _offloaded))
    for entry in entries_of(program, plan):
        if not entry.keys & (recomputed if entry.fate == "recomputed" else offloaded):
            yield f"{entry.key} {entry.fate} {entry.name}"


def _recomputed(executor: Executor) -> set[str]:
    """Return the keys of values that were released in the forward, and of values that reruns make on the way to one."""
    local = executor.local
    found = {local.values[value].key for value, place in executor.released if place < 0}
    found |= {f"{local.instructions[index].key}.internal" for index, place in executor.released if place >= 0}
    for rerun in executor.reruns.values():
        for index in rerun.instructions:
            made = (value for value in local.instructions[index].again.inputs if value not in rerun.sources)
            found |= {local.values[value].key for value in made}
    return found


def _offloaded(executor: Executor) -> set[str]:
    """Return the keys of the values that are marked for offloading."""
    local = executor.local
    return {value.key for value in local.values if value.offloaded} | {
        f"{instruction.key}.internal"
        for instruction in local.instructions
        if isinstance(instruction, Compute) and instruction.internal_offloaded
    }


def _idle_copies(program: Program, executors: Sequence[Executor]) -> Iterator[str]:
    """Yield the entries with a shared layout in which no parameter of theirs is read by several regions."""
    found = executors[0].local.decisions.shared
    for tied in param_classes(program):
        for layout in sorted({layout for tensor, layout in found if tensor in tied}):
            if all(len(_readers(each.local, tensor, layout)) < 2 for each in executors for tensor in tied):
                yield f"{span([tensor.key for tensor in tied])} shared"


def _readers(local: LocalProgram, tensor: Tensor, layout: Layout) -> set[int]:
    """Return the regions that compute with `tensor` in `layout`."""
    return {
        instruction.region
        for instruction in local.instructions
        for value in instruction.inputs
        if isinstance(instruction, Compute)
        and local.values[value].tensor is tensor
        and local.values[value].layout == layout
    }
