"""Runs a parallel module under `torch.compile`: pieces of its program without communication are compiled, each as one graph.

Dynamo cannot trace the rest of a step (gathers in flight, reductions that begin in the backward), so the rest runs eagerly.
This module is imported only when a module is compiled, since it needs Dynamo.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..rank.pieces import Piece, pieces

if TYPE_CHECKING:
    from ..rank.execute import Execution
    from .module import ParallelModule
    from .steps import ShapedStep

_REASON = "trainwright communicates between the pieces that are compiled; fullgraph=True is not possible"


@torch.compiler.disable(recursive=False, reason=_REASON)
def forward(module: ParallelModule, args: Any, kwargs: Any) -> Any:
    """Run the rank's part of the step, its pieces compiled by the backend with which the module was compiled."""
    step, run = _begin(module, args, kwargs)
    # What has a frame of its own would be compiled too: pieces are meant to be, all else is kept from it.
    for piece in step.executor.pieces:
        if piece.__class__ is Piece:
            made = piece.graph.forward(*map(run.env.__getitem__, piece.inputs))
            _take(step, run, piece, made)
        else:
            _one_by_one(step, run, piece)
    return _end(module, step, run)


@torch.compiler.disable
def _begin(module: ParallelModule, args: Any, kwargs: Any) -> tuple[ShapedStep, Execution]:
    step, parts, state = module._begin(args, kwargs)
    if step.executor.pieces is None:
        step.executor.pieces = pieces(step.executor)
    return step, step.executor.begin({**step.sources(state.rest), **parts[0]}, state)


@torch.compiler.disable
def _take(step: ShapedStep, run: Execution, piece: Piece, made: Sequence[Any]) -> None:
    """Store a piece's outputs in the run, and free the values that nothing reads after the piece."""
    run.env.update(zip(piece.outputs, made))
    for index in range(piece.start, piece.stop):
        for value in step.executor.frees[index]:
            run.env.pop(value, None)


@torch.compiler.disable
def _one_by_one(step: ShapedStep, run: Execution, span: range) -> None:
    executor = step.executor
    executor.step(run, executor.local.instructions[span.start].region, span.start, span.stop)


@torch.compiler.disable
def _end(module: ParallelModule, step: ShapedStep, run: Execution) -> Any:
    return module._end(step, step.executor.end(run))
