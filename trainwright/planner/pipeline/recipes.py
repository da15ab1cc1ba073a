"""Gives the textbook ways to cut stages, as candidates of the search and rows of a comparison.

even          equally many blocks on each stage; what stands before the first block and after the last is added to its stage
balanced      min max_s t_s without reruns: it ignores memory, and reruns are chosen afterwards to fit the budget
pipeline-dp   min max_s t_s with the reruns that the budget needs, by dynamic programming over where the last stage begins
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from .cuts import Cuts, Judge, depths_of

PIPELINE_RECIPES = ("even", "balanced", "pipeline-dp", "joint")


def recipe_cuts(name: str, judge: Judge) -> Cuts | None:
    """Return the cuts of a recipe; None if there are too few blocks or no cuts that fit."""
    if name == "even":
        return even(judge)
    if name == "balanced":
        return balanced(judge, lambda first, stop, stage: 0.0)
    if judge.table.virtual > 1:
        return None  # which reruns a piece takes depends on the other pieces of its stage
    depth = depths_of(judge.table)[0]

    def extra_s(first: int, stop: int, stage: int) -> float:
        return judge.table.extra_s(((first, stop),), (depth[stage],), judge.budget_bytes)

    return balanced(judge, extra_s)


def even(judge: Judge) -> Cuts | None:
    """Return cuts with equally many blocks on each stage; the first stages have one more if the number does not divide.

    Blocks are the units of kinds that occur more than once.
    """
    table = judge.table
    num = Counter(unit.kind for unit in table.units)
    blocks = [at for at, unit in enumerate(table.units) if num[unit.kind] > 1] or list(range(len(table.units)))
    if len(blocks) < table.num_pieces:
        return None
    size, more = divmod(len(blocks), table.num_pieces)
    firsts = [stage * size + min(stage, more) for stage in range(1, table.num_pieces)]
    return tuple(blocks[first] for first in firsts)


def balanced(judge: Judge, extra_s: Callable[[int, int, int], float]) -> Cuts | None:
    """Return the cuts that minimise the seconds of a micro-batch on the slowest stage; of equal ones, the first in order."""
    table = judge.table
    num = len(table.units)
    before = [0.0]
    for unit in table.units:
        before.append(before[-1] + unit.forward_s + unit.backward_s)
    best: dict[int, tuple[float, Cuts]] = {0: (0.0, ())}
    for stage in range(table.num_pieces):
        left = table.num_pieces - 1 - stage
        found: dict[int, tuple[float, Cuts]] = {}
        for first, (most, cuts) in best.items():
            stops = range(first + 1, num - left + 1) if left else [num]
            for stop in stops:
                taken = before[stop] - before[first] + extra_s(first, stop, stage)
                if math.isfinite(taken):
                    row = max(most, taken), (*cuts, stop)
                    if stop not in found or row < found[stop]:
                        found[stop] = row
        best = found
    return best[num][1][:-1] if num in best else None
