"""Running a local program: forward in order, and rederiving in the backward what the plan did not keep.

Autograd hands every tensor that it saves to a hook. One that the plan recomputes is replaced by a note of where it came
from; when the backward asks for it, the block's pure sub-graph is run once, without autograd, for all that ask.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .buckets import Bucket, Flights
from .local import Instruction, LocalProgram, Ref
from .offload import OffloadedStorage, OffloadRun, OffloadStore
from .program import Tensor as ProgramTensor
from .randomness import with_state
from .reshard import Route


@dataclass(frozen=True)
class RunState:
    """What one forward run is given besides its tensors."""

    seed: int = 0
    step: int = 0
    training: bool = True
    dropout: bool = True
    """False: as if every dropout probability were zero, for comparisons."""
    flights: Flights = field(default_factory=dict)
    """The parameters that are under way in this run."""
    micro: int = 0
    """Which of the step's micro-batches this is: each draws its own numbers."""
    known: Mapping[int, Any] = field(default_factory=dict)
    """Values that are there before the run, where a step takes several (`accumulate`)."""
    factors: Mapping[int, Any] = field(default_factory=dict)
    """What makes sums over labels a share of the whole batch's mean, by the value that is multiplied."""

    @property
    def draw(self) -> tuple[int, ...]:
        """What the random numbers of this run depend on, besides their place."""
        return (self.seed, self.step, self.micro) if self.micro else (self.seed, self.step)


@dataclass(eq=False)
class Run:
    """One run of a local program: the values that are there, and what the backward will rederive."""

    env: dict[int, Any]
    state: RunState
    offload: OffloadRun | None = None
    memories: dict[int, _RegionMemory] = field(default_factory=dict)


class Executor:
    """A local program, made ready to run many times. Without a `store`, what the plan offloads is kept."""

    def __init__(self, local: LocalProgram, store: OffloadStore | None = None) -> None:
        self.local, self.store = local, store
        self.coords = local.communicator.coords
        self.calls = [_prepare(instruction, self.coords) for instruction in local.instructions]
        self.segments = _segments(local.instructions)
        self.reruns = {region: rerun for region, rerun in _reruns(local).items() if rerun.wanted or rerun.internals}
        self.frees = _last_uses(local, self.reruns)
        self.last_offload = max((i.index for i in local.instructions if _offloads(local, i)), default=-1)
        """The last instruction that makes something to offload; -1: none does."""
        self.before = _gathering_before(self.reruns, self.segments)
        self.pieces: list[Any] | None = None
        """The program in pieces (`pieces.pieces`), once it has been asked to run compiled."""

    def run(self, sources: Mapping[ProgramTensor, Tensor], state: RunState) -> list[Any]:
        """Return the flat outputs, given the rank's part of every parameter, buffer, batch entry and constant."""
        run = self.begin(sources, state)
        for region, start, stop in self.segments:
            self.step(run, region, start, stop)
        return self.end(run)

    def begin(self, sources: Mapping[ProgramTensor, Tensor], state: RunState) -> Run:
        """Return a run of which no instruction has been carried out."""
        env = {index: sources[tensor] for tensor, index in self.local.sources.items() if tensor in sources}
        offload = self._offload_run() if torch.is_grad_enabled() else None
        return Run(env, replace(state, flights={}), offload)

    def step(self, run: Run, region: int, start: int, stop: int) -> None:
        """Carry out the instructions `start` to `stop`, all of one region."""
        rerun = self.reruns.get(region) if torch.is_grad_enabled() else None
        if run.offload is not None and start > self.last_offload:
            run.offload.settle()
        if rerun is None and run.offload is None:
            self._forward(run.env, start, stop, run.state)
            return
        if region not in run.memories:
            run.memories[region] = _RegionMemory(self, rerun or _Rerun(), run.state, run.offload)
        self._forward_watched(run.env, start, stop, run.state, run.memories[region])

    def end(self, run: Run) -> list[Any]:
        """Return the flat outputs of a run whose instructions have all been carried out."""
        if run.offload is not None:
            run.offload.end_forward()
        for region, before in self.before.items():
            if region in run.memories:
                run.memories[region].before = run.memories.get(before)
        return [run.env[found.value] if isinstance(found, Ref) else found for found in self.local.outputs]

    def _offload_run(self) -> OffloadRun | None:
        if self.store is None or self.last_offload < 0:
            return None
        return OffloadRun(self.store, self.local.decisions.in_flight_bytes)

    def _forward(self, env: dict[int, Any], start: int, stop: int, state: RunState) -> None:
        for index in range(start, stop):
            self.calls[index](env, state)
            for value in self.frees[index]:
                del env[value]

    def _forward_watched(
        self, env: dict[int, Any], start: int, stop: int, state: RunState, memory: _RegionMemory
    ) -> None:
        for value in memory.rerun.sources:
            if value in env and value not in memory.sources:
                memory.start_from(value, env[value])
        with torch.autograd.graph.saved_tensors_hooks(memory.pack, _unpack):
            for index in range(start, stop):
                memory.begin(self.local.instructions[index])
                self.calls[index](env, state)
                memory.end(env)
                if index in memory.rerun.ends:
                    memory.start_backward_at(env, memory.rerun.ends[index])
                for value in self.frees[index]:
                    del env[value]


Call = Callable[[dict[int, Any], RunState], None]


def _prepare(instruction: Instruction, coords: Sequence[int]) -> Call:
    """Bind an instruction to a function of the environment, with no search left to do at run time."""
    function = _in_flight(instruction) if instruction.bucket is not None else with_state(instruction, coords)
    outputs = instruction.outputs
    compute = _bind(instruction) if function is None else _bind_stateful(function, instruction)

    if instruction.many:

        def call(env: dict[int, Any], state: RunState) -> None:
            env.update(zip(outputs, compute(env, state)))
    else:
        (output,) = outputs

        def call(env: dict[int, Any], state: RunState) -> None:
            env[output] = compute(env, state)

    return call


Compute = Callable[[dict[int, Any], RunState], Any]


def _bind(instruction: Instruction) -> Compute:
    """Look for the values once: most ops take values first, then constants."""
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


def _bind_stateful(function: Callable[..., Any], instruction: Instruction) -> Compute:
    args, kwargs = instruction.args, instruction.kwargs
    return lambda env, state: function(state, *_fill(args, env), **_fill_named(kwargs, env))


def _has_ref(tree: Any) -> bool:
    return type(tree) is Ref or (isinstance(tree, (list, tuple)) and any(_has_ref(item) for item in tree))


def _in_flight(instruction: Instruction) -> Callable[..., Any]:
    """What opens or closes a bucket is told what is under way."""
    function = instruction.function
    return lambda state, *args: function(state.flights, *args)


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
    return instruction.internal_offloaded or any(local.values[value].offloaded for value in instruction.outputs)


def _segments(instructions: Sequence[Instruction]) -> list[tuple[int, int, int]]:
    """Runs of consecutive instructions of one region: (region, start, stop)."""
    segments: list[tuple[int, int, int]] = []
    for index, instruction in enumerate(instructions):
        if segments and segments[-1][0] == instruction.region:
            segments[-1] = (instruction.region, segments[-1][1], index + 1)
        else:
            segments.append((instruction.region, index, index + 1))
    return segments


def _gathering_before(reruns: Mapping[int, _Rerun], segments: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    """For each region whose backward gathers parameters again, the one before it, whose backward comes next."""
    order = [region for region in dict.fromkeys(region for region, _, _ in segments) if region in reruns]
    gathering = [region for region in order if reruns[region].gathers]
    return dict(zip(gathering[1:], gathering))


def _last_uses(local: LocalProgram, reruns: Mapping[int, _Rerun]) -> list[list[int]]:
    """For each instruction, the values that nobody reads after it."""
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


@dataclass(eq=False)
class _Rerun:
    """The sub-graph that rederives what one region does not keep."""

    wanted: set[int] = field(default_factory=set)
    """Values that are not kept."""
    internals: set[int] = field(default_factory=set)
    """Instructions whose saved internals are not kept."""
    instructions: list[int] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    """Values from which the sub-graph starts."""
    last_use: dict[int, int] = field(default_factory=dict)
    ends: dict[int, list[int]] = field(default_factory=dict)
    """Where the sub-graph communicates: the instructions that make the region's results, and those results."""
    gathers: dict[Bucket, dict[int, int]] = field(default_factory=dict)
    """The parameters that the sub-graph gathers again: by bucket, index → value to start from."""


def _reruns(local: LocalProgram) -> dict[int, _Rerun]:
    reruns: dict[int, _Rerun] = {}
    for instruction in local.instructions:
        rerun = reruns.setdefault(instruction.region, _Rerun())
        rerun.wanted |= {value for value in instruction.outputs if local.values[value].recomputed}
        if instruction.internal_recomputed:
            rerun.internals.add(instruction.index)
    for region, rerun in reruns.items():
        _trace_back(local, region, rerun)
        if any(_communicates(local.instructions[index]) for index in rerun.instructions):
            rerun.ends = _results(local, region)
    return reruns


def _communicates(instruction: Instruction) -> bool:
    if instruction.bucket is not None:
        index = instruction.args[0]
        return isinstance(index, int) and instruction.bucket.members[index].there.moves
    if instruction.op is None:
        return any(isinstance(arg, Route) and arg.moves for arg in instruction.args[1:2])
    return instruction.function is not instruction.op.node.target


def _results(local: LocalProgram, region: int) -> dict[int, list[int]]:
    """The values of `region` that are read elsewhere, by the instruction that makes them."""
    inside = {value: i.index for i in local.instructions if i.region == region for value in i.outputs}
    read = {value for i in local.instructions if i.region != region for value in i.inputs}
    read |= {found.value for found in local.outputs if isinstance(found, Ref)}
    results: dict[int, list[int]] = {}
    for value, index in inside.items():
        if value in read:
            results.setdefault(index, []).append(value)
    return results


def _trace_back(local: LocalProgram, region: int, rerun: _Rerun) -> None:
    """Collect, from the wanted values backwards, the instructions to rerun and the kept values to start from."""
    needed = set(rerun.wanted)
    for instruction in reversed(local.instructions):
        if instruction.region != region:
            continue
        asked = any(value in needed for value in instruction.outputs) or instruction.index in rerun.internals
        if not asked:
            continue
        rerun.instructions.insert(0, instruction.index)
        if instruction.bucket is not None and instruction.bucket.ahead and _communicates(instruction):
            rerun.gathers.setdefault(instruction.bucket, {})[instruction.args[0]] = instruction.inputs[0]
        for value in instruction.inputs:
            if local.values[value].recomputed or _is_view(local, value, region):
                needed.add(value)
            else:
                rerun.sources.add(value)
    made = {value for index in rerun.instructions for value in local.instructions[index].outputs}
    rerun.sources -= made
    for index in rerun.instructions:
        for value in local.instructions[index].inputs:
            rerun.last_use[value] = index


def _is_view(local: LocalProgram, value: int, region: int) -> bool:
    """Whether `value` is a view made inside the region of something that is itself rederived."""
    producer = _producers(local).get(value)
    if producer is None or producer.region != region or producer.op is None or producer.op.kind != "view":
        return False
    return any(local.values[v].recomputed or _is_view(local, v, region) for v in producer.inputs)


def _producers(local: LocalProgram) -> dict[int, Instruction]:
    found: dict[int, Instruction] | None = getattr(local, "_producers", None)
    if found is None:
        found = {value: instruction for instruction in local.instructions for value in instruction.outputs}
        local._producers = found  # type: ignore[attr-defined]
    return found


@dataclass(eq=False, slots=True)
class _Saved:
    """What autograd holds in place of a saved tensor: the tensor itself, or where to get it from."""

    tensor: Tensor | None
    memory: _RegionMemory | OffloadedStorage | None = None
    place: tuple[int, int] = (-1, -1)
    """(value, -1), or (instruction, index among what it saves); of what was offloaded, (-1, -1)."""
    size: Any = None
    stride: Any = None
    offset: int = 0


class _RegionMemory:
    """One run of one region: which storages are not kept, and their rederived contents while the backward needs them."""

    def __init__(self, executor: Executor, rerun: _Rerun, state: RunState, offload: OffloadRun | None = None) -> None:
        self.executor, self.rerun, self.state, self.offload = executor, rerun, state, offload
        self.before: _RegionMemory | None = None
        """Of the region whose backward comes next, if that gathers parameters again."""
        self.sources: dict[int, _Saved] = {}
        self.registry: dict[int, tuple[StorageWeakRef, int]] = {}
        self.waiting: Counter[tuple[int, int]] = Counter()
        self.found: dict[tuple[int, int], Tensor] = {}
        self.pending: list[_Saved] = []
        self.instruction: Instruction | None = None
        self.is_rederived = False

    def begin(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.pending = []

    def pack(self, tensor: Tensor) -> _Saved:
        """Called by autograd for every tensor that it saves; decided upon in `end`, when the outputs are known."""
        saved = _Saved(tensor)
        self.pending.append(saved)
        return saved

    def end(self, env: dict[int, Any]) -> None:
        """Note the outputs that are not kept, and let go of what can be rederived."""
        instruction = self.instruction
        assert instruction is not None
        values = self.executor.local.values
        self._register_offloaded(instruction, env)
        for value in instruction.outputs:
            if value in self.rerun.sources:
                self.start_from(value, env[value])
            if values[value].recomputed:
                storage = StorageWeakRef(env[value].untyped_storage())
                self.registry[storage.cdata] = (storage, value)
        known = None
        for index, saved in enumerate(self.pending):
            assert saved.tensor is not None
            key = _storage(saved.tensor)
            entry = self.registry.get(key)
            if entry is not None and not entry[0].expired():
                self._release(saved, (entry[1], -1))
                continue
            if instruction.internal_recomputed or instruction.internal_offloaded:
                if known is None:
                    known = {_storage(env[v]) for v in (*instruction.inputs, *instruction.outputs)}
                if key not in known:
                    self._release_internal(saved, instruction, index)
                    continue
            self._send_away(saved)
        self.pending = []

    def _register_offloaded(self, instruction: Instruction, env: dict[int, Any]) -> None:
        if self.offload is None:
            return
        chosen = [value for value in instruction.outputs if self.executor.local.values[value].offloaded]
        if chosen:
            # A view of what stands elsewhere frees nothing.
            given = {_storage(env[value]) for value in instruction.inputs}
            for value in chosen:
                if _storage(env[value]) not in given:
                    self.offload.register(env[value])

    def start_from(self, value: int, tensor: Tensor) -> None:
        """Note a value from which the sub-graph starts."""
        saved = _Saved(tensor.detach())
        self._send_away(saved)
        self.sources[value] = saved

    def _release_internal(self, saved: _Saved, instruction: Instruction, index: int) -> None:
        assert saved.tensor is not None
        if instruction.internal_recomputed:
            self._release(saved, (instruction.index, index))
        elif self.offload is not None:
            if self.offload.find(saved.tensor) is None:
                self.offload.register(saved.tensor)
            self._send_away(saved)

    def _send_away(self, saved: _Saved) -> None:
        """Let go of a tensor whose storage is offloaded; any other stays."""
        tensor = saved.tensor
        item = self.offload.find(tensor) if self.offload is not None and tensor is not None else None
        if self.offload is not None and item is not None and tensor is not None:
            self.offload.save(item, tensor)
            saved.size, saved.stride, saved.offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            saved.memory, saved.tensor = item, None

    def _release(self, saved: _Saved, place: tuple[int, int]) -> None:
        tensor = saved.tensor
        assert tensor is not None
        saved.size, saved.stride, saved.offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        saved.memory, saved.place, saved.tensor = self, place, None
        self.waiting[place] += 1

    def start_backward_at(self, env: dict[int, Any], values: Sequence[int]) -> None:
        """Rederive as soon as the backward comes to the region, not when this rank first lacks something.

        All ranks then communicate at the same point, also one whose own part is empty and asks for nothing.
        """
        for value in values:
            if env[value].requires_grad:
                env[value] = _Start.apply(env[value], self)

    def rederive_first(self) -> None:
        """Rederive unless that was done; what the next region gathers again is issued meanwhile."""
        if self.is_rederived:
            return
        self.gather()
        if self.before is not None:
            self.before.gather()
        self._rederive()

    def gather(self) -> None:
        """Issue the gathers of what is rederived from parameters."""
        for bucket, starts in () if self.is_rederived else self.rerun.gathers.items():
            params = {index: _unpack(self.sources[value]) for index, value in starts.items()}
            self.state.flights[bucket].gather(params)

    def fetch(self, place: tuple[int, int]) -> Tensor:
        """Return a rederived tensor; the last one to ask for it takes it away."""
        if place not in self.found:
            self._rederive()
        tensor = self.found[place]
        self.waiting[place] -= 1
        if self.waiting[place] == 0:
            del self.found[place]
        return tensor

    def _rederive(self) -> None:
        """Run the region's sub-graph once; keep what somebody still waits for."""
        self.is_rederived = True
        env: dict[int, Any] = {}
        for index in self.rerun.instructions:
            instruction = self.executor.local.instructions[index]
            for value in instruction.inputs:
                if value not in env and value in self.sources:
                    env[value] = _unpack(self.sources[value])
            if index in self.rerun.internals:
                self._rerun_with_internals(instruction, env)
            else:
                with torch.no_grad():
                    self.executor.calls[index](env, self.state)
            for value in instruction.outputs:
                if self.waiting[(value, -1)] > 0:
                    self.found[(value, -1)] = env[value]
            for value in (*instruction.inputs, *instruction.outputs):
                if self.rerun.last_use.get(value, index) <= index:
                    env.pop(value, None)

    def _rerun_with_internals(self, instruction: Instruction, env: dict[int, Any]) -> None:
        """Run one op under autograd to see what it saves."""
        seen: list[Tensor] = []
        values = self.executor.local.values
        inner = dict(env)
        for value in instruction.inputs:
            if values[value].tensor.requires_grad:
                inner[value] = env[value].detach().requires_grad_()

        def note(tensor: Tensor) -> int:
            seen.append(tensor.detach())
            return len(seen) - 1

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda index: seen[index]):
            self.executor.calls[instruction.index](inner, self.state)
        for value in instruction.outputs:
            env[value] = inner[value].detach()
        for index, tensor in enumerate(seen):
            if self.waiting[(instruction.index, index)] > 0:
                self.found[(instruction.index, index)] = tensor


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: _RegionMemory) -> Tensor:
        ctx.memory = memory
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.memory.rederive_first()
        return grads[0], None


def _unpack(saved: _Saved) -> Tensor:
    if saved.memory is None:
        assert saved.tensor is not None
        return saved.tensor
    tensor = saved.memory.fetch(saved.place)
    if saved.place[1] >= 0:
        return tensor
    return torch.as_strided(tensor, saved.size, saved.stride, saved.offset)


def _storage(tensor: Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata
