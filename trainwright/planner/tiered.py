"""Predicts what a plan's step moves between memory and the disks on which its parameters and states rest (`plan --tier`).

layers      every parameter in the order in which the program first reads it, a rank's part       `tiers.Layer`
bytes       those of `tiers.traffic`, by which the run itself is held to its plan
step_s ≥    max(the plan's step, bytes read / rate in, bytes written / rate out)
a day ≤     bytes written · 86,400 / step_s
"""

from __future__ import annotations

from typing import Any

from ..artifacts import TierPlan, UserError
from ..program.decisions import Decisions
from ..program.program import Program, Tensor
from ..tiers import Layer, Policy, traffic
from .costs.costs import CostModel, OptimizerCost
from .task import Place

NUM_VERSIONS = 2
"""The versions of everything on the disk: the last whole step's, and the next one's."""


def tier_plan(place: Place, decisions: Decisions, step_s: float) -> TierPlan | None:
    """Return what a step of these decisions moves on the fullest rank; None where no tier was asked for."""
    task = place.task
    if task.tier is None:
        return None
    if decisions.offloaded_states:
        raise UserError(
            "a plan that leaves optimizer states to the tier is needed; this one offloads them; plan with --pin '*=state-keep'"
        )
    policy = task.tier
    layers = _layers(task.program, decisions, place.problem.costs, task.optimizer_cost)
    moved, disk = traffic(layers, policy), task.cluster.offload.get("disk")
    least_s = step_s
    if disk is not None:
        least_s = max(step_s, moved.read_bytes / disk.read_bytes_per_s, moved.written_bytes / disk.write_bytes_per_s)
    held = [
        each.param_bytes + each.state_pages + (each.grad_bytes if policy.update == "after" else 0) for each in layers
    ]
    return TierPlan(
        **_told(policy),
        read_bytes=moved.read_bytes,
        written_bytes=round(moved.written_bytes),
        written_a_day=round(moved.written_a_day(least_s)),
        step_s=least_s,
        disk_bytes=NUM_VERSIONS * sum(held),
    )


def _told(policy: Policy) -> dict[str, Any]:
    return {name: getattr(policy, name) for name in ("window_bytes", "keep_bytes", "update", "commit_every")}


def _layers(program: Program, decisions: Decisions, costs: CostModel, optimizer: OptimizerCost) -> list[Layer]:
    order = dict.fromkeys(tensor for op in program.ops for tensor in op.inputs if tensor.role == "param")
    return [_layer(tensor, decisions, costs, optimizer) for tensor in order]


def _layer(tensor: Tensor, decisions: Decisions, costs: CostModel, optimizer: OptimizerCost) -> Layer:
    layout = decisions.params[tensor]
    num_bytes = costs.local_bytes(tensor, layout)
    if not tensor.requires_grad:
        return Layer(num_bytes, is_trained=False)
    states = costs.leaving_state_bytes(tensor, layout, optimizer)
    number, rest = divmod(states, num_bytes)  # AdamW's are two of the parameter's own size
    return Layer(num_bytes, (num_bytes,) * number + ((rest,) if rest else ()), num_bytes)
