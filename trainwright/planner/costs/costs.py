"""The costs of an option on a cluster: the seconds of an op under a split, and of a reshard.

    op        Σ over its calls of  max(FLOPs · share / rate, bytes · share / bandwidth) + launch
              where kernels were measured, their share of the measured seconds, and Python's and the dispatcher's for each call
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
from ...ops.local import Mirror, Pair, Rows, WithSum
from ...ops.sampled import variance_bound
from ...profiler.caching import block_bytes
from ...profiler.saved import CallCounter, OpRecord, Records, run_state, saved_tensors, summary
from ...program.groups import Group, Split
from ...program.layout import REPLICATE, Layout, Slot, fraction, local_shape, slot_range
from ...program.program import Op, Program, Tensor
from ...program.sampling import can_sample, share_of
from ...program.transition import ReshardStep, gradient_layout, held_bytes, step_bytes, transition
from ...rank.early_sums import said_by_the_batch
from ...rank.local import consecutive_range, sampled_form
from ...rank.offload import MIN_BYTES
from ...rank.randomness import without_dropout
from ...tiers import Policy
from ...torch_internals.fakes import FakeMode, new_mode
from .update import Updates

LEAST_SHARE = 1 / 256
"""The optimizer states of a parameter smaller than this share of the largest one are never offloaded."""


class OptimizerCost(Protocol):
    """The interface of an optimizer that the planner uses; the records of `trainwright.optim` implement it."""

    @property
    def form(self) -> str:
        """Return how its step runs.

        `fused` is one pass over memory, `loop` runs its ops parameter after parameter, `foreach` each op on all parameters.
        """

    def with_options(self, form: str | None = None) -> OptimizerCost:
        """Return this record for a step that runs in another form."""

    def of(self, key: str) -> OptimizerCost:
        """Return the record for one parameter, which may have settings of its own."""

    def on_fakes(self, params: Iterable[Any]) -> torch.optim.Optimizer:
        """Return an optimizer that can step on fake parameters, in the form that runs."""

    @property
    def identity(self) -> Any:
        """Return a key that differs between optimizers and between their settings."""

    @property
    def calls(self) -> float:
        """Return the host's work for each parameter beside the kernels, in units of one kernel launch."""

    @property
    def fused_flops(self) -> float:
        """Return the arithmetic of its fused pass for each element, in FLOPs of a product; 0 where memory dominates."""

    @property
    def needs_loss(self) -> bool:
        """Return True if its step is given the loss with its autograd graph and differentiates it itself."""

    @property
    def differentiates_twice(self) -> bool:
        """Return True if its step takes Hessian-vector products, for which the graph of the gradient is kept."""

    @property
    def needs_values(self) -> bool:
        """Return True if its step depends on the values of tensors, so that it cannot run on fake tensors."""

    @property
    def reads(self) -> str:
        """Return the largest piece that an element's update reads: element, block, row, matrix, tensor or model."""

    @property
    def whole_state(self) -> bool:
        """Return True if every rank keeps the whole state of a piece that sharding cuts."""

    @property
    def model_copies(self) -> int:
        """Return the number of copies of all parameters that it holds at once during its step."""

    @property
    def whole_copies(self) -> int:
        """Return the number of copies of all parameters that every rank holds whole, however parameters are sharded."""

    @property
    def output_copies(self) -> int:
        """Return the number of copies of the model's outputs that it holds whole, themselves included; 0: none."""

    @property
    def num_passes(self) -> float:
        """Return the average number of forward and backward passes in a step."""

    @property
    def updates_alone(self) -> bool:
        """Return True if the update of each parameter reads no other parameter."""

    def state_bytes(self, shape: Sequence[int], dtype: Any) -> int:
        """Return the bytes of state that it keeps for a parameter of `shape`."""

    def once_bytes(self) -> int:
        """Return the bytes of state that it keeps once, whatever the number of parameters."""

    def held_bytes(self, shape: Sequence[int], dtype: Any, whole: Sequence[int] | None = None) -> int:
        """Return one parameter's share, in bytes, of what its step holds for all parameters at once.

        whole: the parameter's whole shape where `shape` is that of a shard.
        """

    def step_temporary_bytes(self, shape: Sequence[int], dtype: Any) -> int:
        """Return the peak bytes that its step allocates and frees again for one parameter."""

    def left_bytes(self, shape: Sequence[int], dtype: Any) -> int:
        """Return the bytes that its step still holds of one parameter while it updates the next."""


@dataclass(eq=False)
class CostModel:
    """The seconds and bytes of options on one device of a cluster that is laid out as a mesh."""

    device: Device
    axes: tuple[MeshAxis, ...]
    records: Records
    num_passes: float = 1.0
    """The forward and backward passes of a step: those that an optimizer takes, for each micro-batch."""
    num_runs: int = 1
    """The number of micro-batches that each pass runs."""
    tier: Tier | None = None
    """The tier that tensors may be offloaded to; None if there is none."""
    resting: Policy | None = None
    """The use of the disks on which parameters and states may rest; None where none may."""
    min_offload_bytes: int = MIN_BYTES
    """Tensors smaller than this are not offloaded."""
    updates: Updates = field(default_factory=Updates)
    """Prices the optimizers' steps, and caches them."""
    imbalance: float = DEFAULT_IMBALANCE
    """The ratio of the rows of experts on the fullest rank to its even share."""
    sampled: float = 0.0
    """The share of its rows that a linear map may keep for its weight's gradient, which is then an estimate; 0: none may."""
    _inner: dict[tuple[Op, tuple[int, ...]], Inner] = field(default_factory=dict)
    _moves: dict[tuple[Any, ...], float] = field(default_factory=dict)
    _steps: dict[tuple[Any, ...], float] = field(default_factory=dict)
    _changes: dict[tuple[Any, ...], tuple[int, int]] = field(default_factory=dict)

    @cached_property
    def mesh(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    @cached_property
    def links(self) -> tuple[int, ...]:
        """Return, for each axis, the first axis over the same kind of link; collectives of both share that link."""
        crossed = [axis.crossed for axis in self.axes]
        return tuple(crossed.index(link) for link in crossed)

    @cached_property
    def fakes(self) -> FakeMode:
        """Return the mode in which ops run on fake tensors; one for all, since making one takes as long as an op."""
        return new_mode()

    @property
    def _comm_factor(self) -> float:
        """Return the learned factor by which communication is slower than the cluster says; 1 if none was learned."""
        return self.device.factors.get("communication", 1.0)

    def local_bytes(self, tensor: Tensor, layout: Layout) -> int:
        """Return the bytes of the fullest rank's part of `tensor`."""
        return math.ceil(tensor.num_bytes * fraction(tensor.slots, layout, self.mesh))

    def block_bytes(self, tensor: Tensor, layout: Layout) -> int:
        """Return the memory that the fullest rank's part of `tensor` takes: on a GPU, whole blocks of its allocator."""
        return self.taken_bytes(self.local_bytes(tensor, layout))

    def taken_bytes(self, num_bytes: int) -> int:
        """Return the memory that a tensor of `num_bytes` takes on the device."""
        return block_bytes(num_bytes) if self.device.kind == "gpu" else num_bytes

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
        """Return the peak bytes that a reshard holds beside its operand, its result included."""
        return self._held_bytes(tensor, source, target)[0]

    def step_held_bytes(self, tensor: Tensor, step: ReshardStep) -> int:
        """Return the memory that one step of a reshard takes beside its operand, its result included."""
        taken, _ = held_bytes(step, tensor.slots, tensor.dtype.itemsize, self.mesh, tensor.order)
        return sum(map(self.taken_bytes, taken))

    def copy_bytes(self, tensor: Tensor, source: Layout, target: Layout) -> int:
        """Return the memory that a tensor in `target` takes if it was made from one in `source`: a gather's result is padded."""
        return self._held_bytes(tensor, source, target)[1] or self.block_bytes(tensor, target)

    def _held_bytes(self, tensor: Tensor, source: Layout, target: Layout) -> tuple[int, int]:
        """Return the bytes that a reshard holds at its peak, and when it is done."""
        key = (tensor.slots, tensor.order, tensor.dtype.itemsize, source, target)
        if key not in self._changes:
            most = made = 0
            for step in transition(source, target):
                taken, left = held_bytes(step, tensor.slots, tensor.dtype.itemsize, self.mesh, tensor.order)
                most, made = max(most, made + sum(map(self.taken_bytes, taken))), self.taken_bytes(left)
            self._changes[key] = most, made
        return self._changes[key]

    def step_s(self, step: Any, slots: Sequence[Slot], itemsize: int) -> float:
        """Return the seconds of one step of a change of layout; what it copies on the device included."""
        key = (step, slots, itemsize)
        if key not in self._steps:
            self._steps[key] = self._step_s(step, slots, itemsize)
        return self._steps[key]

    def _step_s(self, step: Any, slots: Sequence[Slot], itemsize: int) -> float:
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
        """Return the seconds of a reshard of an empty tensor: the latencies of its collectives and copies."""
        return sum(self.step_s(step, slots, 0) for step in steps)

    def op_s(self, group: Group, op: Op, split: Split) -> tuple[float, float]:
        """Return the seconds (forward, backward) of `op`, without what it communicates inside."""
        scale = self.num_passes * self.device.factors.get("compute", 1.0)
        own = self._own_record(group, op, split)
        record = self.records[op] if own is None else own
        host = self._host_s(record)
        if own is not None:
            seconds = [
                sum(call.seconds(self.device, 1.0, 1.0) for call in calls) for calls in (own.forward, own.backward)
            ]
            return scale * (seconds[0] + host[0]), scale * (seconds[1] + host[1])
        work = self.work_share(group, op, split)
        touched, written = self._byte_shares(group, op, split)
        forward_share = written if find(op.name).reads_rows else touched
        forward = sum(call.seconds(self.device, work, forward_share) for call in record.forward)
        backward = sum(call.seconds(self.device, work, touched) for call in record.backward)
        return scale * (forward + host[0]), scale * (backward + host[1])

    def fixed_s(self, program: Program) -> float:
        """Return what a CPU's host takes in a step for calls that no decision changes.

        They are one for each constant of `program`, a stage's or the whole, and a view of each parameter that it reads.
        """
        if self.device.kind == "gpu":
            return 0.0
        num_calls = sum(op.constant for op in program.ops) + sum(bool(tensor.consumers) for tensor in program.params)
        scale = self.num_passes * self.device.factors.get("compute", 1.0)
        return scale * self.device.overheads.forward_s * num_calls

    def _host_s(self, record: OpRecord) -> tuple[float, float]:
        """Return what the host takes for the calls of an op beyond their kernels (`hardware.overheads`), forward and backward.

        On a GPU the host runs ahead of the device, which a sum over ops does not show: nothing is added there.
        """
        if self.device.kind == "gpu":
            return 0.0, 0.0
        overheads, (forward, backward) = self.device.overheads, record.num_calls
        return overheads.forward_s * forward, overheads.backward_s * backward

    def launches_s(self, op: Op) -> tuple[float, float]:
        """Return what of `op_s` no smaller share of the batch takes less of, under any split: what each call takes of the host."""
        if find(op.name).by_running or op.signature.ordered:
            return 0.0, 0.0  # a rank's part may be other calls
        record, scale = self.records[op], self.num_passes * self.device.factors.get("compute", 1.0)
        forward, backward = (
            sum(call.launch_s(self.device) for call in calls) + host_s
            for calls, host_s in zip((record.forward, record.backward), self._host_s(record))
        )
        return scale * forward, scale * backward

    def weight_s(self, group: Group, op: Op, split: Split) -> float:
        """Return the seconds of one of the products in the backward of a linear map, which are equally many of x and of W."""
        if self._is_sampled(op, split):
            return 0.0  # it is made at once, from the rows that were kept
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
        """Return the peak bytes that the forward of `op` holds beside its inputs, its outputs and what it saves.

        They are scaled as the op's work, or measured, as those of `backward_bytes` are.
        """
        found = self._inner_of(group, op, split).record
        if found is not None:
            return found.forward_bytes
        return int(self.records[op].forward_bytes * self.work_share(group, op, split))

    def internal_bytes(self, group: Group, op: Op, split: Split) -> int:
        """Return the memory that `op` saves and that is neither an input nor an output; copies of inputs are."""
        found, whole = self._inner_of(group, op, split).record, self.records[op]
        if found is None:
            share = self.work_share(group, op, split)
            return sum(self.taken_bytes(int(num_bytes * share)) for num_bytes in whole.internals)
        # measured on inputs without gaps, of which it saves some as they are; the whole op saved copies of them
        copied = found.saved_inputs - whole.saved_inputs if whole.internals else ()
        copies = [self.local_bytes(op.inputs[place], group.input_layout(op, place, split)[0]) for place in copied]
        return sum(map(self.taken_bytes, (*found.internals, *copies)))

    def has_internals(self, group: Group, op: Op, split: Split) -> bool:
        """Tell whether `op` saves anything that is neither an input nor an output."""
        return any((self._inner_of(group, op, split).record or self.records[op]).internals)

    def saved_inputs(self, group: Group, op: Op, split: Split) -> frozenset[int]:
        """Return the places of the tensor arguments whose memory the backward of `op` needs."""
        sampled = self._inner_of(group, op, split).record if self._is_sampled(op, split) else None
        return (sampled or self.records[op]).saved_inputs

    def variance_bound(self, group: Group, split: Split) -> float:
        """Return the variance of a sampled weight's gradient, in Σ_i ‖g_i‖² ‖x_i‖², of rows of equal norm (`ops.sampled`)."""
        op = next(op for op in group.ops if can_sample(op))
        rows = self.local_shape(op.inputs[0], group.input_layout(op, 0, split)[0])[:-1]
        return variance_bound(math.prod(rows), share_of(split))

    def _is_sampled(self, op: Op, split: Split) -> bool:
        return share_of(split) > 0 and can_sample(op)

    def is_uneven(self, group: Group, op: Op, split: Split) -> bool:
        """Tell whether `op` may save or take for a moment another share, of what is neither input nor output, than it runs.

        It does where it reads an input whole that it saves a copy of, as attention does whose queries alone are split; and where
        its scratch memory is no multiple of its work, as that of the sum which makes the gradient of a bias.
        """
        if self.records[op].scratch_is_uneven:
            return True
        places = [k for k, tensor in enumerate(op.inputs) if tensor.num_bytes in self.records[op].internals]
        parts = [self.local_shape(op.inputs[k], group.input_layout(op, k, split)[0]) for k in places]
        is_cut = [part != op.inputs[k].shape for k, part in zip(places, parts)]
        return any(is_cut) and not all(is_cut)

    def _own_record(self, group: Group, op: Op, split: Split) -> OpRecord | None:
        """Return the measured costs of the rank's part of `op`, where its size is not the product of its loops' shares."""
        found = self._inner_of(group, op, split)
        has_own = find(op.name).by_running or self._is_sampled(op, split) or op.signature.ordered
        return found.record if has_own else None

    def _byte_shares(self, group: Group, op: Op, split: Split) -> tuple[float, float]:
        """Return the rank's share of the bytes of inputs and outputs together, and of the outputs alone."""
        read = [(tensor, group.input_layout(op, place, split)[0]) for place, tensor in enumerate(op.inputs)]
        written = [(tensor, group.output_layout(op, place, split)) for place, tensor in enumerate(op.outputs)]
        return self._share(read + written), self._share(written)

    def _share(self, tensors: list[tuple[Tensor, Layout]]) -> float:
        whole = sum(tensor.num_bytes for tensor, _ in tensors)
        return sum(self.local_bytes(tensor, layout) for tensor, layout in tensors) / whole if whole else 1.0

    def inner_s(self, group: Group, op: Op, split: Split, early: bool | None = None) -> tuple[float, float]:
        """Return the seconds (forward, backward) of the collectives that the local form of `op` issues under `split`.

        early: whether a sum that reads the batch alone begins with the step, which makes it free. None assumes that it does
        wherever no op stands in the way (`early_sums`), for a program that is not known yet.
        """
        found = self._inner_of(group, op, split)
        sum_s = 0.0 if (found.may_be_early if early is None else early) else found.sum_s
        return self.num_passes * (found.forward_s + sum_s), self.num_passes * found.backward_s

    def backward_bytes(self, group: Group, op: Op, split: Split) -> tuple[int, int]:
        """Return the peak bytes that the backward of `op` holds beside the saved tensors and the incoming gradients.

        The first is that until it has read what was saved, the second that afterwards. These are the gradients that it makes, and
        its kernels' scratch memory, which is scaled as the op's work. An op whose local form communicates runs other kernels,
        and of one that `is_uneven` a part takes another share: both are measured.
        """
        found = self._inner_of(group, op, split).record
        if found is not None:
            return found.backward_bytes
        bytes_of = {t: self.gradient_bytes(group, op, k, split) for k, t in enumerate(op.inputs) if t.requires_grad}
        made, local = sum(t.num_bytes for t in bytes_of), sum(bytes_of.values())

        def scaled(whole: int) -> int:
            if whole < made:  # some gradients are the incoming ones, or views of them
                return int(whole * local / made)
            return local + int((whole - made) * self.work_share(group, op, split))

        until_read, after = self.records[op].backward_bytes
        return scaled(until_read), scaled(after)

    def gradient_bytes(self, group: Group, op: Op, place: int, split: Split) -> int:
        """Return the memory of the gradient that the backward of `op` makes of its tensor argument at `place`."""
        return self.block_bytes(op.inputs[place], group.input_layout(op, place, split)[1])

    def _inner_of(self, group: Group, op: Op, split: Split) -> Inner:
        is_whole = all(loop < 0 for loop in split)
        is_plain = is_whole or (find(op.name).localize is None and not self.is_uneven(group, op, split))
        if is_plain and not self._is_sampled(op, split):
            return Inner()
        key = (op, split)
        if key not in self._inner:
            self._inner[key] = self._new_inner(group, op, split)
        return self._inner[key]

    def _new_inner(self, group: Group, op: Op, split: Split) -> Inner:
        """Run the local form of `op`, unless one of the same shapes and split loops, on this mesh or another, had no costs."""
        probe = _Probe(self, group, op, split)
        shapes = tuple(map(probe.in_shape, range(len(op.inputs)))), tuple(map(probe.out_shape, range(len(op.outputs))))
        loops = frozenset(loop for loop, num in zip(split, self.mesh) if loop >= 0 and num > 1)
        looks = op, shapes, loops, share_of(split)
        if looks in self.records.silent:
            return Inner()
        found = inner_costs(self, group, op, split)
        if found == Inner():
            self.records.silent.add(looks)
        return found

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
        """Return the seconds of an update done by every rank; where whole tensors are read, also done by an owner.

        Owners are assumed to have equal work, so a rank is charged its share of each owner's update.
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
        """Return the memory of the optimizer state that a rank keeps for a parameter; one with an owner counts as everybody's."""
        own = optimizer.of(tensor.key)
        kept = whole_pieces(tensor, layout, own.reads) if own.whole_state else layout
        total = own.state_bytes(self.local_shape(tensor, kept), tensor.dtype)
        if self.device.kind != "gpu":
            return total
        total -= own.state_bytes((0,), tensor.dtype)  # counters stay on the host
        one = max(1, self.local_bytes(tensor, kept))
        num, rest = divmod(total, one)
        return num * self.taken_bytes(one) + self.taken_bytes(rest)

    def leaving_state_bytes(self, tensor: Tensor, layout: Layout, optimizer: OptimizerCost) -> int:
        """Return the bytes of these that can be offloaded between updates: all but counters; 0 if they have to stay.

        They have to where parameters are not updated one by one, and where a rank keeps the state of more than its shard.
        """
        own = optimizer.of(tensor.key)
        whole = own.whole_state and whole_pieces(tensor, layout, own.reads) != layout
        if not optimizer.updates_alone or whole:
            return 0
        total, counters = (own.state_bytes(shape, tensor.dtype) for shape in (self.local_shape(tensor, layout), (0,)))
        return max(0, total - counters)

    def step_bytes(self, tensor: Tensor, layout: Layout, optimizer: OptimizerCost) -> int:
        """Return the peak bytes of a parameter's update: those of the step, and of what it gathers for it."""
        own = optimizer.of(tensor.key)
        pieces = whole_pieces(tensor, layout, own.reads)
        held = own.step_temporary_bytes(self.local_shape(tensor, pieces), tensor.dtype)
        copies = 2 if own.reads == "tensor" else 1  # the parameter, too, is gathered
        return held if pieces == layout else held + copies * self.local_bytes(tensor, pieces)

    def left_bytes(self, tensor: Tensor, layout: Layout, optimizer: OptimizerCost) -> int:
        """Return the bytes that the optimizer still holds of a parameter's update while it makes the next one's."""
        own = optimizer.of(tensor.key)
        return own.left_bytes(self.local_shape(tensor, whole_pieces(tensor, layout, own.reads)), tensor.dtype)

    def local_shape(self, tensor: Tensor, layout: Layout) -> tuple[int, ...]:
        return local_shape(tensor.shape, tensor.slots, layout, self.mesh, None)


def cost_model(program: Program, device: Device, axes: tuple[MeshAxis, ...], records: Records, num_passes: float,
               imbalance: float = DEFAULT_IMBALANCE, sampled: float = 0.0) -> CostModel:  # fmt: skip
    """Return the costs of a program's step; `num_passes` are the optimizer's, each over all micro-batches."""
    return CostModel(
        device, axes, records, num_passes * program.num_runs, program.num_runs, imbalance=imbalance, sampled=sampled
    )


def whole_pieces(tensor: Tensor, layout: Layout, reads: str) -> Layout:
    """Return the layout, gathered no more than needed, in which no piece that an optimizer reads is cut."""
    cut = {"row": 1, "matrix": len(tensor.shape) - 2, "tensor": 0, "model": 0}.get(reads, len(tensor.shape))
    return tuple(REPLICATE if at >= 0 and tensor.slots[at].dim >= cut else at for at in layout)


class TimedAxes:
    """An `AxisGroup` that adds up the seconds of its collectives instead of running them."""

    def __init__(self, costs: CostModel, axes: Sequence[int], add: Callable[[float], None]) -> None:
        self.costs, self.axes, self.add = costs, tuple(axes), add
        self.size = math.prod(costs.mesh[axis] for axis in axes)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Return `tensor` as it is, and add the time of its reduction."""
        for axis in self.axes:
            self.add(self.costs.collective_s("all_reduce", axis, tensor.numel() * tensor.element_size()))
        return tensor

    def all_to_all(self, flat: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Return an empty tensor of the size that is received, and add the time of the exchange on the fullest rank."""
        received = flat.new_empty(sum(receive))
        num_bytes = max(flat.numel(), received.numel()) * flat.element_size()
        self.add(self.costs.collective_s("all_to_all", self.axes[0], num_bytes))
        return received

    def opposite(self, flat: torch.Tensor, length: int) -> torch.Tensor:
        """Return something of `length`, and note the time of the exchange, in which everything leaves the rank."""
        received = flat.new_empty(length)
        num_bytes = max(flat.numel(), length) * flat.element_size() * self.size / max(1, self.size - 1)
        self.add(self.costs.collective_s("all_to_all", self.axes[0], num_bytes))
        return received

    def begin(self, tensor: torch.Tensor) -> Any:
        """Raise `NotImplementedError`: a timed group begins no collective."""
        raise NotImplementedError


@dataclass(frozen=True)
class Inner:
    """The costs of an op whose local form communicates."""

    sum_s: float = 0.0
    """The seconds of an `ops.local.WithSum`'s sum, which reads only some operands and may begin with the step."""
    may_be_early: bool = False
    """True if those operands come from the batch alone, so that the sum may begin with the step."""
    forward_s: float = 0.0
    """The seconds of the forward's other collectives."""
    backward_s: float = 0.0
    record: OpRecord | None = None
    """The other costs of the rank's part, measured on fake tensors; None for an op that takes its share of the
    whole op's costs."""


def inner_costs(costs: CostModel, group: Group, op: Op, split: Split) -> Inner:
    """Run the local form of `op` on fake tensors, if it asks for a group of ranks or a range, and return what it takes."""
    with costs.fakes:
        return _inner_costs(_Probe(costs, group, op, split), op)


def _inner_costs(context: _Probe, op: Op) -> Inner:
    rule = find(op.name).localize
    values = [torch.empty(context.in_shape(place), dtype=tensor.dtype) for place, tensor in enumerate(op.inputs)]
    for value, tensor in zip(values, op.inputs):
        value.requires_grad_(tensor.requires_grad)
    queue = iter(values)
    args, kwargs = torch.fx.map_arg((op.node.args, op.node.kwargs), lambda node: next(queue))
    args, kwargs = tuple(args), dict(kwargs)
    function: Callable[..., Any] = op.node.target  # type: ignore[assignment]
    target = context.costs.device.kind
    if not run_state(op, target).dropout:
        args, kwargs = without_dropout(op, args, kwargs)
    if rule is not None:
        function, args, kwargs = rule(context, function, args, kwargs)
    sampled = sampled_form(op, function, context.chosen)
    is_uneven = context.costs.is_uneven(context.group, op, context.chosen)
    if not (context.asked or is_uneven or find(op.name).by_running or sampled is not None):
        return Inner()
    function = sampled or function
    sum_s, may_be_early = 0.0, False
    if isinstance(function, WithSum):
        may_be_early = said_by_the_batch(_summed(function, args, dict(zip(values, op.inputs))))
        function = partial(function.function, function.total(args))
        sum_s, context.total = context.total, 0.0
    forward, backward = CallCounter(target), CallCounter(target)
    with saved_tensors() as saved, forward.tracker:
        out = function(*args, **kwargs)
    forward_s, left = context.total, forward.tracker.live_bytes
    outs = [out] if isinstance(out, torch.Tensor) else list(out)
    if trained := [each for each in outs if each.requires_grad]:
        backward.tracker.watch([*values, *saved, *outs], "input")
        backward.reads(saved)
        with backward.tracker:
            given = [torch.empty_like(each) for each in trained]
            backward.tracker.watch(given, "input")
            leaves = [value for value in values if value.requires_grad]
            kept = torch.autograd.grad(trained, leaves, given, allow_unused=len(outs) > 1)
        del kept
    record = summary(forward, left, backward, values, outs, saved)
    return Inner(sum_s, may_be_early, forward_s, context.total - forward_s, record)


def _summed(function: WithSum, args: Sequence[Any], tensors: Mapping[torch.Tensor, Tensor]) -> list[Tensor]:
    """Return the operands that the sum of `function` reads."""
    return [tensors[args[place]] for place in function.places if isinstance(args[place], torch.Tensor)]


class _Probe:
    """A `LocalContext` on the fullest rank that notes whether the op communicates, or asks which part of a range is the rank's."""

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
        self.asked = True  # what a rank makes of a part of the range, a mask say, is in no whole op
        return self._range_at(loop, (0,) * len(self.costs.mesh))

    def _range_at(self, loop: str, coords: Sequence[int]) -> tuple[int, int]:
        return consecutive_range(self.op, loop, [(self.costs.mesh[axis], coords[axis]) for axis in self._axes([loop])])

    def mirrors_of(self, loop: str) -> tuple[Mirror, ...]:
        self.asked = True
        coords, found = [0] * len(self.costs.mesh), []
        for axis in self._axes([loop]):
            coords[axis] = self.costs.mesh[axis] - 1
            found.append(Mirror(TimedAxes(self.costs, [axis], self._add), self._range_at(loop, coords)))
        return tuple(found)

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
