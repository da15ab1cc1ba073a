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
from .randomness import masked, masks_alone

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
    masks: tuple[Compute, ...] = ()
    """Its ops that are dropout and nothing else; the graph takes their masks, drawn before, after its inputs."""

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


def cut(executor: Executor, start: int, stop: int, takes_masks: bool = False) -> list[Piece | range]:
    """Return the instructions `start` to `stop` as graphs and, where one does more than compute, as ranges of one.

    takes_masks: dropout is part of the graphs, which take its masks; else it runs by itself.
    """
    found: list[Piece | range] = []
    begin = start
    for index in range(start, stop + 1):
        if index == stop or not _computes(executor.local.instructions[index], takes_masks):
            if index > begin:
                found.append(_piece(executor, begin, index))
            if index < stop:
                found.append(range(index, index + 1))
            begin = index + 1
    return found


def _computes(instruction: Instruction, takes_masks: bool) -> bool:
    """Tell whether an instruction is a plain op on plain tensors: no collective inside, no state of the run, no effect."""
    match instruction:
        case Compute(sampled=None) if takes_masks and masks_alone(instruction):
            return True
        case Compute(op=op, function=function, sampled=None):
            return function is op.node.target and not (op.writes or op.runs_once or needs_state(op))
    return False


def _piece(executor: Executor, start: int, stop: int) -> Piece:
    instructions = [found for found in executor.local.instructions[start:stop] if isinstance(found, Compute)]
    made = {value for instruction in instructions for value in instruction.outputs}
    inputs = tuple(dict.fromkeys(v for i in instructions for v in i.inputs if v not in made))
    dead = {value for index in range(start, stop) for value in executor.frees[index]}
    outputs = tuple(value for value in sorted(made) if value not in dead)
    masks = tuple(filter(masks_alone, instructions))
    return Piece(start, stop, inputs, outputs, _graph(instructions, inputs, outputs, masks), masks)


def _graph(
    instructions: Sequence[Compute], inputs: Sequence[int], outputs: Sequence[int], masks: Sequence[Compute]
) -> fx.GraphModule:
    graph = fx.Graph()
    nodes = {value: graph.placeholder(f"v{place}") for place, value in enumerate(inputs)}  # pieces alike read alike
    drawn = {instruction.index: graph.placeholder(f"m{place}") for place, instruction in enumerate(masks)}

    def filled(tree: Any) -> Any:
        if isinstance(tree, Ref):
            return nodes[tree.value]
        if isinstance(tree, (list, tuple)):
            return [filled(item) for item in tree]
        return {key: filled(item) for key, item in tree.items()} if isinstance(tree, dict) else tree

    for instruction in instructions:
        if instruction.index in drawn:
            x, p, _ = instruction.args
            nodes[instruction.outputs[0]] = graph.call_function(masked, (filled(x), drawn[instruction.index], p))
            continue
        made = graph.call_function(instruction.function, tuple(filled(instruction.args)), filled(instruction.kwargs))
        for place, value in enumerate(instruction.outputs):
            nodes[value] = graph.call_function(_item, (made, place)) if instruction.gives_several else made
    graph.output([nodes[value] for value in outputs])
    return fx.GraphModule(torch.nn.Module(), graph)


def _item(values: Sequence[Any], place: int) -> Any:
    return values[place]
