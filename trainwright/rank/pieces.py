"""Cuts a local program into straight-line graphs for `torch.compile`, with the other instructions between them.

A piece is a run of consecutive instructions that only compute. All other instructions run uncompiled: collectives,
buckets, ops that draw random numbers, and whole regions whose backward rematerialises something (all regions if
anything is offloaded), since a compiled graph saves what its own partitioner decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from ..program.drawing import needs_state
from .instructions import Compute, Instruction, Ref

if TYPE_CHECKING:
    from .execute import Executor


@dataclass(frozen=True)
class Piece:
    """One graph for the instructions `start` to `stop`, from the values `inputs` to the values `outputs`."""

    start: int
    stop: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    graph: fx.GraphModule

    @cached_property
    def text(self) -> str:
        """Return the graph's code; pieces that compute the same have the same."""
        return self.graph.code


def pieces(executor: Executor) -> list[Piece | range]:
    """Return the program in order: graphs, and ranges of instructions that run one by one."""
    found: list[Piece | range] = []
    for region, start, stop in executor.segments:
        if region in executor.reruns or executor.last_offload >= 0:
            found.append(range(start, stop))
            continue
        found += cut(executor, start, stop)
    return found


def cut(executor: Executor, start: int, stop: int) -> list[Piece | range]:
    """Return the instructions `start` to `stop` as graphs and, where one does more than compute, as ranges of one."""
    found: list[Piece | range] = []
    begin = start
    for index in range(start, stop + 1):
        if index == stop or not _computes(executor.local.instructions[index]):
            if index > begin:
                found.append(_piece(executor, begin, index))
            if index < stop:
                found.append(range(index, index + 1))
            begin = index + 1
    return found


def _computes(instruction: Instruction) -> bool:
    """Tell whether an instruction is a plain op on plain tensors: no collective inside, no state of the run, no effect."""
    match instruction:
        case Compute(op=op, function=function, sampled=None):
            return function is op.node.target and not (op.writes or op.runs_once or needs_state(op))
    return False


def _piece(executor: Executor, start: int, stop: int) -> Piece:
    instructions = [found for found in executor.local.instructions[start:stop] if isinstance(found, Compute)]
    made = {value for instruction in instructions for value in instruction.outputs}
    inputs = tuple(dict.fromkeys(v for i in instructions for v in i.inputs if v not in made))
    dead = {value for index in range(start, stop) for value in executor.frees[index]}
    outputs = tuple(value for value in sorted(made) if value not in dead)
    return Piece(start, stop, inputs, outputs, _graph(instructions, inputs, outputs))


def _graph(instructions: Sequence[Compute], inputs: Sequence[int], outputs: Sequence[int]) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = {value: graph.placeholder(f"v{place}") for place, value in enumerate(inputs)}  # pieces alike read alike

    def filled(tree: Any) -> Any:
        if isinstance(tree, Ref):
            return nodes[tree.value]
        if isinstance(tree, (list, tuple)):
            return [filled(item) for item in tree]
        return {key: filled(item) for key, item in tree.items()} if isinstance(tree, dict) else tree

    for instruction in instructions:
        made = graph.call_function(instruction.function, tuple(filled(instruction.args)), filled(instruction.kwargs))
        for place, value in enumerate(instruction.outputs):
            nodes[value] = graph.call_function(_item, (made, place)) if instruction.gives_several else made
    graph.output([nodes[value] for value in outputs])
    return fx.GraphModule(torch.nn.Module(), graph)


def _item(values: Sequence[Any], place: int) -> Any:
    return values[place]
