"""Simulates one rank's step of a plan on fake tensors; the predicted peak of a plan is the peak of this run.

The local program is the one that the runtime runs, reruns included; collectives only return results of the right shapes. The
prediction is the peak over two whole steps, the first of which begins without optimizer state. That is the second step's
peak, since it holds all that the first one does, and the states throughout: so the states are made first, and one step is run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...artifacts import MemoryPoint
from ...ops import find
from ...profiler.saved import run_state
from ...profiler.threads import threads
from ...profiler.tracker import MemoryTracker, Target
from ...profiler.values import KnownValues
from ...program.decisions import Decisions
from ...program.layout import local_shape
from ...program.program import Program, Tensor
from ...program.stages import Stage
from ...rank.accumulate import Accumulator
from ...rank.execute import Executor
from ...rank.instructions import Compute
from ...rank.local import LocalProgram, build_local
from ...rank.offload import CountingStore
from ...rank.offload_states import StateOffload
from ...rank.pipeline import NoLink, Piece, PipelineRunner
from ...rank.reshard import SimulatedCommunicator
from ...rank.run_state import BoundCall, RunState
from ...rank.stage_actions import Action, Schedule, stage_actions
from ...torch_internals.fakes import new_mode
from .costs import OptimizerCost, whole_pieces
from .known_updates import KnownUpdates, MakeOptimizer, OtherGradientsError, Update
from .resting import Room
from .under_way import UnderWay


@dataclass
class Simulation:
    """The result of simulating one rank's step: what it holds and what it sends."""

    peak_bytes: int
    peak_at: str
    breakdown: dict[str, int]
    """The bytes that are alive at the peak, by category."""
    comm_bytes: dict[str, int]
    """The bytes that a step sends, by kind of collective."""
    comm_calls: dict[str, int]
    num_calls: int
    executors: list[Executor] = field(repr=False)
    """The executors that ran, for pricing: one, or one for each piece of a stage."""
    timeline: list[MemoryPoint] = field(default_factory=list)
    moved_bytes: int = 0
    """The bytes that a step offloads; as many come back."""
    num_moved: int = 0
    moved_state_bytes: int = 0
    """The bytes of optimizer states that come back in a step; as many leave again."""

    @property
    def executor(self) -> Executor:
        """Return the executor that ran; of a stage with several pieces, the first piece's."""
        return self.executors[0]


def simulate(
    program: Program,
    decisions: Decisions,
    make_optimizer: MakeOptimizer,
    *,
    target: Target = "cpu",
    coords: Sequence[int] | None = None,
    timeline: bool = False,
    num_threads: int | None = None,
    optimizer_cost: OptimizerCost | None = None,
    counts: Mapping[str, list[int]] | None = None,
    room_of: Callable[[Executor], Room] | None = None,
    moved: Callable[[int], int] = int,
    known: KnownUpdates | None = None,
) -> Simulation:
    """Simulate the step of the rank at `coords` (by default the first, which holds most) and track its memory.

    num_threads: the number of threads of the rank's CPU kernels, if known; their workspaces depend on it. optimizer_cost: the
    optimizer's declaration, by which its gathers of sharded tensors are counted, since the simulated optimizer treats one
    rank's part as whole. counts: by op, the rows of experts in a real run (`runtime.routed`); by default, the planned rows.
    room_of: tells what a run on a tier holds at most of parameters that come, which depends on the tier's pace, and what each
    update under way holds (`under_way`): those parameters, their states and all gradients are not counted elsewhere.
    moved: tells the bytes that a transfer of so many bytes off the device moves; disks under direct I/O move whole pages.
    known: what updates of this optimizer hold that were followed for other plans of this program.
    """
    given = [program], decisions, make_optimizer, target, coords, timeline, optimizer_cost, counts, None, room_of, moved
    with threads(num_threads):
        try:
            return _simulate(*given, known)
        except OtherGradientsError:
            return _simulate(*given, known)


def simulate_stage(
    pieces: Sequence[Stage],
    decisions: Decisions,
    make_optimizer: MakeOptimizer,
    *,
    schedule: Schedule,
    tied: Sequence[str] = (),
    target: Target = "cpu",
    coords: Sequence[int] | None = None,
    timeline: bool = False,
    num_threads: int | None = None,
    optimizer_cost: OptimizerCost | None = None,
    counts: Mapping[str, list[int]] | None = None,
) -> Simulation:
    """Simulate one stage of a step, on the rank at `coords` among the stage's ranks, and track its memory.

    It runs only as many micro-batches as it takes to show warm-up, steady state and end; communicated bytes are counted for all
    micro-batches. pieces: the stage's pieces of the model. tied: the parameters that other stages read too. Transfers between
    stages do not count among the communicated bytes.
    """
    of_stage = _OfStage(pieces, schedule, tied, pieces[0].index)
    programs = [piece.program for piece in pieces]
    with threads(num_threads):
        return _simulate(
            programs, decisions, make_optimizer, target, coords, timeline, optimizer_cost, counts, of_stage
        )


_Sizes = Mapping[str, int]
"""Bytes by category."""


@dataclass(frozen=True)
class _Added:
    """The bytes that an action leaves behind, and those at its peak beyond what was there before it."""

    left: _Sizes
    most: _Sizes
    at: str


@dataclass(frozen=True)
class StageBytes:
    """The bytes that each action of a stage adds, measured on few micro-batches: they are the same at any depth.

    The first, the last and the other micro-batches differ: gradients are made by the first backward.
    """

    ran: Simulation
    """The step of few micro-batches."""
    num_ran: int
    one: tuple[_Sizes, _Sizes]
    """The bytes that one micro-batch sends, and its calls, by kind of collective."""
    begins: _Sizes
    """The bytes alive before the first action."""
    added: dict[_ActionKey, _Added]
    behind: _Added
    """The end of the step, behind the last action."""

    def simulation(self, schedule: Schedule, stage: int) -> Simulation:
        """Return the simulation of a step of `schedule`, whose memory is what its actions add in their order."""
        of_stage = _OfStage((), schedule, (), stage)
        live, most = Counter(self.begins), Counter(self.begins)
        at = self.ran.peak_at
        added = [self.added[_key_of(action, of_stage.num_followed)] for action in of_stage.actions()]
        for each in (*added, self.behind):
            if live.total() + sum(each.most.values()) > most.total():
                most, at = Counter(live), each.at
                most.update(each.most)
            live.update(each.left)
        more = schedule.num_micro_batches - self.num_ran
        sent, calls = (
            {kind: num + more * one[kind] for kind, num in found.items()}
            for found, one in zip((self.ran.comm_bytes, self.ran.comm_calls), self.one)
        )
        breakdown = {category: size for category, size in most.items() if size}
        return replace(
            self.ran, peak_bytes=most.total(), peak_at=at, breakdown=breakdown, comm_bytes=sent, comm_calls=calls
        )


_ActionKey = tuple[str, str, int, bool, bool]
"""Identifies actions that add equal bytes: kind, what they transfer, the chunk, if of the first micro-batch, if of the last."""
_FEW = 3
"""The first micro-batch, the last, and one between them."""


def _key_of(action: Action, num_micro_batches: int) -> _ActionKey:
    return action.kind, action.what, action.chunk, action.micro == 0, action.micro == num_micro_batches - 1


def stage_bytes(
    pieces: Sequence[Stage],
    decisions: Decisions,
    make_optimizer: MakeOptimizer,
    *,
    schedule: Schedule,
    tied: Sequence[str] = (),
    target: Target = "cpu",
    num_threads: int | None = None,
    optimizer_cost: OptimizerCost | None = None,
) -> StageBytes:
    """Simulate one stage of a step with few micro-batches; return what each action adds, of which any depth's peak is made.

    A deep stage holds as many micro-batches at once as its depth, which all run in `simulate_stage`; here three do. It is exact
    where a tensor's memory ends with the same action at any depth. One that a stage hands on as it was given ends with its backward
    or, in interleaved stages, with a send that is waited for late, so there the sum may be a tensor off.
    """
    is_plain = schedule.virtual == 1 and not schedule.splits_backward
    in_flight = tuple(min(depth, _FEW - 1) for depth in schedule.in_flight) if is_plain else schedule.in_flight
    short = replace(schedule, num_micro_batches=min(_FEW, schedule.num_micro_batches), in_flight=in_flight)
    notes = _Notes()
    of_stage = _OfStage(pieces, short, tied, pieces[0].index, notes)
    programs = [piece.program for piece in pieces]
    with threads(num_threads):
        found = _simulate(programs, decisions, make_optimizer, target, None, False, optimizer_cost, None, of_stage)
    (begins, _, _), *rest = notes.seen
    live, added = begins, {}
    for action, (after, peak, at) in zip(notes.actions, rest, strict=True):
        added[_key_of(action, of_stage.num_followed)] = _Added(_less(after, live), _less(peak, live), at)
        live = after
    end = _Added({}, _less(found.breakdown, live), found.peak_at)
    return StageBytes(found, short.num_micro_batches, notes.one, begins, added, end)


def _less(sizes: _Sizes, before: _Sizes) -> dict[str, int]:
    return {category: sizes.get(category, 0) - before.get(category, 0) for category in {**sizes, **before}}


@dataclass
class _Notes:
    """The memory of a simulated stage, action by action."""

    actions: list[Action] = field(default_factory=list)
    seen: list[tuple[_Sizes, _Sizes, str]] = field(default_factory=list)
    """The bytes alive before the first action and behind each, those at the peak since the entry before, and where that was."""
    one: tuple[_Sizes, _Sizes] = ({}, {})

    def note(self, tracker: MemoryTracker) -> None:
        """Note what is alive, and the peak since the last time."""
        peak, at = dict(tracker.peak_breakdown), tracker.peak_at
        tracker.take_peak()
        self.seen.append((tracker.live_breakdown, peak, at))


@dataclass(frozen=True)
class _OfStage:
    """Defines how one stage's part of a step is simulated."""

    pieces: Sequence[Stage]
    schedule: Schedule
    tied: Sequence[str]
    place: int
    """The index of the stage."""
    notes: _Notes | None = None
    """Where each action is noted; the simulation's own peak is then that of the end of the step."""

    @property
    def num_followed(self) -> int:
        """Return the number of micro-batches that are run: all, or the depth plus enough to include the steady state.

        It is two more than the depth if a stage's order depends on its own depth alone; else all stages' warm-up is added.
        """
        schedule, own = self.schedule, self.schedule.in_flight[self.place]
        if schedule.splits_backward:
            return min(schedule.num_micro_batches, max(schedule.in_flight) + schedule.num_stages + 2)
        if schedule.virtual > 1:
            groups = 2 + math.ceil(own / schedule.virtual / schedule.num_stages)
            return min(schedule.num_micro_batches, groups * schedule.num_stages)
        return min(schedule.num_micro_batches, own + 2)

    def actions(self) -> list[Action]:
        """Return the actions of the micro-batches that are run."""
        return stage_actions(self.place, replace(self.schedule, num_micro_batches=self.num_followed))


def _simulate(
    programs: Sequence[Program],
    decisions: Decisions,
    make_optimizer: MakeOptimizer,
    target: Target,
    coords: Sequence[int] | None,
    timeline: bool,
    optimizer_cost: OptimizerCost | None,
    counts: Mapping[str, list[int]] | None,
    of_stage: _OfStage | None = None,
    room_of: Callable[[Executor], Room] | None = None,
    moved: Callable[[int], int] = int,
    known: KnownUpdates | None = None,
) -> Simulation:
    communicator = SimulatedCommunicator(decisions.mesh, coords)
    communicator.counts = counts or {}
    stores = [CountingStore(moved) for _ in programs]
    executors = [
        Executor(build_local(program, decisions, communicator), store) for program, store in zip(programs, stores)
    ]
    executor, program = executors[0], programs[0]
    room = None if room_of is None else room_of(executor)
    mode = new_mode()
    sources: dict[Tensor, Any] = {}
    for each in executors:
        fuse_attention(each, target)
        with mode:
            sources.update(fake_sources(each.local, sources))
        for tensor in each.local.program.given:
            del sources[tensor]  # it comes with each micro-batch
    params = [value for tensor, value in sources.items() if tensor.role == "param"]
    tracker = MemoryTracker(target)
    trained = [(tensor.key, value) for tensor, value in sources.items() if tensor.is_trained]
    gathered = _Gathered.of([each.local for each in executors], optimizer_cost)
    is_like_others = (
        room is None and not timeline and not decisions.offloaded_states and not _looks_back(optimizer_cost)
    )
    # Calls alike in repeated blocks are followed once. What collectives and fetches bring is allocated, never written.
    with KnownValues(mode, fills_memory=False):
        update = Update(make_optimizer, trained, tracker, gathered.step_bytes, known if is_like_others else None)
        with tracker:
            elsewhere = [] if room is None else [sources[tensor] for tensor in decisions.offloaded_params]
            tracker.watch(elsewhere, "input")
            tracker.watch([param for param in params if all(param is not away for away in elsewhere)], "param")
            tracker.watch([value for tensor, value in sources.items() if tensor.role == "buffer"], "buffer")
            tracker.watch([value for tensor, value in sources.items() if tensor.role in ("input", "const")], "input")
            state = torch.empty(gathered.state_bytes, dtype=torch.uint8)
            tracker.watch([state], "optimizer")
            states = CountingStore()
            # Found by the optimizer's step, as at run time.
            leaving = [sources[tensor] for tensor in decisions.offloaded_states if tensor in sources]
            away = StateOffload(states, leaving if room is None else [])
            update.warm_up([] if room is None else leaving)
            under_way = None if room is None else UnderWay(room, sources)
            if room is not None:
                tracker.hold(room.forward_values, "param")
            tracker.reset_peak()
            states.num_bytes = 0
            tracker.keep_timeline = timeline
            communicator.num_bytes.clear()
            communicator.num_calls.clear()
            if of_stage is not None:
                _stage_step(of_stage, executors, sources, update, tracker, communicator)
                _count_one_run(stores, of_stage.num_followed)
            elif program.num_runs == 1:
                _step(executor, sources, update, tracker, optimizer_cost, under_way)
            else:
                _accumulated_step(executor, sources, update, tracker, communicator)
                _count_one_run(stores, 2)
            del state
            away.close()
    return Simulation(
        tracker.peak_bytes,
        tracker.peak_at,
        {key: size for key, size in tracker.peak_breakdown.items() if size},
        dict(communicator.num_bytes),
        dict(communicator.num_calls),
        tracker.num_ops,
        executors,
        tracker.timeline,
        program.num_runs * sum(store.num_bytes for store in stores),
        program.num_runs * sum(store.num_transfers for store in stores),
        states.num_bytes,
    )


def _count_one_run(stores: Sequence[CountingStore], num_runs: int) -> None:
    """Make stores that counted `num_runs` equal micro-batches say what one of them moves."""
    for store in stores:
        store.num_bytes, store.num_transfers = store.num_bytes // num_runs, store.num_transfers // num_runs


@dataclass(frozen=True)
class _Gathered:
    """The bytes of state and of temporaries that the optimizer has beyond its shards, because it reads whole tensors."""

    state_bytes: int = 0
    step_bytes: int = 0

    @classmethod
    def of(cls, locals_: Sequence[LocalProgram], cost: OptimizerCost | None) -> _Gathered:
        if cost is None:
            return cls()
        mesh, coords = locals_[0].communicator.mesh, locals_[0].communicator.coords
        layouts = {tensor: local.values[index].layout for local in locals_ for tensor, index in local.sources.items()}
        state = step = 0
        for tensor, own in layouts.items():
            each = cost.of(tensor.key)
            whole = whole_pieces(tensor, own, each.reads)
            if not tensor.is_trained or whole == own:
                continue
            shapes = [local_shape(tensor.shape, tensor.slots, layout, mesh, coords) for layout in (whole, own)]
            if each.whole_state:
                state += each.state_bytes(shapes[0], tensor.dtype) - each.state_bytes(shapes[1], tensor.dtype)
            more, less = (each.step_temporary_bytes(shape, tensor.dtype) for shape in shapes)
            copies = 2 if each.reads == "tensor" else 1
            step = max(step, copies * math.prod(shapes[0]) * tensor.dtype.itemsize + more - less)
        return cls(max(0, state), max(0, step))


def fuse_attention(executor: Executor, target: Target) -> None:
    """Make attention run as the fused kernel that a GPU would run, if `target` is a GPU."""
    for instruction in executor.local.instructions:
        if isinstance(instruction, Compute) and find(instruction.op.name).fused_on_gpu:
            state = run_state(instruction.op, target)
            executor.calls[instruction.index] = _under(executor.calls[instruction.index], state)


def _under(call: BoundCall, state: RunState) -> BoundCall:
    def run(env: dict[int, Any], _: RunState) -> None:
        call(env, state)

    return run


def fake_sources(local: LocalProgram, known: Mapping[Tensor, Any] | None = None) -> dict[Tensor, Any]:
    """Return the rank's part of every parameter, buffer, batch entry and constant, as a fake tensor; skip those in `known`."""
    mesh, coords = local.communicator.mesh, local.communicator.coords
    sources: dict[Tensor, Any] = {}
    for tensor, index in local.sources.items():
        if known and tensor in known:
            continue
        shape = local_shape(tensor.shape, tensor.slots, local.values[index].layout, mesh, coords)
        value = torch.empty(shape, dtype=tensor.dtype)
        sources[tensor] = nn.Parameter(value, tensor.requires_grad) if tensor.role == "param" else value
    return sources


def _accumulated_step(
    executor: Executor,
    sources: Mapping[Tensor, Any],
    update: Update,
    tracker: MemoryTracker,
    communicator: SimulatedCommunicator,
) -> None:
    """Run a step of micro-batches with two of them, since every further one would hold and send what the second does."""
    seen: list[tuple[Counter[str], Counter[str]]] = []

    def note() -> None:
        seen.append((communicator.num_bytes.copy(), communicator.num_calls.copy()))

    part = {tensor: value for tensor, value in sources.items() if tensor.role == "input"}
    rest = {tensor: value for tensor, value in sources.items() if tensor.role != "input"}
    accumulator = Accumulator(executor)
    state = run_state(None, tracker.target)
    outputs = accumulator.run(rest, [part, part], state, tracker, note)
    loss = outputs[executor.local.program.captured.loss_index]
    for counted, before, after in zip((communicator.num_bytes, communicator.num_calls), *seen):
        for kind in after:
            counted[kind] += (accumulator.num - 2) * (after[kind] - before[kind])
    with tracker.phase("backward"):
        loss.backward()
    update.step()
    del outputs, loss


def _stage_step(
    of_stage: _OfStage,
    executors: Sequence[Executor],
    sources: Mapping[Tensor, Any],
    update: Update,
    tracker: MemoryTracker,
    communicator: SimulatedCommunicator,
) -> None:
    """Run one stage's part of a step; micro-batches that are left out count as communicating what the first one does."""
    counted = communicator.num_bytes, communicator.num_calls
    before = [Counter(each) for each in counted]
    one: list[Counter[str]] = [Counter(), Counter()]

    def note(action: Action) -> None:
        if of_stage.notes is not None:
            of_stage.notes.actions.append(action)
            of_stage.notes.note(tracker)
        for place, each in enumerate(counted):
            if action.micro == 0 and not action.what:
                one[place].update({kind: each[kind] - before[place][kind] for kind in each})
            before[place] = Counter(each)

    part = {tensor: value for tensor, value in sources.items() if tensor.role == "input"}
    rest = {tensor: value for tensor, value in sources.items() if tensor.role != "input"}
    pieces = list(map(Piece, of_stage.pieces, executors))
    runner = PipelineRunner(pieces, of_stage.actions(), NoLink(), of_stage.tied)
    state = run_state(None, tracker.target)
    if of_stage.notes is not None:
        of_stage.notes.note(tracker)
        of_stage.notes.one = one[0], one[1]
    loss = runner.run(rest, [part] * of_stage.num_followed, state, tracker, note)
    left_out = of_stage.schedule.num_micro_batches - of_stage.num_followed
    for each, of_one in zip(counted, one):
        for kind, num in of_one.items():
            each[kind] += left_out * num
    with tracker.phase("backward"):
        loss.backward()
    update.step()
    del loss


def _step(
    executor: Executor,
    sources: Mapping[Tensor, Any],
    update: Update,
    tracker: MemoryTracker,
    cost: OptimizerCost | None,
    under_way: UnderWay | None = None,
) -> None:
    """Run the step whose peak is predicted; the caller holds the outputs until the update is done.

    An optimizer with Hessian-vector products keeps the graph of the gradient until then; one that differentiates the outputs
    along vectors holds whole copies of them instead of the loss.
    """
    state = run_state(None, tracker.target)
    has_curvature = cost is not None and cost.differentiates_twice
    with sdpa_kernel(SDPBackend.MATH) if has_curvature else nullcontext():
        with tracker.phase("forward"):
            outputs = executor.run(sources, state)
            loss = outputs[executor.local.program.captured.loss_index]
            tracker.mark_forward_end()
            if under_way is not None:  # values stay for their update from the backward on
                tracker.hold(under_way.room.backward_values - under_way.room.forward_values, "param")
        with tracker.phase("backward"):
            if cost is not None and has_curvature:
                assert update.optimizer is not None
                _backward_with_curvature(loss, sources, update.optimizer, cost)
            elif cost is not None and cost.output_copies:
                del loss
                outputs = loss = _backward_along(outputs, executor.local.program, cost)
            else:
                loss.backward()
        if under_way is not None:
            under_way.finish()
    update.step()
    del outputs, loss


def _looks_back(cost: OptimizerCost | None) -> bool:
    """Return true for an optimizer whose update needs the graph: derivatives of gradients, or of outputs."""
    return cost is not None and (cost.differentiates_twice or cost.output_copies > 0)


def _backward_along(outputs: list[Any], program: Program, cost: OptimizerCost) -> list[torch.Tensor]:
    """Run the backward from the outputs instead of the loss, and return the whole copies of the outputs that every rank holds.

    The backward starts from one of these copies; for an output that is split over ranks, from the rank's part of the copy.
    """
    pairs = [
        (found, value)
        for found, value in zip(program.outputs, outputs)
        if isinstance(found, Tensor) and found is not program.loss and value.requires_grad
    ]
    outputs.clear()
    edges = [get_gradient_edge(value) for _, value in pairs]
    parts = [(value.shape, value.dtype, value.nbytes < found.num_bytes) for found, value in pairs]
    sizes = [found.num_bytes for found, _ in pairs]
    pairs.clear()
    whole = [torch.empty((cost.output_copies - 1) * size, dtype=torch.uint8) for size in sizes]
    first = [torch.empty(size, dtype=torch.uint8) for size, (*_, is_part) in zip(sizes, parts) if is_part]
    torch.autograd.backward(edges, [torch.empty(shape, dtype=dtype) for shape, dtype, _ in parts])
    del first
    return [*whole, *(torch.empty(size, dtype=torch.uint8) for size in sizes)]


def _backward_with_curvature(
    loss: Any, sources: Mapping[Tensor, Any], optimizer: torch.optim.Optimizer, cost: OptimizerCost
) -> None:
    """Set the gradients, after a Hessian-vector product with probes, which is held beside the gradients' graph.

    An optimizer that solves a linear system also holds the solver's vectors.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    whole = {value: tensor.shape for tensor, value in sources.items() if tensor.role == "param"}
    vectors = [
        torch.empty(cost.held_bytes(tuple(param.shape), param.dtype, whole[param]), dtype=torch.uint8)
        for param in params
    ]
    found = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
    pairs = [(param, grad) for param, grad in zip(params, found) if grad is not None]
    used = [(param, grad) for param, grad in pairs if grad.requires_grad]
    probes = [torch.empty_like(param) for param, _ in pairs]
    likewise = [probe for probe, (_, grad) in zip(probes, pairs) if grad.requires_grad]
    products = torch.autograd.grad(
        [grad for _, grad in used], [param for param, _ in pairs], likewise, allow_unused=True
    )
    estimates = [probe if product is None else probe * product for probe, product in zip(probes, products)]
    del products, estimates, vectors
    for param, grad in pairs:
        param.grad = grad.detach()
