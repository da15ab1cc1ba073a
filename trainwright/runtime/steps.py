"""Holds one rank's steps, each for global batches of one shape; a module makes one for each shape that it meets.

The step of the planned shape is made with the module. For another shape the model is captured again at the first such batch,
under the plan's decisions. All steps read the same parameters at rest.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts import Plan, UserError
from ..program.decisions import Decisions
from ..program.layout import REPLICATE
from ..program.micro_batches import capture_step
from ..program.other_shapes import decisions_at
from ..program.program import Program
from ..program.program import Tensor as ProgramTensor
from ..program.transition import transition
from ..rank.accumulate import Accumulator
from ..rank.buckets import Plain
from ..rank.execute import Executor
from ..rank.instructions import Ref
from ..rank.local import LocalProgram, build_local
from ..rank.offload import OffloadStore
from ..rank.pipeline import Piece, PipelineRunner
from ..rank.reshard import Route
from ..rank.run_state import RunState
from .batch import Cut, Shapes, checked_part, planned_shapes, rows_in
from .communicator import MeshCommunicator
from .entries import check_within
from .pipe import Pipe
from .sharding import AtRest

MOST_STEPS = 16
"""The most further shapes that are kept; the least recently used one is dropped, and captured anew if it is met again."""


class ShapedStep:
    """The local program for batches of one shape, connected to the module's tensors that it reads.

    cut: how such a batch is cut into micro-batches and over ranks.
    """

    def __init__(
        self, cut: Cut, program: Program, decisions: Decisions, communicator: MeshCommunicator, store: OffloadStore | None,
        device: torch.device, pipe: Pipe | None = None,
    ) -> None:  # fmt: skip
        self.cut, self.program, self.device, self.pipe = cut, program, device, pipe
        stages = [] if pipe is None else pipe.pieces_of(program)
        own = [stage.program for stage in stages] or [program]
        executors = [Executor(build_local(each, decisions, communicator), store) for each in own]
        self.executor = executors[-1]
        self.local: LocalProgram = self.executor.local
        """The local program; of a stage with several pieces, that of the last one; all pieces have the same decisions."""
        self.tensors = tuple(dict.fromkeys(tensor for each in own for tensor in each.tensors))
        """The tensors that the step reads and makes on this rank."""
        self.runner = None if pipe is None else pipe.runner(list(map(Piece, stages, executors)), communicator)
        self.accumulator = Accumulator(self.executor) if program.num_runs > 1 and pipe is None else None
        self._evaluator: Accumulator | PipelineRunner | None = None
        self._travelling = self.local.travelling()
        self._inputs = {tensor.key: tensor for tensor in self.tensors if tensor.role == "input"}
        self._constants = {t: t.value.to(device) for t in self.tensors if t.role == "const"}
        self._params: dict[ProgramTensor, nn.Parameter] = {}
        self._buffers: dict[ProgramTensor, Tensor] = {}

    def read(self, params: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor]) -> None:
        """Connect the step to the module's parameters and buffers, given by the model's names."""
        for tensor in self.tensors:
            if tensor.role == "param":
                self._params[tensor] = params[tensor.key]
            elif tensor.role == "buffer":
                self._buffers[tensor] = buffers[tensor.key]

    def sources(self, rest: Plain) -> dict[ProgramTensor, Tensor]:
        """Return the values that a run reads beside the batch: constants, buffers and parameters."""
        sources: dict[ProgramTensor, Tensor] = dict(self._constants)
        sources.update(self._buffers)
        assert isinstance(rest, AtRest)
        for tensor, param in self._params.items():
            # A bucket takes parameters as they rest: one autograd function for all of them.
            as_it_rests = tensor in self._travelling or self.executor.elsewhere is not None
            sources[tensor] = param if as_it_rests else rest.part(param)  # type: ignore[arg-type]
        return sources

    @property
    def local_params(self) -> dict[int, str]:
        """Return the names, by value index, of the parameters that instructions read as local parts, not through a bucket."""
        found = self.local.sources.items()
        return {index: t.key for t, index in found if t.role == "param" and t not in self._travelling}

    def parts(self, part: Mapping[str, Tensor]) -> list[dict[ProgramTensor, Tensor]]:
        """Return, for each micro-batch, the rank's part of the entries that its stage reads."""
        found: list[dict[ProgramTensor, Tensor]] = [{} for _ in range(self.cut.num_runs)]
        for name, leaf in checked_part(self.cut, part, self.local.communicator.coords):
            if name not in self._inputs:
                continue
            for own, piece in zip(found, self.cut.pieces(name, leaf.to(self.device))):
                own[self._inputs[name]] = piece
        return found

    def trained(self, parts: list[dict[ProgramTensor, Tensor]], state: RunState, sources: Any) -> list[Any]:
        """Run a step of several micro-batches, or a stage's part of it; return the flat outputs, all of them None but the loss."""
        if self.runner is None:
            assert self.accumulator is not None
            return self.accumulator.run(sources, parts, state)
        loss, captured = self.runner.run(sources, parts, state), self.program.captured
        return [loss if place == captured.loss_index else None for place in range(len(self.program.outputs))]

    def evaluated(self, parts: list[dict[ProgramTensor, Tensor]], state: RunState, sources: Any) -> list[Any]:
        """Return the outputs of all micro-batches in evaluation, concatenated to those of one batch, whole on every rank.

        A stage returns those that it computes, and the loss.
        """
        size = rows_in(self.cut.plan, self.cut.shapes) // self.cut.num_runs
        pieces = []
        for found, local in self._evaluated_runs(parts, state, sources):
            whole = [[_whole(local, place, value) for place, value in zip(local.outputs, flat)] for flat in found]
            pieces.append([_joined(values, size) for values in zip(*whole)])
        joined = [next((value for value in values if value is not None), None) for values in zip(*pieces)]
        return joined if self.runner is None else self._with_the_loss(joined)

    def _evaluated_runs(self, parts: Any, state: RunState, sources: Any) -> list[tuple[list[list[Any]], LocalProgram]]:
        """Return, for each piece, the flat outputs of each micro-batch and the local program that made them."""
        if self._evaluator is None:
            self._evaluator = self._made_evaluator()
        if isinstance(self._evaluator, Accumulator):
            return [(self._evaluator.evaluate(sources, parts, state), self._evaluator.local)]
        assert self.pipe is not None
        found = self._evaluator.evaluate(sources, parts, state, self.pipe.forwards(len(parts)))
        return [(flat, piece.local) for flat, piece in zip(found, self._evaluator.pieces)]

    def _made_evaluator(self) -> Accumulator | PipelineRunner:
        def whole(local: LocalProgram) -> Executor:
            return Executor(build_local(local.program, local.decisions, local.communicator, all_outputs=True))

        if self.pipe is None or self.runner is None:
            return Accumulator(whole(self.local))
        communicator = self.local.communicator
        assert isinstance(communicator, MeshCommunicator)
        return self.pipe.runner([Piece(own.stage, whole(own.local)) for own in self.runner.pieces], communicator)

    def _with_the_loss(self, joined: list[Any]) -> list[Any]:
        assert self.runner is not None
        index, program = self.program.captured.loss_index, self.program
        own = joined[index]
        if not isinstance(own, Tensor):
            own = torch.zeros(program.loss.shape, dtype=program.lifted or program.loss.dtype, device=self.device)
        joined[index] = self.runner.link.share(own)
        if self.pipe is not None and self.pipe.shares_outputs:
            made = {str(place): value for place, value in enumerate(joined) if isinstance(value, Tensor)}
            for place, value in self.pipe.merged(made, self.device).items():
                joined[int(place)] = value
        return joined


def _whole(local: LocalProgram, place: Any, value: Any) -> Any:
    if not isinstance(place, Ref) or not isinstance(value, Tensor):
        return value
    held = local.values[place.value]
    replicated = (REPLICATE,) * len(held.layout)
    route = Route(transition(held.layout, replicated), held.tensor.shape, held.tensor.slots, local.communicator)
    return route.run(value)


def _joined(values: Sequence[Any], size: int) -> Any:
    """Return one output of several micro-batches of `size` rows: rows are concatenated, other floating tensors averaged."""
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    if first.dim() and first.shape[0] == size:
        return torch.cat(list(values))
    return torch.stack(list(values)).mean(0) if first.is_floating_point() else first


@dataclass(frozen=True)
class Capturing:
    """The inputs of a capture of a step of another shape: the model without its weights, and the capture's options."""

    model: nn.Module
    loss_fn: Any
    autocast: torch.dtype | None

    def program(self, cut: Cut) -> Program:
        """Return the program of a step on a batch with the given cut."""
        batch, chunks = batch_like(cut.plan, cut.shapes), cut.plan.loss_chunks
        return capture_step(self.model, batch, self.loss_fn, self.autocast, cut.num_runs, loss_chunks=chunks)


class StepsByShape:
    """Holds the steps of a module by the global shapes of the batch, and makes one when the first batch of its shape comes.

    planned: the step of the planned shape. notice: called with a message about each new capture, on every rank.
    """

    def __init__(self, planned: ShapedStep, store: OffloadStore | None) -> None:
        self.planned, self.store = planned, store
        self.capturing: Capturing | None = None
        self.notice: Callable[[str], None] = lambda text: None
        self._further: OrderedDict[tuple[Any, ...], ShapedStep] = OrderedDict()

    def of(self, shapes: Shapes, complete: Callable[[ShapedStep], None]) -> ShapedStep:
        """Return the step for batches of `shapes`; raise `UserError` if they are larger than planned.

        complete: called with a new step, to connect it to the module's tensors. It is not kept: a module that its steps hold
        stays in memory after its last use until Python looks for cycles.
        """
        plan = self.planned.cut.plan
        if shapes == planned_shapes(plan):
            return self.planned
        check_within(plan, shapes)
        key = tuple(shapes[name] for name in plan.batch)
        if key not in self._further:
            self._further[key] = self._made(Cut(plan, shapes), complete)
            while len(self._further) > MOST_STEPS:
                self._further.popitem(last=False)
        self._further.move_to_end(key)
        return self._further[key]

    def _made(self, cut: Cut, complete: Callable[[ShapedStep], None]) -> ShapedStep:
        if self.capturing is None:
            raise UserError(
                "a model that can be copied is needed for batches of other shapes than planned; this one cannot; plan for "
                "each shape, or keep to the planned one"
            )
        began = time.perf_counter()
        planned, entries = self.planned, cut.entries()
        program = self.capturing.program(cut)
        inputs = {name: entry.layout for name, entry in entries.items()}
        decisions = decisions_at(program, planned.program, planned.local.decisions, inputs)
        communicator = planned.local.communicator
        assert isinstance(communicator, MeshCommunicator)
        step = ShapedStep(cut, program, decisions, communicator, self.store, planned.device, planned.pipe)
        complete(step)
        shown = ", ".join(f"{name} {list(shape)}" for name, shape in cut.shapes.items())
        self.notice(
            f"a batch of another shape than planned ({shown}): the model was captured again for it, once, in "
            f"{time.perf_counter() - began:.1f} s"
        )
        return step


def batch_like(plan: Plan, shapes: Mapping[str, Sequence[int]]) -> Any:
    """Return a batch of `shapes` on the meta device, as the model is called."""
    entries: dict[str, Any] = {
        name: torch.empty(tuple(shapes[name]), dtype=getattr(torch, entry.dtype), device="meta")
        for name, entry in plan.batch.items()
    }
    tree: dict[str, Any] = {}
    for name, value in {**entries, **plan.literals}.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return _as_sequences(tree)


def _as_sequences(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    built = {key: _as_sequences(value) for key, value in tree.items()}
    if built and all(key.isdigit() for key in built):
        return tuple(built[key] for key in sorted(built, key=int))
    return built
