"""Runs a local program with its blocks compiled by torch, each a graph that keeps its own share for the backward.

A span is a block, or what stands between two: the instructions from the first of one region to the first of the next. It is
compiled as one graph, or as several with what draws random numbers or writes buffers run uncompiled between them; masks of dropout
are drawn before and are inputs of the graph. Spans that read alike share their graphs, so that a model of many equal blocks is
compiled as fast as one of few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..torch_internals import private
from .instructions import Instruction
from .pieces import Piece, cut
from .randomness import mask_of

if TYPE_CHECKING:
    from .execute import Execution, Executor

Graph = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Span:
    """The instructions `start` to `stop` of a local program, cut into graphs and what runs between them."""

    region: int
    start: int
    stop: int
    pieces: tuple[Piece | range, ...]


class Compiled:
    """The spans of an executor's program. Their graphs are compiled when they are first called."""

    def __init__(self, executor: Executor, shares: dict[int, float]) -> None:
        self.executor, self.shares = executor, shares
        self.begins: Callable[[Span], None] | None = None
        """Told of each span before it runs; a simulation measures them."""
        self.ends: Callable[[Span, set[Any]], None] | None = None
        """Told of each span when it has run, with the autograd nodes that made what its graphs return."""
        self._graphs: dict[Any, Graph] = {}

    @cached_property
    def spans(self) -> list[Span]:
        """The program in order."""
        return [
            Span(region, start, stop, tuple(cut(self.executor, start, stop, takes_masks=True)))
            for region, start, stop in bounds(self.executor.local.instructions)
        ]

    def run(self, run: Execution) -> None:
        """Carry out all instructions of a run."""
        for span in self.spans:
            if self.begins is not None:
                self.begins(span)
            nodes: set[Any] = set()
            for piece in span.pieces:
                if isinstance(piece, Piece):
                    inputs = [*[run.env[value] for value in piece.inputs], *self._masks(piece, run)]
                    found = self._graph(span, piece, inputs)(*inputs)
                    del inputs
                    run.env.update(zip(piece.outputs, found))
                    if self.ends is not None:
                        nodes |= {
                            value.grad_fn for value in found if isinstance(value, Tensor) and value.grad_fn is not None
                        }
                    del found
                    self._free(run, piece)
                else:
                    self.executor.step(run, span.region, piece.start, piece.stop)
            if self.ends is not None:
                self.ends(span, nodes)
            del nodes

    def _free(self, run: Execution, piece: Piece) -> None:
        for index in range(piece.start, piece.stop):
            for value in self.executor.frees[index]:
                run.env.pop(value, None)

    def _masks(self, piece: Piece, run: Execution) -> list[Tensor | None]:
        """Draw the masks of a piece's dropout."""
        tensors = (run.env[value] for value in piece.inputs)
        device = next((value.device for value in tensors if isinstance(value, Tensor)), torch.device("cpu"))
        return [mask_of(instruction, self.executor.coords, run.state, device) for instruction in piece.masks]

    def _graph(self, span: Span, piece: Piece, inputs: Sequence[Any]) -> Graph:
        """Return what runs a piece, the same for all pieces that read alike and have inputs alike."""
        share = self.shares.get(span.region, 1.0)
        key = (piece.text, share, *map(_kind, inputs))
        if key not in self._graphs:
            self._graphs[key] = _compiled(piece, share)
        return self._graphs[key]


def bounds(instructions: Sequence[Instruction]) -> list[tuple[int, int, int]]:
    """Return each span as (region, start, stop); instructions of no region belong to the span that they stand in."""
    found: list[tuple[int, int, int]] = []
    for index, instruction in enumerate(instructions):
        region = instruction.region
        if not found or (region >= 0 and found[-1][0] not in (region, -1)):
            found.append((region, index, index + 1))
        else:
            known, start, _ = found[-1]
            found[-1] = (known if known >= 0 else region, start, index + 1)
    return found


def _compiled(piece: Piece, share: float) -> Graph:
    forward = torch.compile(piece.graph.forward, dynamic=False, fullgraph=True)
    if share == 1:
        return forward

    def keeping(*inputs: Any) -> Sequence[Any]:
        with private.keeping(share):  # a call may be the first of its kind, which compiles
            made: Sequence[Any] = forward(*inputs)
        return made

    return keeping


def _kind(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return type(value)
    return value.shape, value.dtype, value.requires_grad
