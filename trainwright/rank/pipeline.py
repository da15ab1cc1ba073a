"""Runs one rank's stage of a pipeline by its actions: forwards, backwards and transfers.

A stage has one piece of the model, or several if stages are interleaved. The micro-batches of a piece share what the
micro-batches of a step without stages share (`accumulate`). In each micro-batch's graph, tensors received from the previous
piece are leaves, and tensors sent to the next one are roots. A tensor crosses in the layout in which its op leaves it, from each
rank to the rank at the same place of the other stage. Actions free memory, not the completion of transfers, so that a
simulation on fake tensors over `NoLink` holds what a rank holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..program.layout import local_shape
from ..program.program import Tensor as ProgramTensor
from ..program.stages import Stage
from ..torch_internals.dtypes import in_precision
from .accumulate import Accumulator, Observer, OpenStep, Sources, handed_over
from .execute import Executor
from .run_state import RunState
from .split_backward import LaterGradients, take_apart
from .stage_actions import Action, What


class Link(Protocol):
    """Moves tensors between stages, and hears what they compute meanwhile."""

    def computing(self, action: Action) -> AbstractContextManager[None]:
        """Say that a forward, a backward or gradients of weights are computed inside the block."""
        ...

    def post(self, action: Action, tensors: Sequence[Tensor]) -> Any:
        """Issue the receives into `tensors`; return the handle that `wait` takes."""
        ...

    def send(self, action: Action, tensors: Sequence[Tensor]) -> Any:
        """Issue the sends of `tensors`; return the handle that `wait` takes."""
        ...

    def wait(self, action: Action, tensors: Sequence[Tensor], works: Any) -> None:
        """Wait until a transfer is complete."""
        ...

    def add_up(self, parameter: str, gradient: Tensor) -> None:
        """Sum the gradient of a tied parameter, in place, over the stages that read it."""
        ...

    def share(self, value: Tensor) -> Tensor:
        """Return the last stage's `value`."""
        ...


class NoLink:
    """A `Link` that moves nothing, for simulations, in which every transfer is complete at once."""

    def computing(self, action: Action) -> AbstractContextManager[None]:
        """Do nothing."""
        return nullcontext()

    def post(self, action: Action, tensors: Sequence[Tensor]) -> Any:
        """Do nothing."""

    def send(self, action: Action, tensors: Sequence[Tensor]) -> Any:
        """Do nothing."""

    def wait(self, action: Action, tensors: Sequence[Tensor], works: Any) -> None:
        """Do nothing."""

    def add_up(self, parameter: str, gradient: Tensor) -> None:
        """Do nothing."""

    def share(self, value: Tensor) -> Tensor:
        """Return `value`."""
        return value


class Piece:
    """A piece of the model that a stage runs, with its executor and the shapes that cross its boundaries."""

    def __init__(self, stage: Stage, executor: Executor) -> None:
        self.stage, self.executor = stage, executor
        self.accumulator = Accumulator(executor)
        self.local = executor.local
        self.num_outputs = len(self.local.outputs) - len(stage.handed)
        places = [found.value for found in self.local.outputs[self.num_outputs :]]
        handed = [self._part_of(tensor, value) for tensor, value in zip(stage.handed, places)]
        self.given = [self._part_of(tensor, self.local.sources[tensor]) for tensor in stage.given]
        """The shape and dtype of this rank's part of each tensor that the piece receives."""
        self.returned = [part for part, tensor in zip(handed, stage.handed) if tensor.requires_grad]
        """The shape and dtype of this rank's part of each gradient that the piece receives back."""

    def _part_of(self, tensor: ProgramTensor, value: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of this rank's part of a tensor, in the layout of `value`."""
        layout, communicator = self.local.values[value].layout, self.local.communicator
        shape = local_shape(tensor.shape, tensor.slots, layout, communicator.mesh, communicator.coords)
        lifted = self.stage.program.lifted
        return shape, tensor.dtype if lifted is None else in_precision(tensor.dtype, lifted)


class PipelineRunner:
    """Runs one rank's stage by its actions.

    pieces: the stage's pieces, in order. actions: those of a step with as many micro-batches as `run` gets. tied: the parameters
    that other stages read too, so that their gradients are summed over stages.
    """

    def __init__(
        self, pieces: Sequence[Piece], actions: Sequence[Action], link: Link, tied: Sequence[str] = ()
    ) -> None:
        self.pieces, self.actions, self.link, self.tied = list(pieces), actions, link, tied
        self.splits_backward = any(action.kind == "weight" for action in actions)
        if self.splits_backward:
            for piece in self.pieces:
                take_apart(piece.executor)

    def run(
        self,
        sources: Sources,
        parts: Sequence[Sources],
        state: RunState,
        observer: Observer | None = None,
        after_action: Callable[[Action], None] = lambda action: None,
    ) -> Tensor:
        """Return the loss of a whole step, the same on every stage; its backward gives this stage's gradients.

        parts: the rank's part of the batch entries, for each micro-batch. observer: told of each forward and backward.
        after_action: called after each action.
        """
        params = [t for t in sources if t.role == "param" and t.requires_grad and sources[t].requires_grad]
        work = _Step(self, sources, params, parts, state, self.actions, observer, after_action)
        # The loss of a stage that trains nothing can be differentiated all the same.
        anchor = [] if params else [torch.zeros((), requires_grad=True)]
        return handed_over(work, [*(sources[tensor] for tensor in params), *anchor])

    def evaluate(
        self, sources: Sources, parts: Sequence[Sources], state: RunState, actions: Sequence[Action]
    ) -> list[list[list[Any]]]:
        """Return, for each piece, the flat outputs of each micro-batch; `actions` are forwards and their transfers."""
        with torch.no_grad():
            work = _Step(self, sources, [], parts, state, actions, trains=False)
            work.carry_out()
        return [work.outputs[place] for place in range(len(self.pieces))]


_Place = tuple[What, int, int]
"""Identifies a transfer as a piece sees it: activation or gradient, the micro-batch, and the piece."""
_Micro = tuple[int, int]
"""A micro-batch, and the piece that runs it."""


@dataclass(eq=False)
class _Step:
    """One step of a stage, with the tensors of the micro-batches in flight."""

    runner: PipelineRunner
    sources: Sources
    params: list[ProgramTensor]
    parts: Sequence[Sources]
    state: RunState
    actions: Sequence[Action]
    observer: Observer | None = None
    after_action: Callable[[Action], None] = lambda action: None
    trains: bool = True
    given: dict[_Micro, list[Tensor]] = field(default_factory=dict)
    roots: dict[_Micro, list[Any]] = field(default_factory=dict)
    """The tensors or edges at which each pending backward begins; see `_roots`."""
    later: dict[_Micro, LaterGradients] = field(default_factory=dict)
    """The weight gradients that are still to be computed, if the backward is split."""
    arriving: dict[_Place, tuple[list[Tensor], Any]] = field(default_factory=dict)
    arrived: dict[_Place, list[Tensor]] = field(default_factory=dict)
    made: dict[_Place, list[Tensor]] = field(default_factory=dict)
    leaving: dict[_Place, tuple[list[Tensor], Any]] = field(default_factory=dict)
    outputs: dict[int, list[list[Any]]] = field(default_factory=lambda: defaultdict(list))
    """The flat outputs of each micro-batch of an evaluation, by piece."""
    total: Tensor | None = None

    def run(self) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss, and the gradient of each of `params`."""
        link = self.runner.link
        found = self._gradients(self.carry_out())
        for tensor in self.params:
            if tensor.key in self.runner.tied:
                own = found.get(tensor)
                found[tensor] = own = torch.zeros_like(self.sources[tensor]) if own is None else own
                link.add_up(tensor.key, own)
        return link.share(self._loss()), [found.get(tensor) for tensor in self.params] or [None]

    def _gradients(self, steps: list[OpenStep]) -> dict[ProgramTensor, Tensor]:
        """Return each parameter's gradient, summed over the pieces that read it."""
        found: dict[ProgramTensor, Tensor] = {}
        for step in steps:
            for tensor, own in zip(step.leaves, step.gradients()):
                if own is not None:
                    found[tensor] = found[tensor].add_(own) if tensor in found else own
        return found

    def carry_out(self) -> list[OpenStep]:
        """Run all actions; return the open step of each piece, which holds its gradients."""
        steps = []
        for piece in self.runner.pieces:
            own = [tensor for tensor in self.params if tensor in piece.local.sources]
            steps.append(piece.accumulator.open(self.sources, own, self.parts, self.state, self.observer))
        for action in self.actions:
            match action.kind:
                case "post":
                    self._post(action)
                case "take":
                    self._take(action)
                case "send":
                    self._send(action)
                case "sent":
                    self._sent(action)
                case _:
                    with self.runner.link.computing(action):
                        self._compute(action, steps[action.chunk])
            self.after_action(action)
        return steps

    @property
    def _device(self) -> torch.device:
        return next((value.device for value in self.sources.values()), torch.device("cpu"))

    def _loss(self) -> Tensor:
        """Return the loss on the last stage, and a zero of its shape on the others."""
        if self.total is not None:
            return self.total
        program = self.runner.pieces[-1].stage.program
        return torch.zeros(program.loss.shape, dtype=program.lifted or program.loss.dtype, device=self._device)

    # Transfers

    def _place(self, action: Action) -> _Place:
        """Return the transfer's key for this stage: with the piece that sends the activation, or with the one that receives it."""
        is_below = action.stage == action.lower or not action.wraps
        return action.what, action.micro, action.chunk if is_below else action.chunk + 1

    def _post(self, action: Action) -> None:
        place = self._place(action)
        piece = self.runner.pieces[place[2]]
        parts = piece.given if action.what == "activation" else piece.returned
        buffers = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in parts]
        self.arriving[place] = buffers, self.runner.link.post(action, buffers)

    def _take(self, action: Action) -> None:
        buffers, works = self.arriving.pop(self._place(action))
        self.runner.link.wait(action, buffers, works)
        self.arrived[self._place(action)] = buffers

    def _send(self, action: Action) -> None:
        tensors = self.made.pop(self._place(action))
        self.leaving[self._place(action)] = tensors, self.runner.link.send(action, tensors)

    def _sent(self, action: Action) -> None:
        tensors, works = self.leaving.pop(self._place(action))
        self.runner.link.wait(action, tensors, works)

    # Computations

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.observer is None else self.observer.phase(name)

    def _compute(self, action: Action, step: OpenStep) -> None:
        match action.kind:
            case "forward":
                self._forward(step, action.micro, action.chunk)
            case "backward":
                self._backward(action.micro, action.chunk)
            case "weight":
                self._weight(action.micro, action.chunk)

    def _forward(self, step: OpenStep, micro: int, chunk: int) -> None:
        piece = self.runner.pieces[chunk]
        stage, place = piece.stage, (micro, chunk)
        given = self.arrived.pop(("activation", micro, chunk), [])
        for value, tensor in zip(given, stage.given):
            value.requires_grad_(self.trains and tensor.requires_grad)
        if self.trains and self.runner.splits_backward:
            self.later[place] = LaterGradients()
            step = replace(step, state=replace(step.state, later=self.later[place]))
        with torch.set_grad_enabled(self.trains), self._phase("forward"):
            flat = step.forward(micro, {**self.parts[micro], **dict(zip(stage.given, given))})
            if self.trains:
                self.given[place], self.roots[place] = given, self._roots(piece, flat)
            else:
                self.outputs[chunk].append(flat[: piece.num_outputs])
            if stage.handed:
                self.made["activation", micro, chunk] = [
                    value.detach().contiguous() for value in flat[piece.num_outputs :]
                ]
            del flat, given
            if self.observer is not None:
                self.observer.mark_forward_end()

    def _roots(self, piece: Piece, flat: list[Any]) -> list[Any]:
        """Return the backward's roots: the loss, or gradient edges, which do not keep the sent activations alive."""
        stage = piece.stage
        if not stage.is_last:
            handed = zip(stage.handed, flat[piece.num_outputs :])
            return [get_gradient_edge(value) for tensor, value in handed if tensor.requires_grad]
        loss = flat[stage.program.captured.loss_index]
        share = loss.detach() / stage.program.num_runs
        self.total = share if self.total is None else self.total + share
        return [loss] if loss.requires_grad else []

    def _backward(self, micro: int, chunk: int) -> None:
        roots, stage = self.roots.pop((micro, chunk)), self.runner.pieces[chunk].stage
        grads = self.arrived.pop(("gradient", micro, chunk), None)
        with self._phase("backward"):
            if roots:
                seeds = (
                    [torch.full_like(loss, 1 / stage.program.num_runs) for loss in roots] if stage.is_last else grads
                )
                torch.autograd.backward(roots, seeds)
                del seeds
        del roots, grads
        returned = []
        for value, tensor in zip(self.given.pop((micro, chunk)), stage.given):
            if tensor.requires_grad:
                returned.append(torch.zeros_like(value) if value.grad is None else value.grad.contiguous())
                value.grad = None
        if not stage.is_first:
            self.made["gradient", micro, chunk] = returned

    def _weight(self, micro: int, chunk: int) -> None:
        later = self.later.pop((micro, chunk))
        with self._phase("backward"):
            later.make()
