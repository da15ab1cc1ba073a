"""The price of stages as they stand: each simulated on fake tensors, its seconds read off its own local program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...artifacts import Cluster, Plan, Predicted, StagePrediction
from ...program.decisions import Decisions
from ...program.program import Tensor
from ...program.stages import Stage, tied
from ..costs.price import begin_seconds, price_regions
from ..costs.simulate import Simulation, simulate_stage
from .events import Schedule, StageSeconds, StepTimeline, Tied, simulated_step
from .measure import local_bytes
from .table import Hop, tied_sums

if TYPE_CHECKING:
    from ..task import Place


def hops_of(cluster: Cluster, num_stages: int) -> tuple[Hop, ...]:
    """Return the links between stages, as the cost model of this hardware sees them."""
    factor = cluster.device.factors.get("communication", 1.0)
    return tuple(
        Hop(factor * link.latency_s, link.bandwidth_bytes_per_s / factor) for link in cluster.between_stages(num_stages)
    )


@dataclass(eq=False)
class PricedStages:
    """Stages with their simulations and what a step takes."""

    stages: Sequence[Stage]
    simulations: list[Simulation]
    predicted: Predicted
    timeline: StepTimeline

    @property
    def fullest(self) -> int:
        peaks = [simulation.peak_bytes for simulation in self.simulations]
        return peaks.index(max(peaks))


def price_stages(
    place: Place,
    stages: Sequence[Stage],
    decisions: Decisions,
    in_flight: Sequence[int],
    hops: Sequence[Hop],
    known: dict[Any, Simulation] | None = None,
) -> PricedStages:
    """Simulate every stage and price the step. `place` is the task on one stage's ranks.

    known: simulations of stages under the same layouts, to be used and added to.
    """
    simulations = simulate_stages(place, stages, decisions, in_flight, {} if known is None else known)
    sums = _tied_sums(place, stages, decisions, hops)
    rows = [_seconds(place, stage, simulation, decisions, hops) for stage, simulation in zip(stages, simulations)]
    schedule = Schedule(place.task.program.num_runs, tuple(in_flight))
    timeline = simulated_step(schedule, [seconds for seconds, _ in rows], sums, overlaps=overlaps(place))
    predicted = [
        _prediction(seconds, more, simulation, stage, sums, place, decisions)
        for (seconds, more), simulation, stage in zip(rows, simulations, stages)
    ]
    whole = _predicted(predicted, timeline, schedule.num_micro_batches)
    return PricedStages(stages, simulations, whole, timeline)


def overlaps(place: Place) -> bool:
    """True if transfers overlap computation, as on a GPU; on a CPU the cores that compute also send."""
    return place.task.cluster.device.kind == "gpu"


def simulate_stages(
    place: Place,
    stages: Sequence[Stage],
    decisions: Decisions,
    in_flight: Sequence[int],
    known: dict[Any, Simulation],
) -> list[Simulation]:
    """Simulate every stage that is not known; stages that are alike in all that matters, once."""
    shared = tied(stages)
    found = []
    for stage in stages:
        key = _looks(place, stage, decisions, in_flight, shared)
        if key not in known:
            known[key] = simulate_stage(
                stage, decisions, place.task.make_optimizer, in_flight=in_flight,
                num_micro_batches=place.task.program.num_runs, tied=tuple(shared), target=place.task.cluster.device.kind,
                num_threads=place.task.num_threads, optimizer_cost=place.task.optimizer_cost,
            )  # fmt: skip
        found.append(known[key])
    return found


def _looks(
    place: Place, stage: Stage, decisions: Decisions, in_flight: Sequence[int], shared: dict[str, tuple[int, ...]]
) -> Any:
    """Return a key; stages with equal keys take the same bytes and seconds."""
    regions = tuple(
        (
            region.region_class.index,
            frozenset(
                (op.position, value) for op in region.ops for value in _values(op) if f"{op.key}.{value}" in decisions.recomputed
            ),
        )
        for region in stage.program.regions
    )  # fmt: skip
    params = tuple(
        (tensor.shape, tensor.key in shared, place.task.optimizer_cost.of(tensor.key).identity)
        for tensor in stage.program.params
    )
    depths = tuple(in_flight[stage.index : stage.index + 2])
    given = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in (*stage.given, *stage.handed))
    return (stage.is_first, stage.is_last, depths, given, repr((regions, params)))


def _values(op: Any) -> list[str]:
    outputs = [tensor.key.rpartition(".")[2] for tensor in op.outputs]
    return ["internal", *outputs, *(f"in{place}" for place in range(len(op.inputs)))]


def _seconds(
    place: Place, stage: Stage, simulation: Simulation, decisions: Decisions, hops: Sequence[Hop]
) -> tuple[StageSeconds, tuple[float, float]]:
    """Return what a stage takes, and of a micro-batch what it communicates within itself and reruns."""
    problem, optimizer = place.problem, place.task.optimizer_cost
    regions = price_regions(simulation.executor, problem.costs).values()
    rerun_s = sum(region.rerun_s for region in regions)
    update_s = sum(
        problem.costs.optimizer_s(tensor, decisions.params[tensor], optimizer)
        for tensor in stage.program.params
        if tensor.requires_grad
    )
    handed, returned = _crossing_bytes(place, stage, decisions)
    hop = None if stage.is_last else hops[stage.index]
    seconds = StageSeconds(
        forward_s=sum(region.forward_s for region in regions),
        backward_s=sum(region.backward_s for region in regions) + rerun_s,
        begin_s=begin_seconds(simulation.executor, problem.costs),
        reduce_s=sum(region.reduce_s for region in regions),
        update_s=update_s,
        hand_s=0.0 if hop is None else hop.seconds(handed),
        return_s=0.0 if hop is None else hop.seconds(returned),
    )
    return seconds, (sum(region.comm_s for region in regions), rerun_s)


def _crossing_bytes(place: Place, stage: Stage, decisions: Decisions) -> tuple[int, int]:
    """Return what a rank hands to the next stage for a micro-batch, and the gradients of that."""
    sizes = [(local_bytes(place.problem, decisions, tensor), tensor.requires_grad) for tensor in stage.handed]
    return sum(size for size, _ in sizes), sum(size for size, has_grad in sizes if has_grad)


def _tied_sums(place: Place, stages: Sequence[Stage], decisions: Decisions, hops: Sequence[Hop]) -> list[Tied]:
    params: dict[str, Tensor] = {tensor.key: tensor for stage in stages for tensor in stage.program.params}
    readers = {name: at for name, at in tied(stages).items() if params[name].requires_grad}
    sizes = {
        name: float(place.problem.costs.local_bytes(params[name], decisions.params[params[name]])) for name in readers
    }
    return tied_sums(readers, sizes, hops)


def _prediction(
    seconds: StageSeconds,
    more: tuple[float, float],
    simulation: Simulation,
    stage: Stage,
    sums: Sequence[Tied],
    place: Place,
    decisions: Decisions,
) -> StagePrediction:
    comm_s, rerun_s = more
    return StagePrediction(
        peak_bytes=simulation.peak_bytes,
        peak_at=simulation.peak_at,
        breakdown=simulation.breakdown,
        forward_s=seconds.forward_s,
        backward_s=seconds.backward_s,
        recompute_s=rerun_s,
        comm_s=comm_s,
        begin_s=seconds.begin_s,
        update_s=seconds.update_s,
        reduce_s=seconds.reduce_s,
        tied=tuple((group.stages, group.seconds) for group in sums if stage.index == group.stages[0]),
        hand_bytes=_crossing_bytes(place, stage, decisions)[0],
        hand_s=seconds.hand_s,
        return_s=seconds.return_s,
        comm_bytes=simulation.comm_bytes,
    )


def _predicted(stages: Sequence[StagePrediction], timeline: StepTimeline, num_micro_batches: int) -> Predicted:
    """Return the prediction of the whole step: the bytes of the fullest stage and the seconds of the busiest one."""
    fullest = max(stages, key=lambda stage: stage.peak_bytes)
    at = timeline.busy_s.index(max(timeline.busy_s))
    busy, busy_s = stages[at], timeline.busy_s[at]
    recompute_s = num_micro_batches * busy.recompute_s
    computing_s = (
        num_micro_batches * (busy.forward_s + busy.backward_s - busy.comm_s - busy.recompute_s) + busy.update_s
    )
    comm_s = busy_s - computing_s - recompute_s
    return Predicted(
        step_s=timeline.step_s,
        compute_s=computing_s,
        comm_s=comm_s,
        exposed_comm_s=comm_s,
        recompute_s=recompute_s,
        update_s=busy.update_s,
        bubble_s=timeline.step_s - busy_s,
        peak_bytes=fullest.peak_bytes,
        breakdown=fullest.breakdown,
        comm_bytes=busy.comm_bytes,
        stages=tuple(stages),
    )


def schedule_of(plan: Plan) -> StepTimeline | None:
    """Return who does what when in a step of a plan with stages, as it was predicted; None without stages."""
    predicted = plan.predicted
    if plan.pipeline is None or not predicted.stages:
        return None
    stages = [
        StageSeconds(s.forward_s, s.backward_s, s.begin_s, s.reduce_s, s.update_s, s.hand_s, s.return_s)
        for s in predicted.stages
    ]
    sums = [Tied(at, seconds) for stage in predicted.stages for at, seconds in stage.tied]
    schedule = Schedule(plan.micro_batches, plan.pipeline.in_flight)
    return simulated_step(schedule, stages, sums, overlaps=plan.cluster.device.kind == "gpu", keep_spans=True)
