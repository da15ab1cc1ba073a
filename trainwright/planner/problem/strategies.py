"""Lists the options of every decision: the loops that a group may split, and a parameter's layouts at rest.

Three kinds are pruned before the solver sees them: a loop shorter than the axis (unless it is the batch), minor factors
where the major one is long enough, and for matmuls and attention every option that leaves an axis idle.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ...profiler.saved import Records
from ...program.factors import Factor, leaves
from ...program.groups import Group, Split
from ...program.layout import REPLICATE, Layout
from ...program.program import Program, Tensor


def batch_factor(program: Program) -> Factor | None:
    """Return the factor over samples: the factor of the batch's tensors that most of the program's ops can split.

    Of several that as many ops can split, it is the leading one; None where no op splits any.
    """
    found: dict[int, Factor] = {}
    rank: dict[int, int] = {}
    for tensor in program.inputs:
        for dim, factors in enumerate(tensor.dims):
            for factor in leaves(factors):
                found[id(factor)] = factor
                rank[id(factor)] = min(dim, rank.get(id(factor), dim))
    counts: Counter[int] = Counter()
    for region_class in program.classes:
        for group in region_class.groups:
            own = {id(factor) for factor in splittable_factors(group).values()}
            counts.update({key: len(group.ops) * region_class.multiplicity for key in own & set(found)})
    if not counts:
        return None
    return found[max(counts, key=lambda key: (counts[key], -rank[key]))]


def splittable_factors(group: Group) -> dict[int, Factor]:
    """Return, for each loop of `group` that may be split, the factor that it runs over."""
    factors: dict[int, Factor] = {}
    by_position = {op.position: op for op in group.ops}
    for (position, name, part), index in group.loop_at.items():
        if not group.loops[index].whole:
            factors[index] = leaves(by_position[position].loops[name])[part]
    return factors


def batch_loop(group: Group, factor: Factor | None) -> int:
    """Return the index of the group's loop over the samples; -1 where it has none."""
    return next((index for index, own in splittable_factors(group).items() if own is factor), -1)


def token_loops(group: Group, program: Program) -> set[int]:
    """Return the group's loops over samples, positions or whatever else the dims of the batch's tensors are."""
    tokens = {id(factor) for tensor in program.inputs for dim in tensor.dims for factor in leaves(dim)}
    return {index for index, factor in splittable_factors(group).items() if id(factor) in tokens}


def is_busy(group: Group, records: Records) -> bool:
    """Tell whether the group multiplies matrices, convolves or attends."""
    return any(call.flops for op in group.ops for call in records[op].forward)


def group_options(group: Group, records: Records, mesh: Sequence[int], samples: Factor | None) -> list[Split]:
    """Return the splits of `group` that the solver may choose from."""
    batch = batch_loop(group, samples)
    per_axis = [_loops_for(group, size, batch) for size in mesh]
    busy = is_busy(group, records)
    columns = [[*loops] if busy and loops else [-1, *loops] for loops in per_axis]
    options = [split for split in itertools.product(*columns) if _fits(group, split, mesh, batch)]
    if not options:
        columns = [[-1, *loops] for loops in per_axis]
        options = [split for split in itertools.product(*columns) if _fits(group, split, mesh, batch)]
    data_parallel = tuple(batch if size > 1 else -1 for size in mesh)
    return options if data_parallel in options else [*options, data_parallel]


def _loops_for(group: Group, axis_size: int, batch: int) -> list[int]:
    """Return the loops worth splitting over an axis: for each loop of an op, its first factor that is long enough."""
    if axis_size == 1:
        return []
    chosen: list[int] = []
    covered: set[tuple[int, str]] = set()
    for (position, name, _), index in sorted(group.loop_at.items(), key=lambda item: item[0]):
        loop = group.loops[index]
        if loop.whole or (position, name) in covered:
            continue
        if loop.size >= axis_size or (index == batch and loop.size > 1):
            covered.add((position, name))
            if index not in chosen:
                chosen.append(index)
    return chosen + [index for index, both in group.pairs.items() if set(both) <= set(chosen)]


def _fits(group: Group, split: Split, mesh: Sequence[int], batch: int) -> bool:
    """Return True if every loop is long enough for all axes that split it, and at most one axis exchanges rows."""
    used = set(itertools.chain.from_iterable(group.pairs.get(loop, (loop,)) for loop in split))
    for index in used - {-1, batch}:
        if group.loops[index].size < math.prod(mesh[axis] for axis in group.axes_of(index, split)):
            return False
    return len(group.pair_axes(split)) <= 1


def param_options(tensor: Tensor, wanted: Iterable[Layout], mesh: Sequence[int]) -> list[Layout]:
    """Return the layouts at rest that the solver may choose from.

    Per axis: replicated, as some strategy computes with it, or cut along the leading dim that is long enough (ZeRO).
    """
    columns = []
    for axis, size in enumerate(mesh):
        entries = {REPLICATE}
        if size > 1:
            entries |= {layout[axis] for layout in wanted if layout[axis] >= 0}
            entries |= set(_zero_slots(tensor, size)[:1])
            entries |= set(_zero_slots(tensor, math.prod(mesh))[:1])
        columns.append(sorted(entries))
    options = [layout for layout in itertools.product(*columns) if _holds(tensor, layout, mesh)]
    return options


def _zero_slots(tensor: Tensor, size: int) -> list[int]:
    """Return the slots that `size` ranks can split, evenly divisible ones first, then by position."""
    fit = [index for index, slot in enumerate(tensor.slots) if slot.size >= size and not slot.blocked]
    return sorted(fit, key=lambda index: (tensor.slots[index].size % size != 0, index))


def _holds(tensor: Tensor, layout: Layout, mesh: Sequence[int]) -> bool:
    for slot in {at for at in layout if at >= 0}:
        if tensor.slots[slot].size < math.prod(mesh[axis] for axis, at in enumerate(layout) if at == slot):
            return False
    return True
