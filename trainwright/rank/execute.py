"""Runs a local program: each instruction is bound once to a function, then all are called in order.

`reruns` finds the instructions that a region's backward runs again; `region_memory` holds what autograd saves of a
region.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..program.program import Tensor as ProgramTensor
from .compiled import Compiled
from .early_sums import early_sums, with_sum
from .instructions import Borrow, Close, Compute, Instruction, Open, Ref, Reshard
from .late_loss import late, summing_the_loss
from .local import LocalProgram
from .offload import Elsewhere, OffloadRun, OffloadStore, Uses
from .randomness import with_state
from .region_memory import RegionMemory, unpack
from .reruns import Rerun, gathering_before, reruns_of
from .reshard import reshard
from .run_state import BoundCall, RunState


@dataclass(eq=False)
class Execution:
    """One run of a local program: the values that exist, and what the backward will rematerialise."""

    env: dict[int, Any]
    state: RunState
    offload: OffloadRun | None = None
    memories: dict[int, RegionMemory] = field(default_factory=dict)
    uses: Uses | None = None


class Executor:
    """A local program, ready to run many times. Without a `store`, tensors that the plan offloads are kept."""

    def __init__(self, local: LocalProgram, store: OffloadStore | None = None) -> None:
        self.local, self.store = local, store
        self.coords = local.communicator.coords
        self.calls = [_prepare(instruction, self.coords) for instruction in local.instructions]
        self.replays = {i.index: _prepare(i.again, self.coords) for i in local.instructions if i.again is not i}
        self.segments = _segments(local.instructions)
        self.reruns = {region: rerun for region, rerun in reruns_of(local).items() if rerun.wanted or rerun.internals}
        self.frees = _last_uses(local)
        self.early = {found.instruction.index: found for found in early_sums(local)}
        """The sums that are begun with the step, by the instruction that takes each."""
        for index in {index for early in self.early.values() for index in early.first}:
            self.calls[index] = _unless_there(self.calls[index], local.instructions[index].outputs[0])
        if (summing := summing_the_loss(local)) is not None:
            self.calls[summing.index] = late(self.calls[summing.index], summing)
        self.last_offload = max((i.index for i in local.instructions if _offloads(local, i)), default=-1)
        """The index of the last instruction that makes something to offload; -1 if none does."""
        self.released: set[tuple[int, int]] = set()
        """The saved tensors that autograd gave up because the plan recomputes them, by `_Saved.place`."""
        self.before = gathering_before(self.reruns, self.segments)
        self.pieces: list[Any] | None = None
        """The program in pieces (`pieces.pieces`), once it has been asked to run compiled."""
        self.compiled = None if local.decisions.compiled is None else Compiled(self, local.decisions.compiled)
        """The program's blocks as graphs that torch compiles, of a plan that says so."""
        self.elsewhere: Elsewhere | None = None
        """The parameters that rest off the device, where some do."""

    def run(self, sources: Mapping[ProgramTensor, Tensor], state: RunState) -> list[Any]:
        """Return the flat outputs, given the rank's part of every parameter, buffer, batch entry and constant."""
        run = self.begin(sources, state)
        if self.compiled is not None:
            self.compiled.run(run)
            return self.end(run)
        for region, start, stop in self.segments:
            self.step(run, region, start, stop)
        return self.end(run)

    def again(self, index: int) -> BoundCall:
        """Return the call by which the backward recomputes the outputs of instruction `index`."""
        call, elsewhere = self.replays.get(index, self.calls[index]), self.elsewhere
        if elsewhere is None:
            return call

        def run(env: dict[int, Any], state: RunState) -> None:
            elsewhere.need(index)
            call(env, state)

        return run

    def begin(self, sources: Mapping[ProgramTensor, Tensor], state: RunState) -> Execution:
        """Return a new run, with the sums that begin early issued and nothing else carried out."""
        env = {index: sources[tensor] for tensor, index in self.local.sources.items() if tensor in sources}
        offload = self.new_offload() if torch.is_grad_enabled() else None
        uses = None if self.elsewhere is None else self.elsewhere.begin()
        run = Execution(env, replace(state, flights={}, sums={}), offload, uses=uses)
        for taken_by, early in self.early.items():
            for index in early.first:
                self.calls[index](env, run.state)
            run.state.sums[taken_by] = early.begin(env)
        return run

    def step(self, run: Execution, region: int, start: int, stop: int) -> None:
        """Carry out the instructions `start` to `stop`, all of one region."""
        rerun = self.reruns.get(region) if torch.is_grad_enabled() else None
        if run.offload is not None and start > self.last_offload:
            run.offload.settle()
        if rerun is None and run.offload is None:
            self._forward(run, start, stop)
            return
        if region not in run.memories:
            run.memories[region] = RegionMemory(self, rerun or Rerun(), run.state, run.offload)
        self._forward_watched(run, start, stop, run.memories[region])

    def end(self, run: Execution) -> list[Any]:
        """Return the flat outputs of a run whose instructions have all been carried out."""
        if run.offload is not None:
            run.offload.end_forward()
        for region, before in self.before.items():
            if region in run.memories:
                run.memories[region].before = run.memories.get(before)
        return [run.env[found.value] if isinstance(found, Ref) else found for found in self.local.outputs]

    def new_offload(self) -> OffloadRun | None:
        """Return what tracks the storages that one forward offloads; None if there are none."""
        if (self.store is None or self.last_offload < 0) and self.elsewhere is None:
            return None
        return OffloadRun(self.store, self.local.decisions.in_flight_bytes, self.elsewhere)

    def _call(self, run: Execution, index: int) -> None:
        if run.uses is not None:
            run.uses.before(index, run.env, run.state.rest)
        self.calls[index](run.env, run.state)

    def _free(self, run: Execution, index: int) -> None:
        if run.uses is not None:
            run.uses.after(index, run.env)
        for value in self.frees[index]:
            del run.env[value]

    def _forward(self, run: Execution, start: int, stop: int) -> None:
        if run.uses is None:
            env, state = run.env, run.state
            for index in range(start, stop):
                self.calls[index](env, state)
                for value in self.frees[index]:
                    del env[value]
            return
        for index in range(start, stop):
            self._call(run, index)
            self._free(run, index)

    def _forward_watched(self, run: Execution, start: int, stop: int, memory: RegionMemory) -> None:
        env = run.env
        if run.uses is not None:
            run.uses.open(memory.rerun.sources, env, run.state.rest)
        for value in memory.rerun.sources:
            if value in env and value not in memory.sources:
                memory.start_from(value, env[value])
        with torch.autograd.graph.saved_tensors_hooks(memory.pack, unpack):
            for index in range(start, stop):
                memory.begin(self.local.instructions[index])
                self._call(run, index)
                memory.end(env)
                if index in memory.rerun.ends:
                    memory.start_backward_at(env, memory.rerun.ends[index])
                self._free(run, index)


def _prepare(instruction: Instruction, coords: Sequence[int]) -> BoundCall:
    """Bind an instruction to a function of the environment, with no search left to do at run time."""
    match instruction:
        case Compute():
            return _prepared_op(instruction, coords)
        case Reshard():
            return _prepared_reshard(instruction)
        case Open():
            return _prepared_open(instruction)
        case Close():
            return _prepared_close(instruction)
        case Borrow(lent=lent, result=result):

            def hand_on(env: dict[int, Any], state: RunState) -> None:
                env[result] = env[lent]

            return hand_on


def _prepared_reshard(instruction: Reshard) -> BoundCall:
    source, result, there, back = instruction.source, instruction.result, instruction.there, instruction.back

    def change(env: dict[int, Any], state: RunState) -> None:
        env[result] = reshard(env[source], there, back)

    def change_without_gradient(env: dict[int, Any], state: RunState) -> None:
        env[result] = there.run(env[source])

    return change if instruction.differentiable else change_without_gradient


def _prepared_open(instruction: Open) -> BoundCall:
    bucket, params, tokens = instruction.bucket, instruction.params, instruction.tokens

    def open_bucket(env: dict[int, Any], state: RunState) -> None:
        env.update(zip(tokens, bucket.open(state.flights, state.rest, *(env[param] for param in params))))

    return open_bucket


def _prepared_close(instruction: Close) -> BoundCall:
    bucket, place, token, result = instruction.bucket, instruction.place, instruction.token, instruction.result

    def close(env: dict[int, Any], state: RunState) -> None:
        env[result] = bucket.close(state.flights, place, env[token])

    return close


def _prepared_op(instruction: Compute, coords: Sequence[int]) -> BoundCall:
    function = with_sum(instruction) or with_state(instruction, coords)
    outputs = instruction.outputs
    compute = _bind(instruction) if function is None else _bind_stateful(function, instruction)

    if not outputs:  # it only writes

        def call(env: dict[int, Any], state: RunState) -> None:
            compute(env, state)
    elif instruction.gives_several:

        def call(env: dict[int, Any], state: RunState) -> None:
            env.update(zip(outputs, compute(env, state)))
    else:
        (output,) = outputs

        def call(env: dict[int, Any], state: RunState) -> None:
            env[output] = compute(env, state)

    return call


def _unless_there(compute: BoundCall, output: int) -> BoundCall:
    def call(env: dict[int, Any], state: RunState) -> None:
        if output not in env:
            compute(env, state)

    return call


Bound = Callable[[dict[int, Any], RunState], Any]


def _bind(instruction: Compute) -> Bound:
    """Return a call that looks its values up; most ops take values first, then constants, which are bound once."""
    function, args, kwargs = instruction.function, instruction.args, instruction.kwargs
    num = next((place for place, arg in enumerate(args) if type(arg) is not Ref), len(args))
    rest = args[num:]
    if num == 0 or any(_has_ref(arg) for arg in (*rest, *kwargs.values())):
        return lambda env, state: function(*_fill(args, env), **_fill_named(kwargs, env))
    if num == 1:
        only = args[0].value
        return lambda env, state: function(env[only], *rest, **kwargs)
    values = itemgetter(*(arg.value for arg in args[:num]))
    return lambda env, state: function(*values(env), *rest, **kwargs)


def _bind_stateful(function: Callable[..., Any], instruction: Compute) -> Bound:
    args, kwargs = instruction.args, instruction.kwargs
    return lambda env, state: function(state, *_fill(args, env), **_fill_named(kwargs, env))


def _has_ref(tree: Any) -> bool:
    return type(tree) is Ref or (isinstance(tree, (list, tuple)) and any(_has_ref(item) for item in tree))


def _fill(args: Any, env: dict[int, Any]) -> list[Any]:
    return [_fill_one(arg, env) for arg in args]


def _fill_one(arg: Any, env: dict[int, Any]) -> Any:
    kind = type(arg)
    if kind is Ref:
        return env[arg.value]
    return [_fill_one(item, env) for item in arg] if kind is list or kind is tuple else arg


def _fill_named(kwargs: dict[str, Any], env: dict[int, Any]) -> dict[str, Any]:
    return {name: _fill_one(arg, env) for name, arg in kwargs.items()} if kwargs else kwargs


def _offloads(local: LocalProgram, instruction: Instruction) -> bool:
    if isinstance(instruction, Compute) and instruction.internal_offloaded:
        return True
    return any(local.values[value].offloaded for value in instruction.outputs)


def _segments(instructions: Sequence[Instruction]) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive instructions of one region, as (region, start, stop)."""
    segments: list[tuple[int, int, int]] = []
    for index, instruction in enumerate(instructions):
        if segments and segments[-1][0] == instruction.region:
            segments[-1] = (instruction.region, segments[-1][1], index + 1)
        else:
            segments.append((instruction.region, index, index + 1))
    return segments


def _last_uses(local: LocalProgram) -> list[list[int]]:
    """Return, for each instruction, the values that nothing reads after it."""
    last: dict[int, int] = {}
    for instruction in local.instructions:
        for value in (*instruction.inputs, *instruction.outputs):
            last[value] = instruction.index
    held = {found.value for found in local.outputs if isinstance(found, Ref)}
    frees: list[list[int]] = [[] for _ in local.instructions]
    for value, index in last.items():
        if value not in held:
            frees[index].append(value)
    return frees
