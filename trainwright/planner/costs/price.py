"""Prices a plan: sums the seconds of the instructions and reruns of the local program that will run.

The price uses no column of the solver, so it also checks the solver's objective: both are equal if each parameter is gathered
by itself. With buckets (`rank.travel`), the collectives of a bucket share their latency, and a device that computes while it
communicates hides some of them; the objective only approximates that (`hidden`). CPUs hide nothing, so there it is exact.

Two kinds of sums cost nothing, since nothing waits for them: sums issued at the beginning of the step (`early_sums`), and the sum
of the loss (`late_loss`). A sum over labels that other ranks hold cannot be issued early, and is paid.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from ...artifacts import Tier
from ...program.micro_batches import WEIGHTED
from ...program.program import Op
from ...rank.accumulate import shared_conversions
from ...rank.execute import Executor
from ...rank.instructions import Borrow, Close, Compute, Instruction, Open, Reshard
from ...rank.late_loss import comes_late
from ...rank.local import LocalProgram
from ...rank.offload import CountingStore
from ...rank.reruns import Rerun
from ...rank.split_backward import waits
from .costs import CostModel, OptimizerCost
from .overlap import Timeline, bucket_s, gather
from .resting import StepSeconds, step_s


@dataclass
class Price:
    """The predicted seconds of one step, by what takes them."""

    compute_s: float = 0.0
    """The computation of forward, backward and update."""
    comm_s: float = 0.0
    """The collectives and the copies around them, without those of reruns."""
    recompute_s: float = 0.0
    """The reruns, with what they communicate."""
    forward_s: float = 0.0
    """The forward with the communication that no computation hides, beside which values are offloaded."""
    update_s: float = 0.0
    """The part of compute that is the optimizer's step."""
    transfer_s: float = 0.0
    """The seconds that offloading adds: values and optimizer states, out and back."""
    by_op: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    hidden_comm_s: float = 0.0
    """The part of `comm_s` that runs beside computation."""
    seconds: StepSeconds | None = field(default=None, repr=False)
    """The same by instruction, where parameters rest on disks."""

    @property
    def exposed_comm_s(self) -> float:
        """Return the communication that no computation hides."""
        return self.comm_s - self.hidden_comm_s

    @property
    def serial_s(self) -> float:
        """Return the seconds of the whole step if nothing were hidden."""
        return self.compute_s + self.comm_s + self.recompute_s + self.transfer_s

    @property
    def step_s(self) -> float:
        """Return the seconds of the whole step."""
        return self.compute_s + self.exposed_comm_s + self.recompute_s + self.transfer_s


def price(executor: Executor, costs: CostModel, optimizer: OptimizerCost) -> Price:
    """Price one step of a local program on the fullest rank."""
    total = _decided(executor, costs, optimizer)
    total.compute_s += costs.fixed_s(executor.local.program)
    return total


def _decided(executor: Executor, costs: CostModel, optimizer: OptimizerCost) -> Price:
    """Return the price of a step without what no decision changes, beside which no transfer counts as hidden."""
    total = Price()
    shared = shared_conversions(executor.local) if costs.num_runs > 1 else {}
    timeline = Timeline(costs)
    for instruction in executor.local.instructions:
        if (
            isinstance(instruction, Reshard)
            and shared.get(instruction.result, instruction.result) != instruction.result
        ):
            continue  # made once, with its like
        compute, comm = _instruction_s(executor, instruction, costs)
        total.compute_s += sum(compute)
        total.comm_s += sum(comm)
        total.by_op[instruction.key] += sum(compute) + sum(comm)
        timeline.add(instruction, compute, comm)
    # On CPUs the cores that compute are the ones that communicate: nothing counts as hidden there.
    hidden = timeline.hidden_s() if costs.device.kind == "gpu" else (0.0, 0.0)
    total.hidden_comm_s = sum(hidden)
    by_instruction = timeline.shown_s(hidden)
    total.forward_s = sum(forward for _, forward, _ in by_instruction)
    if costs.num_runs > 1:
        total.comm_s += _weights_s(executor.local, costs)
    by_rerun = {region: _rerun_s(executor, rerun, costs) for region, rerun in executor.reruns.items()}
    total.recompute_s = sum(by_rerun.values())
    updates = {
        tensor: costs.optimizer_s(tensor, layout, optimizer)
        for tensor, layout in executor.local.decisions.params.items()
        if tensor.is_trained
    }
    total.update_s = sum(updates.values())
    total.compute_s += total.update_s
    if costs.resting is not None:
        moved_bytes = executor.store.num_bytes if isinstance(executor.store, CountingStore) else 0
        total.seconds, local = StepSeconds(by_instruction, by_rerun, updates), executor.local
        whole_s = step_s(local, local.decisions, total.seconds, moved_bytes, costs, optimizer)
        is_more = not math.isclose(whole_s, total.step_s)  # the same seconds are summed in another order
        total.transfer_s = max(0.0, whole_s - total.step_s) if is_more else 0.0
        return total
    if costs.tier is not None and isinstance(executor.store, CountingStore):
        total.transfer_s = _transfer_s(total, executor.store, costs.tier, costs.num_passes)
    if costs.tier is not None:
        total.transfer_s += _states_s(total, executor.local, costs, costs.tier, optimizer)
    return total


@dataclass
class RegionSeconds:
    """The seconds of one region, for each micro-batch and once a step."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    """The seconds of the backward without reruns."""
    comm_s: float = 0.0
    """The part of forward and backward that is communication."""
    rerun_s: float = 0.0
    reduce_s: float = 0.0
    """The seconds once a step, after the last backward."""
    weight_s: float = 0.0
    """The part of `backward_s` that computes weight gradients which may be postponed (`rank.split_backward`)."""


def price_regions(executor: Executor, costs: CostModel) -> dict[int, RegionSeconds]:
    """Return the seconds of each region of a local program that runs once a micro-batch.

    A reshard that serves all micro-batches counts once a step, in `reduce_s` of its region. Work outside of regions (the sum of
    the loss over ranks) counts in the last region.
    """
    runs = costs.num_runs
    shared = shared_conversions(executor.local) if runs > 1 else {}
    instructions = executor.local.instructions
    last = max(instruction.region for instruction in instructions)
    found: dict[int, RegionSeconds] = defaultdict(RegionSeconds)
    for instruction in instructions:
        own = found[instruction.region if instruction.region >= 0 else last]
        if isinstance(instruction, Reshard) and instruction.result in shared:
            if shared[instruction.result] == instruction.result:
                own.reduce_s += sum(_reshard_s(executor.local, instruction, costs))
            continue
        compute, comm = _instruction_s(executor, instruction, costs)
        own.forward_s += (compute[0] + comm[0]) / runs
        own.backward_s += (compute[1] + comm[1]) / runs
        own.comm_s += sum(comm) / runs
        own.weight_s += _weight_s(executor.local, instruction, costs) / runs
    for region, rerun in executor.reruns.items():
        found[region if region >= 0 else last].rerun_s += _rerun_s(executor, rerun, costs) / runs
    return dict(found)


def _weight_s(local: LocalProgram, instruction: Instruction, costs: CostModel) -> float:
    """Return the seconds of the weight's product in a linear map's backward, if it may be postponed; else 0."""
    if not isinstance(instruction, Compute) or not waits(instruction.op) or instruction.op.region is None:
        return 0.0
    region_class = instruction.op.region.region_class
    group, twin = (
        region_class.group_at[instruction.op.position],
        region_class.representative.ops[instruction.op.position],
    )
    return costs.weight_s(group, twin, local.decisions.splits[group])


def begin_seconds(executor: Executor, costs: CostModel) -> float:
    """Return the seconds that a step of several micro-batches takes before its first forward."""
    return _weights_s(executor.local, costs) if costs.num_runs > 1 else 0.0


def _rerun_s(executor: Executor, rerun: Rerun, costs: CostModel) -> float:
    """Return the seconds of a region's rerun; parameters of one bucket that are gathered again share one latency."""
    total = 0.0
    for index in rerun.instructions:
        instruction = executor.local.instructions[index].again
        match instruction:
            case Close(bucket=bucket, place=place) if bucket in rerun.gathers:
                total += gather(bucket, place, costs, sorted(rerun.gathers[bucket])).seconds
            case _:
                compute, comm = _instruction_s(executor, instruction, costs)
                total += compute[0] + comm[0]
    return total


def _states_s(total: Price, local: LocalProgram, costs: CostModel, tier: Tier, optimizer: OptimizerCost) -> float:
    """Return the seconds by which the transfer of optimizer states outlasts the update beside it."""
    layouts = local.decisions.params
    sizes = [costs.leaving_state_bytes(t, layouts[t], optimizer) for t in local.decisions.offloaded_states]
    return tier.exposed_s(sum(state_transfer_s(tier, size) for size in sizes), total.update_s)


def _transfer_s(total: Price, store: CountingStore, tier: Tier, num_passes: float) -> float:
    """Return the seconds by which offloading outlasts the forward, and fetching back outlasts the backward."""
    backward_s = total.compute_s + total.exposed_comm_s - total.forward_s - total.update_s + total.recompute_s
    out_s, back_s = (num_passes * each for each in tier.transfers_s(store.num_bytes, store.num_transfers))
    return tier.exposed_s(out_s, total.forward_s) + tier.exposed_s(back_s, backward_s)


def _weights_s(local: LocalProgram, costs: CostModel) -> float:
    """Return the seconds, once a step, of all-reducing the count of labels over the axes that split them."""
    total = 0.0
    for instruction in local.instructions:
        if isinstance(instruction, Compute) and local.program.corrections.get(instruction.key) == WEIGHTED:
            labels = local.values[instruction.inputs[1]]
            split = [axis for axis, place in enumerate(labels.layout) if place >= 0]
            total += sum(costs.collective_s("all_reduce", axis, 8) for axis in split)
    return total * costs.num_passes / costs.num_runs


Seconds = tuple[float, float]
"""The seconds of the forward and of the backward."""


def _instruction_s(executor: Executor, instruction: Instruction, costs: CostModel) -> tuple[Seconds, Seconds]:
    """Return an instruction's seconds of computation and of communication, each as (forward, backward)."""
    match instruction:
        case Open() | Close():
            return (0.0, 0.0), bucket_s(instruction, costs)
        case Reshard():
            return (0.0, 0.0), _reshard_s(executor.local, instruction, costs)
        case Borrow():
            return (0.0, 0.0), (0.0, 0.0)  # whoever lends the copy has paid
        case Compute(op=op):
            return _op_s(executor.local, op, costs, early=instruction.index in executor.early)


def _op_s(local: LocalProgram, op: Op, costs: CostModel, early: bool) -> tuple[Seconds, Seconds]:
    if op.constant or op.region is None:
        return (0.0, 0.0), (0.0, 0.0)
    region_class = op.region.region_class
    group, twin = region_class.group_at[op.position], region_class.representative.ops[op.position]
    split = local.decisions.splits[group]
    return costs.op_s(group, twin, split), costs.inner_s(group, twin, split, early)


def _reshard_s(local: LocalProgram, instruction: Reshard, costs: CostModel) -> Seconds:
    tensor, there, back = local.values[instruction.result].tensor, instruction.there, instruction.back
    free = tensor.role not in ("op", "param") or (tensor.producer is not None and tensor.producer.constant)
    if free:
        return 0.0, 0.0
    if tensor is local.program.loss and comes_late(local.program, there.steps):
        return 0.0, 0.0
    itemsize = tensor.dtype.itemsize
    forward = sum(costs.step_s(step, there.slots, itemsize) for step in there.steps)
    if not tensor.requires_grad:
        return forward, 0.0
    backward = sum(costs.step_s(step, back.slots, itemsize) for step in back.steps)
    once = tensor.role == "param" and not there.steps
    return forward, backward / costs.num_runs if once else backward


def state_transfer_s(tier: Tier, num_bytes: float) -> float:
    """Return the seconds in which one parameter's states are read from the tier and written back."""
    return num_bytes / tier.write_bytes_per_s + num_bytes / tier.read_bytes_per_s + 2 * tier.latency_s
