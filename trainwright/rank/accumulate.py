"""Runs a step in several runs, one for each micro-batch; gradients accumulate, and one backward returns them.

    before    values that only the whole batch gives are computed: numbers of labels, means of masks (`corrections`)
    run k     micro-batch k has its forward and backward; its graph is freed before the next run begins
    after     the gradients of replicated parameters are summed over the ranks, once a step

The result is the loss of the whole batch; its backward gives every parameter its gradient, times the incoming one. A
reshard of a parameter that communicates nothing forward (a replicated parameter, read whole) is made once for all runs,
so that its gradient, a partial sum, is reduced once. Parameters that are gathered to be read are gathered in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..artifacts import UserError
from ..ops import find
from ..program.micro_batches import WEIGHTED, WHOLE_MEAN, WHOLE_SUM
from ..program.program import Tensor as ProgramTensor
from .execute import Executor
from .instructions import Compute, Instruction, Ref, Reshard
from .local import LocalProgram, fill_arguments
from .reshard import Route
from .run_state import BoundCall, RunState

Sources = Mapping[ProgramTensor, Tensor]


class Observer(Protocol):
    """Observes the phases and tensors of the runs, as the memory tracker does."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...

    def mark_forward_end(self) -> Any: ...

    def watch(self, tensors: Any, category: str) -> None: ...


@dataclass(frozen=True)
class _Shared:
    """A parameter as the readers of all runs see it: in its layout at rest, with a gradient that is not reduced yet."""

    source: int
    route: Route


def shared_conversions(local: LocalProgram) -> dict[int, int]:
    """Return the parameters' reshards that are made once a step: each value made → the first value that equals it."""
    found: dict[int, int] = {}
    first: dict[Any, int] = {}
    for instruction in local.instructions:
        match instruction:
            case Reshard(source=source, result=result, there=Route(steps=()), back=back, differentiable=True):
                if local.values[source].tensor.role == "param":
                    found[result] = first.setdefault((source, back.steps), result)
    return found


class Accumulator:
    """Runs a local program `num_runs` times a step."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.local = executor, executor.local
        self.num = self.local.program.num_runs
        corrections = self.local.program.corrections
        self.first = shared_conversions(self.local)
        self.shared: dict[int, _Shared] = {}
        self.wholes: list[Compute] = []
        self.weighted: list[Compute] = []
        for instruction in self.local.instructions:
            match instruction:
                case Reshard(result=output, source=source, back=back) if output in self.first:
                    if self.first[output] == output:
                        self.shared[output] = _Shared(source, back)
                    executor.calls[instruction.index] = _given(output, self.first[output])
                case Compute(key=key) if key in corrections:
                    self._correct(instruction, corrections[key])

    def _correct(self, instruction: Compute, correction: float | str) -> None:
        """Replace the call of one op by one that gives the whole batch's result, or this run's share of it."""
        calls, index = self.executor.calls, instruction.index
        if correction in (WHOLE_SUM, WHOLE_MEAN):
            self.wholes.append(instruction)
            calls[index] = _unless_known(calls[index], instruction.outputs[0])
        elif correction == WEIGHTED:
            self.weighted.append(instruction)
            calls[index] = _times_known(calls[index], instruction.outputs[0])
        else:
            calls[index] = _times(calls[index], instruction.outputs, float(correction))

    def run(
        self,
        sources: Sources,
        parts: Sequence[Sources],
        state: RunState,
        observer: Observer | None = None,
        after_run: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Return the flat outputs of a whole step, all None but the loss, whose backward gives the gradients.

        parts: the batch entries of each micro-batch, the rank's part of them; a simulation passes fewer than a step
        has. observer: it is told of each run's forward and backward. after_run: called after each run.
        """
        params = [t for t in sources if t.role == "param" and t.requires_grad and sources[t].requires_grad]
        work = _Work(self, sources, params, parts, state, observer, after_run)
        loss = handed_over(work, [sources[tensor] for tensor in params])
        index = self.local.program.captured.loss_index
        return [loss if place == index else found for place, found in enumerate(self.local.outputs)]

    def evaluate(self, sources: Sources, parts: Sequence[Sources], state: RunState) -> list[list[Any]]:
        """Return the flat outputs of each micro-batch, without gradients; the mean of the losses is the whole one's."""
        with torch.no_grad():
            step = self.open(sources, [], parts, state)
            return [step.forward(k, part) for k, part in enumerate(parts)]

    def open(
        self,
        sources: Sources,
        params: Sequence[ProgramTensor],
        parts: Sequence[Sources],
        state: RunState,
        observer: Observer | None = None,
    ) -> OpenStep:
        """Begin a step whose runs share the tensors of `sources`; gradients accumulate for `params` alone."""
        leaves = {tensor: sources[tensor].detach().requires_grad_() for tensor in params}
        held = {tensor: value.detach() for tensor, value in sources.items() if tensor not in leaves}
        known, factors = self.before({**held, **leaves}, parts, state)
        copies: dict[int, Tensor] = {}
        for output, shared in self.shared.items():
            tensor = self._source(shared)
            copies[output] = sources[tensor].detach().requires_grad_(tensor in leaves)
        if observer is not None:
            observer.watch([*leaves.values(), *copies.values()], "param")
        return OpenStep(self, leaves, held, copies, replace(state, known={**known, **copies}, factors=factors))

    def _source(self, shared: _Shared) -> ProgramTensor:
        return self.local.values[shared.source].tensor

    # What is known before the step

    def before(
        self, sources: Sources, parts: Sequence[Sources], state: RunState
    ) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return the whole batch's values, by value, and the factors of weighted means, by the value that each multiplies."""
        known: dict[int, Tensor] = {}
        factors: dict[int, Tensor] = {}
        for instruction in self.wholes:
            (output,) = instruction.outputs
            found = [env[output] for env in self._runs_up_to([output], sources, parts, replace(state, known=known))]
            total = torch.stack(found).sum(0)
            averaged = self.local.program.corrections[instruction.key] == WHOLE_MEAN
            known[output] = total / len(found) if averaged else total
        for instruction in self.weighted:
            factors[instruction.outputs[0]] = self._factor(instruction, sources, parts, replace(state, known=known))
        return known, factors

    def _runs_up_to(self, values: Sequence[int], sources: Sources, parts: Sequence[Sources], state: RunState) -> Any:
        """Yield, for each micro-batch, an environment in which only `values` and what they are made from are computed."""
        needed = set(values)
        instructions: list[Instruction] = []
        for instruction in reversed(self.local.instructions):
            if needed.intersection(instruction.outputs):
                instructions.insert(0, instruction)
                if instruction.outputs[0] not in state.known:
                    needed.update(instruction.inputs)
        for k, part in enumerate(parts):
            given = {**sources, **part}
            env = {index: given[tensor] for tensor, index in self.local.sources.items() if tensor in given}
            for instruction in instructions:
                self.executor.calls[instruction.index](env, replace(state, micro=k))
            yield env

    def _factor(self, instruction: Compute, sources: Sources, parts: Sequence[Sources], state: RunState) -> Tensor:
        """Return K / (the weight of all micro-batches on all ranks), which turns a sum into its part of the mean."""
        op = instruction.op
        rule = find(op.name).weight
        assert rule is not None
        args, kwargs = fill_arguments(op.node, instruction.inputs)
        operands = [found.value for found in (*args[1:3], *kwargs.values()) if isinstance(found, Ref)]
        total: Any = 0.0
        for env in self._runs_up_to(operands, sources, parts, state):
            total = total + rule.weight(_filled(args, env), _filled(kwargs, env))
        labels = self.local.values[operands[0]]
        for axis, place in enumerate(labels.layout):
            if place >= 0 and self.local.communicator.mesh[axis] > 1:
                total = self.local.communicator.all_reduce(axis, total)
        return self.num / total


def _filled(tree: Any, env: Mapping[int, Any]) -> Any:
    """Replace references to values by the values; one that is not computed becomes None."""
    if isinstance(tree, Ref):
        return env.get(tree.value)
    if isinstance(tree, dict):
        return {key: _filled(item, env) for key, item in tree.items()}
    return tuple(_filled(item, env) for item in tree) if isinstance(tree, (list, tuple)) else tree


def _given(output: int, first: int) -> BoundCall:
    def call(env: dict[int, Any], state: RunState) -> None:
        env[output] = state.known[first]

    return call


def _unless_known(compute: BoundCall, output: int) -> BoundCall:
    def call(env: dict[int, Any], state: RunState) -> None:
        if output in state.known:
            env[output] = state.known[output]
        else:
            compute(env, state)

    return call


def _times_known(compute: BoundCall, output: int) -> BoundCall:
    def call(env: dict[int, Any], state: RunState) -> None:
        compute(env, state)
        env[output] = env[output] * state.factors[output].to(env[output].dtype)

    return call


def _times(compute: BoundCall, outputs: Sequence[int], factor: float) -> BoundCall:
    def call(env: dict[int, Any], state: RunState) -> None:
        compute(env, state)
        for output in outputs:
            env[output] = env[output] * factor

    return call


@dataclass(eq=False)
class OpenStep:
    """The tensors that the runs of one step share: parameters, whose gradients accumulate, and values computed before."""

    accumulator: Accumulator
    leaves: dict[ProgramTensor, Tensor]
    held: dict[ProgramTensor, Tensor]
    copies: dict[int, Tensor]
    """Parameters as the readers of all runs see them, by value (`Accumulator.shared`)."""
    state: RunState

    def forward(self, micro: int, part: Sources) -> list[Any]:
        """Return the flat outputs of the run on the micro-batch `part`."""
        sources = {**self.held, **self.leaves, **part}
        return self.accumulator.executor.run(sources, replace(self.state, micro=micro))

    def gradients(self) -> list[Tensor | None]:
        """Return the gradient of each parameter, and release them.

        Gradients that are still partial sums are reduced, one parameter after another.
        """
        owner = self.accumulator
        for output, shared in owner.shared.items():
            copy, leaf = self.copies[output], self.leaves.get(owner._source(shared))
            if leaf is None or copy.grad is None:
                continue
            own = shared.route.run(copy.grad)
            copy.grad = None
            leaf.grad = own if leaf.grad is None else leaf.grad.add_(own)
        found = [leaf.grad for leaf in self.leaves.values()]
        for leaf in self.leaves.values():
            leaf.grad = None
        return found


class Work(Protocol):
    """A step that can be run, forward and backward."""

    def run(self) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss, and the gradient of each parameter."""
        ...


def handed_over(work: Work, params: Sequence[Tensor]) -> Tensor:
    """Run a step and return its loss; the loss's backward gives `params` the gradients that the step computed."""
    loss: Tensor = _Accumulated.apply(work, *params)
    return loss


@dataclass(eq=False)
class _Work:
    """One step of an accumulator, ready to be run."""

    accumulator: Accumulator
    sources: Sources
    params: list[ProgramTensor]
    parts: Sequence[Sources]
    state: RunState
    observer: Observer | None
    after_run: Callable[[], None]

    def run(self) -> tuple[Tensor, list[Tensor | None]]:
        """Return the loss, and the gradient of each of `params`."""
        step = self.accumulator.open(self.sources, self.params, self.parts, self.state, self.observer)
        total: Any = 0.0
        for k, part in enumerate(self.parts):
            total = total + self._run_one(step, k, part)
            self.after_run()
        return total, step.gradients()

    def _run_one(self, step: OpenStep, k: int, part: Sources) -> Tensor:
        owner, observer = self.accumulator, self.observer
        with torch.enable_grad(), nullcontext() if observer is None else observer.phase("forward"):
            loss: Tensor = step.forward(k, part)[owner.local.program.captured.loss_index]
            if observer is not None:
                observer.mark_forward_end()
        with nullcontext() if observer is None else observer.phase("backward"):
            if loss.requires_grad:
                loss.backward(torch.full_like(loss, 1 / owner.num))
        return loss.detach() / owner.num


class _Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: Work, *params: Tensor) -> Tensor:
        loss, ctx.found = work.run()
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.found = ctx.found, None
        if found is None:
            raise UserError(
                "one backward a step is needed with micro-batches, whose graphs are gone; this is the second; call the model "
                "again"
            )
        for gradient in found:
            if gradient is not None:
                gradient.mul_(grads[0])
        return None, *found
