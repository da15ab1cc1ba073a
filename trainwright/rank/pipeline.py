"""Runs one rank's stage of a pipeline by its actions: forwards, backwards and transfers.

Gradients accumulate as in a step of several runs (`accumulate`). Tensors from the stage before are leaves of a
micro-batch's graph, tensors for the next stage are roots of it. They cross in the layout in which they are made, from
each rank to the rank at the same place in the other stage. Actions release memory, never the end of a transfer, so a
simulation on fake tensors over `NoLink` holds what a rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from ..program.layout import local_shape
from ..program.program import Tensor as ProgramTensor
from ..program.stages import Stage
from .accumulate import Accumulator, Observer, OpenStep, Sources, handed_over
from .execute import Executor
from .run_state import RunState
from .stage_actions import Action, What


class Link(Protocol):
    """Moves tensors between stages."""

    def post(self, action: Action, tensors: Sequence[Tensor]) -> Any:
        """Begin to receive into `tensors`; return the handle that `wait` takes."""
        ...

    def send(self, action: Action, tensors: Sequence[Tensor]) -> Any:
        """Begin to send `tensors`; return the handle that `wait` takes."""
        ...

    def wait(self, action: Action, tensors: Sequence[Tensor], works: Any) -> None:
        """Wait until a transfer is done."""
        ...

    def add_up(self, parameter: str, gradient: Tensor) -> None:
        """Sum the gradient of a tied parameter, in place, over the stages that read it."""
        ...

    def share(self, value: Tensor) -> Tensor:
        """Return the last stage's `value`."""
        ...


class NoLink:
    """Moves nothing; for simulations, in which every transfer is done at once."""

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


class PipelineRunner:
    """Runs one rank's stage.

    actions: those of a training step with as many micro-batches as `run` is given. tied: the parameters whose gradients
    other stages add to.
    """

    def __init__(
        self, stage: Stage, executor: Executor, actions: Sequence[Action], link: Link, tied: Sequence[str] = ()
    ) -> None:
        self.stage, self.actions, self.link, self.tied = stage, actions, link, tied
        self.accumulator = Accumulator(executor)
        self.local = executor.local
        self.num_outputs = len(self.local.outputs) - len(stage.handed)
        places = [found.value for found in self.local.outputs[self.num_outputs :]]
        handed = [self.part_of(tensor, value) for tensor, value in zip(stage.handed, places)]
        self.given = [self.part_of(tensor, self.local.sources[tensor]) for tensor in stage.given]
        """The shape and dtype of this rank's part of each tensor that the stage receives."""
        self.returned = [part for part, tensor in zip(handed, stage.handed) if tensor.requires_grad]
        """The shape and dtype of this rank's part of each gradient that comes back."""

    def part_of(self, tensor: ProgramTensor, value: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and dtype of this rank's part of a tensor, in the layout of `value`."""
        layout, communicator = self.local.values[value].layout, self.local.communicator
        shape = local_shape(tensor.shape, tensor.slots, layout, communicator.mesh, communicator.coords)
        lifted = self.stage.program.lifted if tensor.dtype.is_floating_point else None
        return shape, lifted or tensor.dtype

    def run(
        self,
        sources: Sources,
        parts: Sequence[Sources],
        state: RunState,
        observer: Observer | None = None,
        after_action: Callable[[Action], None] = lambda action: None,
    ) -> Tensor:
        """Return the loss of a whole step, the same on every stage; its backward gives this stage's gradients.

        parts: the batch entries of each micro-batch, of the rank's part. observer: told of each forward and backward.
        after_action: called after each action.
        """
        params = [t for t in sources if t.role == "param" and t.requires_grad and sources[t].requires_grad]
        work = _Step(self, sources, params, parts, state, self.actions, observer, after_action)
        # The loss of a stage that trains nothing can be differentiated all the same.
        anchor = [] if params else [torch.zeros((), requires_grad=True)]
        return handed_over(work, [*(sources[tensor] for tensor in params), *anchor])

    def evaluate(
        self, sources: Sources, parts: Sequence[Sources], state: RunState, actions: Sequence[Action]
    ) -> list[list[Any]]:
        """Return this stage's flat outputs for each micro-batch; `actions` are forwards and their transfers."""
        with torch.no_grad():
            work = _Step(self, sources, [], parts, state, actions, trains=False)
            work.carry_out()
        return work.outputs


_Place = tuple[What, int]
"""Identifies a transfer: activation or gradient, and the index of the micro-batch."""


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
    given: dict[int, list[Tensor]] = field(default_factory=dict)
    roots: dict[int, list[Any]] = field(default_factory=dict)
    """The tensors or edges at which each pending backward begins, by micro-batch; see `_roots`."""
    arriving: dict[_Place, tuple[list[Tensor], Any]] = field(default_factory=dict)
    arrived: dict[_Place, list[Tensor]] = field(default_factory=dict)
    made: dict[_Place, list[Tensor]] = field(default_factory=dict)
    leaving: dict[_Place, tuple[list[Tensor], Any]] = field(default_factory=dict)
    outputs: list[list[Any]] = field(default_factory=list)
    """The flat outputs of each micro-batch of an evaluation."""
    total: Tensor | None = None

    def run(self) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss, and the gradient of each of `params`."""
        link = self.runner.link
        step = self.carry_out()
        gradients = step.gradients()
        for place, (tensor, leaf) in enumerate(step.leaves.items()):
            if tensor.key in self.runner.tied:
                own = gradients[place]
                gradients[place] = own = torch.zeros_like(leaf) if own is None else own
                link.add_up(tensor.key, own)
        return link.share(self._loss()), gradients or [None]

    def carry_out(self) -> OpenStep:
        """Carry out all actions."""
        step = self.runner.accumulator.open(self.sources, self.params, self.parts, self.state, self.observer)
        for action in self.actions:
            match action.kind:
                case "post":
                    self._post(action)
                case "take":
                    self._take(action)
                case "forward":
                    self._forward(step, action.micro)
                case "backward":
                    self._backward(action.micro)
                case "send":
                    self._send(action)
                case "sent":
                    self._sent(action)
            self.after_action(action)
        return step

    @property
    def _device(self) -> torch.device:
        return next((value.device for value in self.sources.values()), torch.device("cpu"))

    def _loss(self) -> Tensor:
        """Return the loss where it is computed; elsewhere a zero of its shape."""
        if self.total is not None:
            return self.total
        program = self.runner.stage.program
        return torch.zeros(program.loss.shape, dtype=program.lifted or program.loss.dtype, device=self._device)

    # Transfers

    def _post(self, action: Action) -> None:
        parts = self.runner.given if action.what == "activation" else self.runner.returned
        buffers = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in parts]
        self.arriving[action.what, action.micro] = buffers, self.runner.link.post(action, buffers)

    def _take(self, action: Action) -> None:
        buffers, works = self.arriving.pop((action.what, action.micro))
        self.runner.link.wait(action, buffers, works)
        self.arrived[action.what, action.micro] = buffers

    def _send(self, action: Action) -> None:
        tensors = self.made.pop((action.what, action.micro))
        self.leaving[action.what, action.micro] = tensors, self.runner.link.send(action, tensors)

    def _sent(self, action: Action) -> None:
        tensors, works = self.leaving.pop((action.what, action.micro))
        self.runner.link.wait(action, tensors, works)

    # Computations

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.observer is None else self.observer.phase(name)

    def _forward(self, step: OpenStep, micro: int) -> None:
        stage = self.runner.stage
        given = self.arrived.pop(("activation", micro), [])
        for value, tensor in zip(given, stage.given):
            value.requires_grad_(self.trains and tensor.requires_grad)
        with torch.set_grad_enabled(self.trains), self._phase("forward"):
            flat = step.forward(micro, {**self.parts[micro], **dict(zip(stage.given, given))})
            if self.trains:
                self.given[micro], self.roots[micro] = given, self._roots(flat)
            else:
                self.outputs.append(flat[: self.runner.num_outputs])
            if stage.handed:
                self.made["activation", micro] = [
                    value.detach().contiguous() for value in flat[self.runner.num_outputs :]
                ]
            del flat, given
            if self.observer is not None:
                self.observer.mark_forward_end()

    def _roots(self, flat: list[Any]) -> list[Any]:
        """Return the backward's roots: the loss, or gradient edges, which do not keep the sent activations alive."""
        stage = self.runner.stage
        if not stage.is_last:
            handed = zip(stage.handed, flat[self.runner.num_outputs :])
            return [get_gradient_edge(value) for tensor, value in handed if tensor.requires_grad]
        loss = flat[stage.program.captured.loss_index]
        share = loss.detach() / stage.program.num_runs
        self.total = share if self.total is None else self.total + share
        return [loss] if loss.requires_grad else []

    def _backward(self, micro: int) -> None:
        roots, stage = self.roots.pop(micro), self.runner.stage
        grads = self.arrived.pop(("gradient", micro), None)
        with self._phase("backward"):
            if roots:
                seeds = (
                    [torch.full_like(loss, 1 / stage.program.num_runs) for loss in roots] if stage.is_last else grads
                )
                torch.autograd.backward(roots, seeds)
                del seeds
        del roots, grads
        returned = []
        for value, tensor in zip(self.given.pop(micro), stage.given):
            if tensor.requires_grad:
                returned.append(torch.zeros_like(value) if value.grad is None else value.grad.contiguous())
                value.grad = None
        if not stage.is_first:
            self.made["gradient", micro] = returned
