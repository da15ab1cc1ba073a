"""Cuts a step into pipeline stages of consecutive regions, each with a program of its own that sends its results on.

A stage begins where a region begins (a block, or what lies between blocks). A result that a later stage reads is
relayed from neighbour to neighbour, so that a stage communicates with the next one and the one before alone. Ops that
need only the batch, buffers and constants (masks, rotary tables, shifted labels) are run again in each stage that reads
them. Tensors, ops, groups, keys and hence decisions stay those of the whole program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from ..artifacts import UserError
from .blocks import Region
from .drawing import needs_state
from .program import Op, Program, Tensor


@dataclass(eq=False)
class Stage:
    """One stage of a step, and its place among the stages.

    `program` has the stage's own tensors, ops and regions; `None` replaces the step's outputs that other stages make.
    """

    index: int
    num_stages: int
    program: Program

    @property
    def given(self) -> list[Tensor]:
        """Return the results that the stage receives from the stage before, in order."""
        return self.program.given

    @property
    def handed(self) -> list[Tensor]:
        """Return the results that the stage sends to the next one, in order; these may include received ones."""
        return self.program.handed

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Return True for the last stage, which computes the loss."""
        return self.index == self.num_stages - 1


def boundaries(program: Program) -> tuple[str, ...]:
    """Return the names at which a stage may begin, in order; the first stage begins with the step.

    A block goes by its path. What lies between blocks, or behind the last one, goes by the path of its first op that no
    stage could run by itself.
    """
    return tuple(boundary_regions(program))


def boundary_regions(program: Program) -> dict[str, Region]:
    """Return the regions at which a stage may begin, by their names in `boundaries`."""
    free = _free_ops(program)
    names = {region: region.path or _first_path(region, free) for region in program.regions[1:]}
    times = Counter(names.values())
    return {name: region for region, name in names.items() if name and times[name] == 1}


def cut(program: Program, begins: Sequence[str]) -> tuple[Stage, ...]:
    """Return the stages of which the second begins at `begins[0]`, the third at `begins[1]` …

    Raises `UserError` for a name that is no boundary, for names out of order, and where the forward writes buffers.
    """
    edges = [0, *(region.index for region in _regions_at(program, begins)), len(program.regions)]
    free = _free_ops(program)
    if writing := next((op for op in program.ops if op.writes), None):
        raise UserError(
            f"a forward that changes no buffer is needed for pipeline stages; {writing.key} writes {writing.writes}; plan "
            "without stages"
        )
    num = len(edges) - 1
    of_region = {region.index: s for s in range(num) for region in program.regions[edges[s] : edges[s + 1]]}
    parts = [_run_by(program, free, of_region, s, s == num - 1) for s in range(num)]
    crossing = _crossing(program, free, of_region, parts)
    return tuple(
        Stage(s, num, _stage_program(program, parts[s], program.regions[edges[s] : edges[s + 1]], *crossing[s : s + 2]))
        for s in range(num)
    )


def tied(stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages read, by name, with those stages, whose gradients have to be summed."""
    found: dict[str, list[int]] = {}
    for stage in stages:
        for tensor in stage.program.params:
            found.setdefault(tensor.key, []).append(stage.index)
    return {name: tuple(readers) for name, readers in found.items() if len(readers) > 1}


def stages_of(readers: Mapping[str, Sequence[int]], num_stages: int) -> dict[str, tuple[int, ...]]:
    """Return, of parameters that several pieces read, those that several of `num_stages` stages read, with the stages.

    A stage has every `num_stages`-th piece.

    >>> stages_of({"wte": (0, 3), "bias": (1, 3)}, 2)
    {'wte': (0, 1)}
    """
    found = {name: tuple(sorted({piece % num_stages for piece in pieces})) for name, pieces in readers.items()}
    return {name: stages for name, stages in found.items() if len(stages) > 1}


def _first_path(region: Region, free: set[Op]) -> str:
    return next((op.path for op in region.ops if op not in free), "")


def _regions_at(program: Program, begins: Sequence[str]) -> list[Region]:
    known = boundary_regions(program)
    for name in begins:
        if name not in known:
            raise UserError(
                f"a block at which a stage can begin is needed; {name!r} is none of this model; try one of {', '.join(known)}"
            )
    found = [known[name] for name in begins]
    if any(later.index <= earlier.index for earlier, later in pairwise(found)):
        raise UserError(
            f"the blocks at which stages begin are needed in the order of the model; got {', '.join(begins)}; sort them"
        )
    return found


def _free_ops(program: Program) -> set[Op]:
    """Return the ops that any stage can run by itself, with the same result."""
    found: set[Op] = set()
    for op in program.ops:
        alone = all(t.producer in found if t.producer is not None else t.role != "param" for t in op.inputs)
        if op.constant or (alone and not op.requires_grad and not needs_state(op) and not op.runs_once):
            found.add(op)
    return found


@dataclass(frozen=True)
class _Part:
    """The ops that a stage runs, which are its own and free ones, and all tensors that they read."""

    ops: set[Op]
    reads: set[Tensor]


def _run_by(program: Program, free: set[Op], of_region: dict[int, int], stage: int, is_last: bool) -> _Part:
    own = {op for op in program.ops if op not in free and _stage_of(op, of_region) == stage}
    ops, reads = set(own), set[Tensor]()
    queue = [tensor for op in own for tensor in op.inputs]
    if is_last:  # what the model returns may be free, as a mask is
        queue += [found for found in program.outputs if isinstance(found, Tensor) and found.producer in free]
    while queue:
        tensor = queue.pop()
        if tensor in reads:
            continue
        reads.add(tensor)
        if tensor.producer in free:
            ops.add(tensor.producer)
            queue += tensor.producer.inputs
    if is_last:
        reads.add(program.loss)
    if stage == 0:  # what nobody reads is somebody's all the same: a weight is saved
        reads |= {tensor for tensor in program.tensors if tensor.producer is None and not tensor.consumers}
    return _Part(ops, reads)


def _stage_of(op: Op, of_region: dict[int, int]) -> int:
    assert op.region is not None, "constants are free"
    return of_region[op.region.index]


def _crossing(program: Program, free: set[Op], of_region: dict[int, int], parts: Sequence[_Part]) -> list[list[Tensor]]:
    """Return the results that enter each stage, then an empty list for those that leave the last stage."""
    crossing: list[list[Tensor]] = [[] for _ in range(len(parts) + 1)]
    for tensor in program.tensors:
        if tensor.producer is None or tensor.producer in free:
            continue
        made = _stage_of(tensor.producer, of_region)
        last = max((s for s, part in enumerate(parts) if tensor in part.reads), default=-1)
        for s in range(made + 1, last + 1):
            crossing[s].append(tensor)
    return crossing


def _stage_program(
    program: Program, part: _Part, regions: list[Region], given: list[Tensor], handed: list[Tensor]
) -> Program:
    ops = [op for op in program.ops if op in part.ops]
    made = {tensor for op in ops for tensor in op.outputs}
    there = made | part.reads | set(given)
    outputs: list[Any] = [
        found if not isinstance(found, Tensor) or found in made or (found is program.loss and found in there) else None
        for found in program.outputs
    ]
    tensors = [tensor for tensor in program.tensors if tensor in there]
    return replace(program, tensors=tensors, ops=ops, regions=regions, outputs=outputs, given=given, handed=handed)
