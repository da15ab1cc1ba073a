"""Says what a plan's step moves between memory and the tier on which its parameters and states rest (`plan --tier`).

Which of them rest there are columns of the one problem (`model.resting`); the bytes are those of `tiers.traffic`, by which the run
itself is held to its plan, and those of activations, which go to the same disks.
"""

from __future__ import annotations

from dataclasses import replace

from ..artifacts import TierPlan
from ..program.decisions import Decisions
from ..tiers import traffic
from .costs.price import Price
from .costs.resting import kept_bytes, layers_of, room_of, there_bytes
from .costs.simulate import Simulation
from .task import Place


def tier_plan(place: Place, decisions: Decisions, price: Price, simulation: Simulation) -> TierPlan | None:
    """Return what a step of these decisions moves on the fullest rank; None where no tier was asked for."""
    task, costs = place.task, place.problem.costs
    policy = costs.resting
    if policy is None:
        return None
    layers = layers_of(task.program, decisions, costs, task.optimizer_cost)
    moved = traffic(layers, policy)
    moved = replace(
        moved, forward_written=simulation.moved_bytes, backward_read=moved.backward_read + simulation.moved_bytes
    )
    states = sum(each.state_bytes for each in layers if each.is_trained)
    room = room_of(simulation.executor, costs, task.optimizer_cost)
    there = there_bytes(layers, policy)
    return TierPlan(
        place="host" if policy.place == "host" else "disk",
        window_bytes=policy.window_bytes,
        keep_bytes=kept_bytes(layers),
        held_bytes=room.held_bytes,
        state_bytes=states,
        update="after" if policy.update == "after" else "during",
        commit_every=policy.commit_every,
        read_bytes=moved.read_bytes,
        written_bytes=round(moved.written_bytes),
        written_a_day=round(moved.written_a_day(price.step_s)) if policy.place == "disk" else 0,
        step_s=price.step_s,
        disk_bytes=there if policy.place == "disk" else 0,
        host_bytes=there if policy.place == "host" else 0,
    )
