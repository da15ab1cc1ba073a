"""Plans for tests: made by hand or drawn at random from the whole space, not by the solver."""

from __future__ import annotations

import random
from typing import Any

import torch

from trainwright.artifacts import Cluster, Device, Link, ModelRef, OffloadPlan, Plan, Predicted, SolverInfo
from trainwright.program.decisions import OVERLAPS, Decisions
from trainwright.program.layout import REPLICATE, Layout
from trainwright.program.plan_text import param_classes, plan_sections
from trainwright.program.program import Op, Program, Tensor


def cluster(num_ranks: int) -> Cluster:
    """A machine of `num_ranks` CPU processes; its speeds do not matter."""
    device = Device(
        name="cpu",
        kind="cpu",
        memory_bytes=2**34,
        flops_per_s={"fp32": 1e10},
        bandwidth_bytes_per_s=1e10,
        launch_s=1e-6,
    )
    return Cluster(
        name="test",
        device=device,
        links=(Link(name="host", size=num_ranks, bandwidth_bytes_per_s=1e9, latency_s=1e-4),),
    )


def plan_of(program: Program, decisions: Decisions, literals: dict[str, Any] | None = None, tier: str = "disk") -> Plan:
    """Write decisions as a plan with nothing predicted."""
    params, modules, batch = plan_sections(program, decisions)
    return Plan(
        model=ModelRef(name="test"),
        fingerprint=program.fingerprint,
        torch_version=torch.__version__,
        batch=batch,
        literals=literals or {},
        cluster=cluster(torch.tensor(decisions.mesh).prod().item()),
        budget_bytes=None,
        mesh={f"a{axis}": size for axis, size in enumerate(decisions.mesh)},
        offload=OffloadPlan(tier=tier, in_flight_bytes=decisions.in_flight_bytes) if decisions.offloaded else None,
        predicted=Predicted(step_s=0, compute_s=0, comm_s=0, exposed_comm_s=0, recompute_s=0, peak_bytes=0),
        solver=SolverInfo(name="test", status="drawn", solve_s=0, plan_s=0),
        params=params,
        modules=modules,
        overlap=decisions.overlap,
    )


def random_decisions(
    program: Program, mesh: tuple[int, ...], seed: int, recompute: float = 0.5, idle: float = 0.2, offload: float = 0.0
) -> Decisions:
    """Draw a strategy for every group, a layout for every parameter, and a fate for every value.

    offload: the share of the values that are kept of which some blocks' leave the device.
    """
    draw = random.Random(seed)
    decisions = Decisions(mesh, {}, {})
    for region_class in program.classes:
        for group in region_class.groups:
            choices = [index for index, loop in enumerate(group.loops) if not loop.whole]
            pick = lambda options: draw.choice(options) if options and draw.random() >= idle else -1  # noqa: E731
            split = tuple(pick(choices) for _ in mesh)
            further = group.pair_axes(split)[1:]  # rows are exchanged along one axis alone
            decisions.splits[group] = tuple(
                group.pairs[loop][0] if axis in further else loop for axis, loop in enumerate(split)
            )
    for tied in param_classes(program):
        slots = [index for index, slot in enumerate(tied[0].slots) if not slot.blocked]
        layout = tuple(draw.choice([REPLICATE, *slots]) for _ in mesh)
        decisions.params.update(dict.fromkeys(tied, layout))
    for tensor in program.inputs:
        slots = [index for index, slot in enumerate(tensor.slots) if not slot.blocked]
        decisions.inputs[tensor] = tuple(draw.choice([REPLICATE, *slots]) for _ in mesh)
    decisions.overlap = OVERLAPS[-1 - seed % len(OVERLAPS)]
    for region_class in program.classes:
        for group in region_class.groups:
            _draw_fates(program, region_class, group, decisions, draw, recompute)
    _draw_shared(program, decisions, random.Random(seed))
    if offload:
        draw_offloaded(program, decisions, random.Random(seed), offload)
    return decisions


def _draw_shared(program: Program, decisions: Decisions, draw: random.Random) -> None:
    """Let one copy serve all readers of parameters that several regions read, in some of the layouts that they ask for."""
    for tensor in program.params:
        readers = [op for op in tensor.consumers if op.region is not None]
        if len({op.region for op in readers}) > 1:
            asked = {layout for op in readers for layout in _layouts(program, decisions, op, tensor)}
            decisions.shared |= {(tensor, layout) for layout in sorted(asked) if draw.random() < 0.7}


def _layouts(program: Program, decisions: Decisions, op: Op, tensor: Tensor) -> list[Layout]:
    group, twin = program.group_of(op), op.region.region_class.representative.ops[op.position]
    places = [place for place, found in enumerate(op.inputs) if found is tensor]
    return [group.input_layout(twin, place, decisions.splits[group])[0] for place in places]


def draw_offloaded(program: Program, decisions: Decisions, draw: random.Random, share: float) -> None:
    """Let a share of the values that are kept leave the device, with as much in flight as is drawn."""
    decisions.in_flight_bytes = draw.choice([0, 4096, 2**16, 2**30])
    for op in program.ops:
        names = [tensor.key for tensor in op.outputs]
        names += [f"{op.key}.internal", *(f"{op.key}.in{place}" for place in range(len(op.inputs)))]
        if op.region is not None:
            decisions.offloaded |= {name for name in names if draw.random() < share} - decisions.recomputed


def _draw_fates(
    program: Program, region_class: Any, group: Any, decisions: Decisions, draw: random.Random, share: float
) -> None:
    rerun = draw.randint(0, region_class.multiplicity) if draw.random() < share else 0
    for member in region_class.members[:rerun]:
        for twin in group.ops:
            op = member.ops[twin.position]
            decisions.recomputed |= {f"{op.key}.in{place}" for place in range(len(op.inputs)) if draw.random() < 0.7}
            if op.kind == "view" or op.runs_once:
                continue
            inside = all(consumer.region is member for tensor in op.outputs for consumer in tensor.consumers)
            if inside and not any(tensor in program.outputs for tensor in op.outputs):
                decisions.recomputed |= {tensor.key for tensor in op.outputs}
                if draw.random() < 0.7:
                    decisions.recomputed.add(f"{op.key}.internal")
