"""What a decision costs on the cluster: seconds of an op under a split, and of a change of layout.

    op        Σ over its calls of  max(FLOPs · share / rate, bytes · share / bandwidth) + launch
    reshard   Σ over its steps of  hops · α + sent fraction · bytes / β        (`hardware.collectives`)

The share of the arithmetic is that of the op's loops on the fullest rank, the share of the traffic that of its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from ...artifacts import DEFAULT_IMBALANCE, Device, MeshAxis, Tier
from ...hardware.collectives import Collective, seconds
from ...ops import find
from ...ops.expert_limits import Limit
from ...ops.local import Pair, Rows, WithSum
from ...profiler.saved import CallCounter, OpRecord, Records, summary
from ...program.groups import Group, Split
from ...program.layout import REPLICATE, Layout, Slot, fraction, local_shape, local_sizes, slot_range
from ...program.program import Op, Program, Tensor
from ...program.transition import Step, gradient_layout, step_bytes, transition
from ...rank.early_sums import said_by_the_batch
from ...rank.offload import MIN_BYTES
from ...torch_internals.fakes import new_mode
from .update import Updates

LEAST_SHARE = 1 / 256
"""Optimizer states of a parameter that is smaller than so much of the largest one stay on the device."""


class OptimizerCost(Protocol):
    """What the planner asks of an optimizer: `trainwright.optim` records answer it."""

    @property
    def form(self) -> str:
        """How its step runs: `fused`, one pass over memory; `loop`, op after op; `foreach`, so on all parameters at once."""

    def with_options(self, form: str | None = None) -> OptimizerCost:
        """Return its answers in another form."""

    def of(self, key: str) -> OptimizerCost:
        """Return its answers for one parameter, whose settings may be others."""

    def on_fakes(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return what steps on parameters without values as it does."""

    @property
    def identity(self) -> Any:
        """What tells it from others, settings included."""

    @property
    def calls(self) -> float:
        """The host's work for each parameter beside its kernels, in launches of one."""

    @property
    def fused_flops(self) -> float:
        """Arithmetic of its single pass for each element, as so many FLOPs of a product; 0: less than its memory takes."""

    @property
    def needs_loss(self) -> bool:
        """Whether its step takes the loss with its graph, which it differentiates itself."""

    @property
    def differentiates_twice(self) -> bool:
        """True where its step takes Hessian-vector products, for which the graph of the gradient is kept."""

    @property
    def needs_values(self) -> bool:
        """Whether its step cannot be followed without values."""

    @property
    def reads(self) -> str:
        """The largest piece that one updated element depends on: element, block, row, matrix or model."""

    @property
    def whole_state(self) -> bool:
        """Whether the state of a piece that a shard cuts is kept whole on every rank."""

    @property
    def model_copies(self) -> int:
        """Copies of all parameters that are held at once while it steps."""

    @property
    def whole_copies(self) -> int:
        """Copies that every rank holds whole, however parameters are cut."""

    @property
    def output_copies(self) -> int:
        """Whole copies of the model's outputs, themselves included, that are held at once while it steps; 0: none but them."""

    @property
    def num_passes(self) -> float:
        """Forward and backward passes that a step takes on average."""

    @property
    def updates_alone(self) -> bool:
        """Whether each parameter's update reads nothing of any other."""

    def state_bytes(self, shape: Sequence[int], dtype: Any) -> int:
        """Bytes that it keeps for a parameter of `shape`."""

    def once_bytes(self) -> int:
        """Bytes that it keeps once, beside those."""

    def held_bytes(self, shape: Sequence[int], dtype: Any, whole: Sequence[int] | None = None) -> int:
        """Bytes for one parameter, or a part of the `whole`, of what its step holds of all at once."""

    def step_temporary_bytes(self, shape: Sequence[int], dtype: Any) -> int:
        """Peak bytes that its step allocates and frees again for one parameter."""


@dataclass(eq=False)
class CostModel:
    """Seconds and bytes on one device of the cluster, laid out as a mesh."""

    device: Device
    axes: tuple[MeshAxis, ...]
    records: Records
    num_passes: float = 1.0
    """Forward and backward passes to a step: an optimizer may take more than one, and each micro-batch takes its own."""
    num_runs: int = 1
    """Micro-batches to a pass."""
    tier: Tier | None = None
    """Where tensors may be offloaded to; None: nowhere."""
    min_offload_bytes: int = MIN_BYTES
    """What is smaller stays."""
    updates: Updates = field(default_factory=Updates)
    """What optimizers' steps take."""
    imbalance: float = DEFAULT_IMBALANCE
    """By how much the fullest rank may have more rows of experts than its even share."""
    _inner: dict[tuple[Op, tuple[int, ...]], Inner] = field(default_factory=dict)
    _moves: dict[tuple[Any, ...], float] = field(default_factory=dict)
    _changes: dict[tuple[Any, ...], int] = field(default_factory=dict)

    @cached_property
    def mesh(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def links(self) -> tuple[int, ...]:
        """Of each axis, the first that is laid over a link like its own: what goes along both shares the link."""
        rates = [(axis.bandwidth_bytes_per_s, axis.latency_s) for axis in self.axes]
        return tuple(rates.index(rate) for rate in rates)

    @property
    def _comm_factor(self) -> float:
        """By how much all communication takes longer than the hardware says, where that was learned."""
        return self.device.factors.get("communication", 1.0)

    def local_bytes(self, tensor: Tensor, layout: Layout) -> int:
        """Return the bytes of the fullest rank's part of `tensor`."""
        return math.ceil(tensor.num_bytes * fraction(tensor.slots, layout, self.mesh))

    def move_s(self, tensor: Tensor, source: Layout, target: Layout) -> float:
        """Return the seconds that `tensor` takes from one layout to another."""
        if source == target:
            return 0.0
        key = (tensor.slots, tensor.dtype.itemsize, source, target)
        if key not in self._moves:
            steps = transition(source, target)
            self._moves[key] = sum(self.step_s(step, tensor.slots, tensor.dtype.itemsize) for step in steps)
        return self._moves[key]

    def change_bytes(self, tensor: Tensor, source: Layout, target: Layout) -> int:
        """Return the most that a change of layout holds beside what it starts from, its result included."""
        if source == target:
            return 0
        key = (tensor.slots, tensor.dtype.itemsize, source, target)
        if key not in self._changes:
            most = made = 0
            for step in transition(source, target):
                taken, left = held_bytes(step, tensor.slots, tensor.dtype.itemsize, self.mesh)
                most, made = max(most, made + taken), left
            self._changes[key] = most
        return self._changes[key]

    def step_s(self, step: Any, slots: Sequence[Slot], itemsize: int) -> float:
        """Return the seconds of one step of a change of layout; what it copies on the device included."""
        num_bytes = step_bytes(step, slots, itemsize, self.mesh)
        copy_s = 2 * num_bytes / self.device.bandwidth_bytes_per_s + self.device.launch_s
        if step.kind == "slice":
            return self.num_passes * self._comm_factor * copy_s / self.mesh[step.axis]
        return self.num_passes * (self.collective_s(step.kind, step.axis, num_bytes) + self._comm_factor * copy_s)

    def collective_s(self, kind: Collective, axis: int, num_bytes: float) -> float:
        """Return the seconds of one collective over `axis`, once."""
        return self._comm_factor * seconds(kind, self.axes[axis], num_bytes)

    def edge_s(self, tensor: Tensor, native: Layout, forward: Layout, gradient: Layout) -> tuple[float, float] | None:
        """Return the seconds (forward, backward) to serve a want from `native`; `None` where no way leads."""
        try:
            there = self.move_s(tensor, native, forward)
            back = self.move_s(tensor, gradient, gradient_layout(native)) if tensor.requires_grad else 0.0
            if tensor.role == "param" and native == forward:
                back /= self.num_runs  # the gradient is summed up locally, and once over the ranks
        except ValueError:
            return None
        return there, back

    def latency_s(self, steps: Sequence[Any], slots: Sequence[Slot]) -> float:
        """Return what a way takes for a tensor without elements: the latency of its collectives, and of its copies."""
        return sum(self.step_s(step, slots, 0) for step in steps)

    def op_s(self, group: Group, op: Op, split: Split) -> tuple[float, float]:
        """Return the seconds (forward, backward) of `op`, without what it communicates inside."""
        scale = self.num_passes * self.device.factors.get("compute", 1.0)
        own = self._own_record(group, op, split)
        if own is not None:
            seconds = [
                sum(call.seconds(self.device, 1.0, 1.0) for call in calls) for calls in (own.forward, own.backward)
            ]
            return scale * seconds[0], scale * seconds[1]
        record = self.records[op]
        work = self.work_share(group, op, split)
        touched, written = self._byte_shares(group, op, split)
        forward_share = written if find(op.name).reads_rows else touched
        forward = sum(call.seconds(self.device, work, forward_share) for call in record.forward)
        backward = sum(call.seconds(self.device, work, touched) for call in record.backward)
        return scale * forward, scale * backward

    def weight_s(self, group: Group, op: Op, split: Split) -> float:
        """Return the seconds of one of the products in the backward of a linear map, which are equally many of x and of W."""
        work, (touched, _) = self.work_share(group, op, split), self._byte_shares(group, op, split)
        calls = [call for call in self.records[op].backward if call.flops]
        scale = self.num_passes * self.device.factors.get("compute", 1.0)
        return scale * sum(call.seconds(self.device, work, touched) for call in calls) / 2 if len(calls) > 1 else 0.0

    def work_share(self, group: Group, op: Op, split: Split) -> float:
        """Return the share of the op's loop nest that the fullest rank runs."""
        own = {index for (position, _, _), index in group.loop_at.items() if position == op.position}
        share = 1.0
        for index in own & set(split):
            size = group.loops[index].size
            start, stop = slot_range(size, [(self.mesh[axis], 0) for axis, loop in enumerate(split) if loop == index])
            share *= (stop - start) / size
        return share

    def forward_bytes(self, group: Group, op: Op, split: Split) -> int:
        """Return the most that the forward of `op` holds beside what it is given, makes and saves."""
        own = self._own_record(group, op, split)
        whole = self.records[op].forward_bytes
        return int(whole * self.work_share(group, op, split)) if own is None else own.forward_bytes

    def internal_bytes(self, group: Group, op: Op, split: Split) -> int:
        """Return what `op` saves that is neither an argument nor a result."""
        own = self._own_record(group, op, split)
        whole = self.records[op].internal_bytes
        return int(whole * self.work_share(group, op, split)) if own is None else own.internal_bytes

    def _own_record(self, group: Group, op: Op, split: Split) -> OpRecord | None:
        """Return the measured costs of the rank's part of `op`, where its size is not the product of its loops' shares."""
        return self._inner_of(group, op, split).record if find(op.name).by_running else None

    def _byte_shares(self, group: Group, op: Op, split: Split) -> tuple[float, float]:
        """The local share of the bytes of arguments and outputs together, and of the outputs alone."""
        read = [(tensor, group.input_layout(op, place, split)[0]) for place, tensor in enumerate(op.inputs)]
        written = [(tensor, group.output_layout(op, place, split)) for place, tensor in enumerate(op.outputs)]
        return self._share(read + written), self._share(written)

    def _share(self, tensors: list[tuple[Tensor, Layout]]) -> float:
        whole = sum(tensor.num_bytes for tensor, _ in tensors)
        return sum(self.local_bytes(tensor, layout) for tensor, layout in tensors) / whole if whole else 1.0

    def inner_s(self, group: Group, op: Op, split: Split, early: bool | None = None) -> tuple[float, float]:
        """Return the seconds (forward, backward) that `op` communicates inside itself, where its split makes it.

        early: whether a sum that it takes of the batch alone begins with the step, and is free; None, where the program is
        not known yet: as if it did whenever no op stands in the way (`early_sums`).
        """
        found = self._inner_of(group, op, split)
        sum_s = 0.0 if (found.may_be_early if early is None else early) else found.sum_s
        return self.num_passes * (found.forward_s + sum_s), self.num_passes * found.backward_s

    def backward_bytes(self, group: Group, op: Op, split: Split, share: float) -> int:
        """Return the most that the backward of `op` holds beside what was saved and what it is given.

        share: that of the rank in the tensors of the op, by which whole kernels scale; one that communicates inside itself
        has other kernels, and is measured.
        """
        found = self._inner_of(group, op, split).record
        return int(share * self.records[op].backward_bytes) if found is None else found.backward_bytes

    def _inner_of(self, group: Group, op: Op, split: Split) -> Inner:
        if find(op.name).localize is None or all(loop < 0 for loop in split):
            return Inner()
        key = (op, split)
        if key not in self._inner:
            self._inner[key] = inner_costs(self, group, op, split)
        return self._inner[key]

    def optimizer_s(self, tensor: Tensor, layout: Layout, optimizer: OptimizerCost) -> float:
        """Return the seconds of the update of one parameter, in the form that runs (`update`).

        Where the layout cuts pieces that the optimizer reads whole, each rank gathers and updates them whole, or one rank
        does for all.
        """
        gradient_bytes = 3 * self.local_bytes(tensor, layout)
        adding_s = gradient_bytes / self.device.bandwidth_bytes_per_s + self.device.launch_s
        adding_s *= (self.num_runs - 1) * self.num_passes / self.num_runs
        return adding_s + min(self._update_ways(tensor, layout, optimizer.of(tensor.key)))

    def is_owned(self, tensor: Tensor, layout: Layout, optimizer: OptimizerCost) -> bool:
        """Tell whether it is quicker that one rank updates the parameter for all, and sends it."""
        ways = self._update_ways(tensor, layout, optimizer.of(tensor.key))
        return len(ways) > 1 and ways[1] < ways[0]

    def _update_ways(self, tensor: Tensor, layout: Layout, own: OptimizerCost) -> tuple[float, ...]:
        """The seconds of an update on every rank's part or whole, and, of what is read whole, those of one by its owner.

        Owners have as much to do as one another: of each one's work a rank is charged its share.
        """
        pieces = whole_pieces(tensor, layout, own.reads)
        shape = self.local_shape(tensor, pieces)
        step_s = self.updates.seconds(self.device, own, shape, tensor.dtype) * self.device.factors.get("update", 1.0)
        gather_s = self.move_s(tensor, layout, pieces) / self.num_passes
        num_ranks = math.prod(self.mesh)
        if own.reads != "tensor" or num_ranks == 1:
            return (step_s + gather_s,)
        send_s = sum(self.collective_s("all_gather", axis, tensor.num_bytes) for axis in range(len(self.mesh)))
        return step_s + 2 * gather_s, step_s / num_ranks + 2 * gather_s + send_s

    def state_bytes(self, tensor: Tensor, layout: Layout, optimizer: OptimizerCost) -> int:
        """Return the bytes of optimizer state that a rank keeps for a parameter; one with an owner counts as everybody's."""
        own = optimizer.of(tensor.key)
        kept = whole_pieces(tensor, layout, own.reads) if own.whole_state else layout
        return own.state_bytes(self.local_shape(tensor, kept), tensor.dtype)

    def leaving_state_bytes(self, tensor: Tensor, layout: Layout, optimizer: OptimizerCost) -> int:
        """Return what of these can leave the device between updates: all but counters; 0 where it has to stay.

        It has to where parameters are not updated one by one, and where a rank keeps the state of more than its own part.
        """
        own = optimizer.of(tensor.key)
        whole = own.whole_state and whole_pieces(tensor, layout, own.reads) != layout
        if not optimizer.updates_alone or whole:
            return 0
        counters = own.state_bytes((0,), tensor.dtype)
        return max(0, self.state_bytes(tensor, layout, optimizer) - counters)

    def step_bytes(self, tensor: Tensor, layout: Layout, optimizer: OptimizerCost) -> int:
        """Return the peak bytes of a parameter's update: those of the step, and of what it gathers for it."""
        own = optimizer.of(tensor.key)
        pieces = whole_pieces(tensor, layout, own.reads)
        held = own.step_temporary_bytes(self.local_shape(tensor, pieces), tensor.dtype)
        copies = 2 if own.reads == "tensor" else 1  # the parameter, too, is gathered
        return held if pieces == layout else held + copies * self.local_bytes(tensor, pieces)

    def local_shape(self, tensor: Tensor, layout: Layout) -> tuple[int, ...]:
        return local_shape(tensor.shape, tensor.slots, layout, self.mesh, None)


def cost_model(program: Program, device: Device, axes: tuple[MeshAxis, ...], records: Records, num_passes: float,
               imbalance: float = DEFAULT_IMBALANCE) -> CostModel:  # fmt: skip
    """Return the costs of a program's step; `num_passes` are the optimizer's, each over all micro-batches."""
    return CostModel(device, axes, records, num_passes * program.num_runs, program.num_runs, imbalance=imbalance)


def whole_pieces(tensor: Tensor, layout: Layout, reads: str) -> Layout:
    """Return the layout, as little gathered as can be, in which no piece that an optimizer reads is cut."""
    cut = {"row": 1, "matrix": len(tensor.shape) - 2, "tensor": 0, "model": 0}.get(reads, len(tensor.shape))
    return tuple(REPLICATE if at >= 0 and tensor.slots[at].dim >= cut else at for at in layout)


def held_bytes(step: Step, slots: Sequence[Slot], itemsize: int, mesh: Sequence[int]) -> tuple[int, int]:
    """Return the bytes that one step of a change of layout takes beside its operand, and those that it leaves.

    Parts that are not consecutive in memory are copied before they are sent and after they have come.
    """
    before, after = (local_sizes(slots, layout, mesh, None) for layout in (step.before, step.after))
    given, left = itemsize * math.prod(before), itemsize * math.prod(after)
    if step.kind == "all_gather":
        return left if math.prod(before[: step.slot]) == 1 else 2 * left, left
    copies = {"all_reduce": 0, "slice": 0, "reduce_scatter": given, "all_to_all": given + left}
    return copies[step.kind] + left, left


class TimedAxes:
    """An `AxisGroup` that only adds up what its reductions would take."""

    def __init__(self, costs: CostModel, axes: Sequence[int], add: Callable[[float], None]) -> None:
        self.costs, self.axes, self.add = costs, tuple(axes), add
        self.size = math.prod(costs.mesh[axis] for axis in axes)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Return `tensor` as it is, and note the time of its reduction."""
        for axis in self.axes:
            self.add(self.costs.collective_s("all_reduce", axis, tensor.numel() * tensor.element_size()))
        return tensor

    def all_to_all(self, flat: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Return something of the size of what is received, and note the time of the exchange on the fullest rank."""
        received = flat.new_empty(sum(receive))
        num_bytes = max(flat.numel(), received.numel()) * flat.element_size()
        self.add(self.costs.collective_s("all_to_all", self.axes[0], num_bytes))
        return received

    def begin(self, tensor: torch.Tensor) -> Any:
        """Nothing is begun where it is only timed."""
        raise NotImplementedError


@dataclass(frozen=True)
class Inner:
    """The cost of what an op communicates inside itself."""

    sum_s: float = 0.0
    """The seconds of a sum of what some operands alone say, which may begin with the step (`ops.local.WithSum`)."""
    may_be_early: bool = False
    """Whether no op stands in the way of that."""
    forward_s: float = 0.0
    """The seconds of all else."""
    backward_s: float = 0.0
    record: OpRecord | None = None
    """The other costs of its part, by a run; None of an op that does not communicate, which takes its share of the whole."""


def inner_costs(costs: CostModel, group: Group, op: Op, split: Split) -> Inner:
    """Run the local form of `op` on fake tensors, if it asks for a group of ranks, and watch it."""
    with new_mode():
        return _inner_costs(_Probe(costs, group, op, split), op)


def _inner_costs(context: _Probe, op: Op) -> Inner:
    rule = find(op.name).localize
    assert rule is not None
    values = [torch.empty(context.in_shape(place), dtype=tensor.dtype) for place, tensor in enumerate(op.inputs)]
    for value, tensor in zip(values, op.inputs):
        value.requires_grad_(tensor.requires_grad)
    queue = iter(values)
    args, kwargs = torch.fx.map_arg((op.node.args, op.node.kwargs), lambda node: next(queue))
    function, args, kwargs = rule(context, op.node.target, tuple(args), dict(kwargs))
    if not context.asked and not find(op.name).by_running:
        return Inner()
    sum_s, may_be_early = 0.0, False
    if isinstance(function, WithSum):
        may_be_early = said_by_the_batch(_summed(function, args, dict(zip(values, op.inputs))))
        function = partial(function.function, function.total(args))
        sum_s, context.total = context.total, 0.0
    saved: list[torch.Tensor] = []
    forward, backward = CallCounter("cpu"), CallCounter("cpu")
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: _noted(tensor, saved), lambda tensor: tensor),
        forward.tracker,
    ):
        out = function(*args, **kwargs)
    forward_s, left = context.total, forward.tracker.live_bytes
    if out.requires_grad:
        backward.tracker.watch([*values, *saved, out], "input")
        with backward.tracker:
            given = torch.empty_like(out)
            backward.tracker.watch([given], "input")
            kept = torch.autograd.grad([out], [value for value in values if value.requires_grad], [given])
        del kept
    record = summary(forward, left, backward, values, [out], saved)
    return Inner(sum_s, may_be_early, forward_s, context.total - forward_s, record)


def _summed(function: WithSum, args: Sequence[Any], tensors: Mapping[torch.Tensor, Tensor]) -> list[Tensor]:
    """The tensors of which a local function takes the sum over ranks."""
    return [tensors[args[place]] for place in function.places if isinstance(args[place], torch.Tensor)]


def _noted(tensor: torch.Tensor, saved: list[torch.Tensor]) -> torch.Tensor:
    saved.append(tensor.detach())
    return tensor


class _Probe:
    """A `LocalContext` on the fullest rank that notes whether the op communicates."""

    def __init__(self, costs: CostModel, group: Group, op: Op, split: Split) -> None:
        self.costs, self.group, self.op, self.chosen = costs, group, op, split
        self.asked, self.total = False, 0.0
        self.imbalance = costs.imbalance

    def out_shape(self, index: int = 0) -> tuple[int, ...]:
        return self.costs.local_shape(self.op.outputs[index], self.group.output_layout(self.op, index, self.chosen))

    def in_shape(self, index: int) -> tuple[int, ...]:
        return self.costs.local_shape(self.op.inputs[index], self.group.input_layout(self.op, index, self.chosen)[0])

    def global_shape(self, index: int) -> tuple[int, ...]:
        return self.op.inputs[index].shape

    def _axes(self, loops: Sequence[str]) -> tuple[int, ...]:
        found = {axis for loop in loops for axis in self.group.op_axes(self.op, loop, self.chosen)}
        return tuple(sorted(axis for axis in found if self.costs.mesh[axis] > 1))

    def split(self, *loops: str) -> bool:
        return bool(self._axes(loops))

    def owner(self, *loops: str) -> bool:
        return True

    def group_of(self, *loops: str) -> TimedAxes:
        self.asked = True
        return TimedAxes(self.costs, self._axes(loops), self._add)

    def range_of(self, loop: str) -> tuple[int, int]:
        return self._range_at(loop, (0,) * len(self.costs.mesh))

    def _range_at(self, loop: str, coords: Sequence[int]) -> tuple[int, int]:
        splits = [(self.costs.mesh[axis], coords[axis]) for axis in self._axes([loop])]
        return slot_range(self.op.signature.sizes.get(loop, 1), splits)

    def pair_of(self, first: str, second: str) -> Pair | None:
        axes = [axis for axis in self.group.pair_axes(self.chosen) if self.costs.mesh[axis] > 1]
        if not axes:
            return None
        self.asked = True
        peers = [
            [peer if at == axes[0] else 0 for at in range(len(self.costs.mesh))]
            for peer in range(self.costs.mesh[axes[0]])
        ]
        ranges = tuple(self._range_at(second, coords) for coords in peers)
        return Pair(TimedAxes(self.costs, axes, self._add), 0, ranges)

    def count(self, numbers: torch.Tensor, rows: Rows) -> list[int]:
        return rows.planned

    def limit(self) -> str:
        return Limit.NONE

    def _add(self, elapsed_s: float) -> None:
        self.total += elapsed_s
