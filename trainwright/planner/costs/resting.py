"""Counts the memory and seconds of a step whose parameters and optimizer states rest on a tier, of disks or of the host.

layers      every parameter in the order in which the program first reads it, a rank's part       `tiers.Layer`
held        values that were read and updates under way, at most                                  `tiers.held_beside`
step        max(the run's own schedule, phase by phase the busiest of compute and directions)     `tiers.simulate`, `step_s`

Updates run beside the backward, on the cores that compute, so their seconds add to the backward's; transfers do not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...program.decisions import Decisions
from ...program.program import Program, Tensor
from ...rank.execute import Executor
from ...rank.instructions import Instruction
from ...rank.local import LocalProgram
from ...tiers import Layer, Policy, Rates, StepTraffic, held_beside, simulate, traffic
from .costs import CostModel, OptimizerCost
from .standing import standing_backward, standing_forward

NUM_VERSIONS = 2
"""The versions of everything on the disks: the last whole step's, and the next one's."""


def there_bytes(layers: Iterable[Layer], policy: Policy) -> int:
    """Return the bytes that rest on the tier.

    Disks have two versions of everything, in whole pages; the host has what does not stay, and gradients that wait for an update.
    """
    is_after, layers = policy.update == "after", list(layers)
    if policy.place == "disk":
        states = sum(policy.moved_states(each) for each in layers if each.is_trained)
        return NUM_VERSIONS * (states + sum(each.param_bytes + is_after * each.grad_bytes for each in layers))
    values = sum(each.param_bytes for each in layers if not each.param_stays)
    trained = [each for each in layers if each.is_trained]
    return values + sum((not each.states_stay) * each.state_bytes + is_after * each.grad_bytes for each in trained)


def has_room(layers: Iterable[Layer], costs: CostModel, moved_bytes: int) -> bool:
    """Tell whether the tier holds what rests there beside `moved_bytes` of activations."""
    assert costs.resting is not None
    assert costs.tier is not None
    capacity = costs.tier.capacity_bytes
    return capacity is None or there_bytes(layers, costs.resting) + moved_bytes <= capacity


@dataclass(frozen=True)
class Update:
    """The bytes that one parameter's update holds beside its gradient: the states that come, and what the step itself takes."""

    state_bytes: int
    step_bytes: int


@dataclass(frozen=True)
class Room:
    """What a step holds beside what stays: the most bytes of values that were read, by phase, and each parameter's update.

    update_window_bytes: the most of gradients and states under update, but for one that is larger. is_after: whether updates begin
    when the backward is over. most_updates: the most bytes of updates at once.
    """

    forward_values: int
    backward_values: int
    updates: Mapping[Tensor, Update]
    update_window_bytes: int
    is_after: bool
    most_updates: int

    @property
    def held_bytes(self) -> int:
        """Return the most that may be there at once, at whatever moment."""
        return self.backward_values + self.most_updates


def params_in_order(program: Program) -> list[Tensor]:
    """Return the parameters in the order in which the program first reads them."""
    return list(dict.fromkeys(tensor for op in program.ops for tensor in op.inputs if tensor.role == "param"))


def layers_of(program: Program, decisions: Decisions, costs: CostModel, optimizer: OptimizerCost) -> list[Layer]:
    """Return the rank's part of every parameter with its fate, in the order of first use."""
    return [_layer(tensor, decisions, costs, optimizer) for tensor in params_in_order(program)]


def _layer(tensor: Tensor, decisions: Decisions, costs: CostModel, optimizer: OptimizerCost) -> Layer:
    layout = decisions.params[tensor]
    num_bytes, stays = costs.local_bytes(tensor, layout), tensor not in decisions.offloaded_params
    if not tensor.requires_grad:
        return Layer(num_bytes, is_trained=False, param_stays=stays)
    states = costs.leaving_state_bytes(tensor, layout, optimizer)
    number, rest = divmod(states, num_bytes)  # AdamW's are two of the parameter's own size
    sizes = (num_bytes,) * number + ((rest,) if rest else ())
    states_stay = tensor not in decisions.offloaded_states
    return Layer(num_bytes, sizes, num_bytes, param_stays=stays, states_stay=states_stay)


def room_of(executor: Executor, costs: CostModel, optimizer: OptimizerCost) -> Room:
    """Return what a step of a rank's program holds beside what stays in memory."""
    program, decisions = executor.local.program, executor.local.decisions
    assert costs.resting is not None
    away = {tensor: costs.local_bytes(tensor, decisions.params[tensor]) for tensor in decisions.offloaded_params}
    layers = layers_of(program, decisions, costs, optimizer)
    held = held_beside(layers, costs.resting, standing_forward(executor, away), standing_backward(executor, away))
    updates = {
        tensor: Update(
            layer.update_bytes - layer.grad_bytes, costs.step_bytes(tensor, decisions.params[tensor], optimizer)
        )
        for tensor, layer in zip(params_in_order(program), layers, strict=True)
        if layer.is_trained
    }
    return Room(
        held.forward_values,
        held.backward_values,
        updates,
        costs.resting.window_bytes // 2,
        costs.resting.update == "after",
        held.updates + max((each.step_bytes for each in updates.values()), default=0),
    )


def kept_bytes(layers: Iterable[Layer]) -> int:
    """Return the bytes of parameters and states that stay in memory."""
    return sum(
        each.param_bytes * each.param_stays + each.state_bytes * (each.states_stay and each.is_trained)
        for each in layers
    )


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of a step's computation and communication, by what takes them."""

    by_instruction: Sequence[tuple[Instruction, float, float]]
    """Each instruction with its seconds in the forward and in the backward."""
    by_rerun: Mapping[int, float]
    """The seconds of each region that is run again."""
    updates: Mapping[Tensor, float]

    @property
    def forward_s(self) -> float:
        return sum(forward for _, forward, _ in self.by_instruction)

    @property
    def backward_s(self) -> float:
        return sum(backward for _, _, backward in self.by_instruction) + sum(self.by_rerun.values())


def step_s(
    local: LocalProgram, decisions: Decisions, seconds: StepSeconds, moved_bytes: int, costs: CostModel,
    optimizer: OptimizerCost,
) -> float:  # fmt: skip
    """Return the seconds of a whole step, in which `moved_bytes` of activations leave to the same tier and come back.

    decisions: what rests there; all else of them is that of `local`.
    """
    policy, tier = costs.resting, costs.tier
    assert policy is not None
    assert tier is not None
    layers = layers_of(local.program, decisions, costs, optimizer)
    rates = Rates(tier.read_bytes_per_s, tier.write_bytes_per_s, tier.commit_s)
    moved = replace(traffic(layers, policy), forward_written=moved_bytes)
    scheduled = simulate(_with_seconds(layers, local, seconds), policy, rates).step_s
    return max(scheduled, _least_s(moved, seconds, costs, policy))


def _least_s(moved: StepTraffic, seconds: StepSeconds, costs: CostModel, policy: Policy) -> float:
    """Return the seconds of the phases, each with its busiest direction beside its computation."""
    tier = costs.tier
    assert tier is not None
    update_s = sum(seconds.updates.values())
    forward = (moved.forward_read / tier.read_bytes_per_s, moved.forward_written / tier.write_bytes_per_s)
    written = moved.written + moved.kept_bytes * policy.committed_share
    read = moved.backward_read + moved.forward_written
    backward = (read / tier.read_bytes_per_s, written / tier.write_bytes_per_s)
    both = ((seconds.forward_s, forward), (seconds.backward_s + update_s, backward))
    phases_s = sum(compute + max(tier.exposed_s(each, compute) for each in busy) for compute, busy in both)
    return phases_s + policy.committed_share * tier.commit_s


def _with_seconds(layers: Sequence[Layer], local: LocalProgram, seconds: StepSeconds) -> list[Layer]:
    """Return the layers with the seconds of the instructions that run from a parameter's first use to the next one's."""
    order = params_in_order(local.program)
    place = {local.sources[tensor]: index for index, tensor in enumerate(order) if tensor in local.sources}
    forward, backward = [0.0] * len(layers), [0.0] * len(layers)
    current, last_of = 0, dict[int, int]()
    for instruction, there, back in seconds.by_instruction:
        current = max([current, *(place[value] for value in instruction.inputs if value in place)])
        forward[current] += there
        backward[current] += back
        last_of[instruction.region] = current
    for region, again_s in seconds.by_rerun.items():
        backward[last_of.get(region, current)] += again_s
    return [
        replace(layer, forward_s=there, backward_s=back, update_s=seconds.updates.get(tensor, 0.0))
        for layer, tensor, there, back in zip(layers, order, forward, backward, strict=True)
    ]


def single_region(program: Program, tensors: Iterable[Tensor]) -> Collection[Tensor]:
    """Return those of the tensors that only one region reads."""
    return [tensor for tensor in tensors if len({op.region for op in tensor.consumers}) < 2]
