"""Prices given stages: simulates each on fake tensors, and reads its seconds off its own local program."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ...artifacts import Cluster, PiecePrediction, Plan, Predicted, StagePrediction
from ...program.decisions import Decisions
from ...program.program import Tensor
from ...program.stages import Stage, stages_of, tied
from ...rank.execute import Executor
from ...rank.offload import CountingStore
from ...rank.stage_actions import Schedule
from ..costs.price import begin_seconds, price_regions
from ..costs.simulate import Simulation, StageBytes, simulate_stage, stage_bytes
from .events import StageSeconds, StepTimeline, Tied, simulated_step
from .measure import local_bytes
from .table import Hop, hop_behind, tied_sums

if TYPE_CHECKING:
    from ..task import Place


def hops_of(cluster: Cluster, num_stages: int) -> tuple[Hop, ...]:
    """Return the links between stages, scaled by the hardware's calibrated communication factor."""
    factor = cluster.device.factors.get("communication", 1.0)
    return tuple(
        Hop(factor * link.latency_s, link.bandwidth_bytes_per_s / factor) for link in cluster.between_stages(num_stages)
    )


@dataclass(eq=False)
class PricedStages:
    """Stages with their simulations and the predicted step."""

    stages: Sequence[Sequence[Stage]]
    """The pieces of each stage."""
    simulations: list[Simulation]
    predicted: Predicted
    timeline: StepTimeline

    @property
    def fullest(self) -> int:
        peaks = [simulation.peak_bytes for simulation in self.simulations]
        return peaks.index(max(peaks))


def price_stages(
    place: Place,
    pieces: Sequence[Stage],
    decisions: Decisions,
    schedule: Schedule,
    hops: Sequence[Hop],
    known: Runs | None = None,
) -> PricedStages:
    """Simulate every stage and price the step. `place` is the task on one stage's ranks.

    pieces: those of all stages, in the order of the model. hops: the links between neighbouring stages. known: what runs of stages
    under the same layouts found; where it is given, stages are put together of their actions if that is exact.
    """
    stages = [pieces[stage :: schedule.num_stages] for stage in range(schedule.num_stages)]
    in_full = known is None or not adds_up(pieces, schedule)
    runs: Runs = {} if known is None else known
    simulations = simulate_stages(place, stages, decisions, schedule, runs, in_full=in_full)
    sums = _tied_sums(place, pieces, decisions, hops, schedule.num_stages)
    rows = [
        _piece_rows(place, own, simulation, decisions, hops, schedule.splits_backward)
        for own, simulation in zip(stages, simulations)
    ]
    seconds = [rows[at % len(rows)][at // len(rows)][0] for at in range(len(pieces))]
    timeline = simulated_step(schedule, seconds, sums, overlaps=overlaps(place))
    predicted = [
        _prediction(own_rows, simulation, own, sums, place, decisions, schedule)
        for own_rows, simulation, own in zip(rows, simulations, stages)
    ]
    whole = _predicted(predicted, timeline, schedule.num_micro_batches)
    return PricedStages(stages, simulations, whole, timeline)


def overlaps(place: Place) -> bool:
    """Tell whether transfers overlap with computation, as on a GPU; on a CPU the cores that compute also send."""
    return place.task.cluster.device.kind == "gpu"


Runs = dict[Any, Simulation | StageBytes]
"""Holds the runs of stages under the same layouts, in full or by action, by a key that like stages share."""


def simulate_stages(
    place: Place,
    stages: Sequence[Sequence[Stage]],
    decisions: Decisions,
    schedule: Schedule,
    known: Runs,
    *,
    in_full: bool,
) -> list[Simulation]:
    """Return the simulation of every stage; like stages are run once, and those in `known` not at all.

    in_full: whether stages are run in their whole depth. Otherwise few micro-batches are, and the simulation is put together of
    what their actions add (exact where `adds_up`): stages that differ in depth alone are run once, and that takes a small part.
    """
    shared = shared_by(stages)
    run = simulate_stage if in_full else stage_bytes
    found = []
    for at, stage in enumerate(stages):
        looks = tuple(_looks_of_piece(place, piece, decisions, shared) for piece in stage)
        key = in_full, _looks_of_order(schedule, at, in_full), looks
        if key not in known:
            known[key] = run(
                stage, decisions, place.task.make_optimizer, schedule=schedule, tied=tuple(shared),
                target=place.task.cluster.device.kind,
                num_threads=place.task.num_threads, optimizer_cost=place.task.optimizer_cost,
            )  # fmt: skip
        own = known[key]
        found.append(own.simulation(schedule, at) if isinstance(own, StageBytes) else own)
    return found


def adds_up(pieces: Sequence[Stage], schedule: Schedule) -> bool:
    """Return true if what actions add is the same at any depth: no interleaved piece hands on a tensor that it was given."""
    return schedule.virtual == 1 or not any(set(piece.given) & set(piece.handed) for piece in pieces)


def _looks_of_order(schedule: Schedule, stage: int, in_full: bool) -> Any:
    """Return a key such that a stage holds the same in orders with equal keys."""
    if not in_full:
        return schedule.virtual, schedule.splits_backward
    is_plain = schedule.virtual == 1 and not schedule.splits_backward
    return schedule.in_flight[stage : stage + 2] if is_plain else (schedule, stage)  # others depend on all stages


def _looks_of_piece(place: Place, stage: Stage, decisions: Decisions, shared: dict[str, tuple[int, ...]]) -> Any:
    regions = tuple(
        (
            region.region_class.index,
            frozenset(
                (op.position, value) for op in region.ops for value in _values(op) if f"{op.key}.{value}" in decisions.recomputed
            ),
            frozenset(
                (op.position, value) for op in region.ops for value in _values(op) if f"{op.key}.{value}" in decisions.offloaded
            ),
        )
        for region in stage.program.regions
    )  # fmt: skip
    params = tuple(
        (tensor.shape, tensor.key in shared, place.task.optimizer_cost.of(tensor.key).identity)
        for tensor in stage.program.params
    )
    given = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in (*stage.given, *stage.handed))
    return (stage.is_first, stage.is_last, given, decisions.in_flight_bytes, repr((regions, params)))


def shared_by(stages: Sequence[Sequence[Stage]]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages read, with those stages."""
    pieces = sorted((piece for own in stages for piece in own), key=lambda piece: piece.index)
    return stages_of(tied(pieces), len(stages))


def _values(op: Any) -> list[str]:
    outputs = [tensor.key.rpartition(".")[2] for tensor in op.outputs]
    return ["internal", *outputs, *(f"in{place}" for place in range(len(op.inputs)))]


def _piece_rows(
    place: Place,
    stage: Sequence[Stage],
    simulation: Simulation,
    decisions: Decisions,
    hops: Sequence[Hop],
    splits_backward: bool,
) -> list[tuple[StageSeconds, tuple[float, float, float]]]:
    """Return `_seconds` of each piece; a parameter that several pieces of the stage read is updated once, by the first."""
    held: set[Tensor] = set()
    found = []
    for piece, executor in zip(stage, simulation.executors):
        own = {tensor for tensor in piece.program.params if tensor.requires_grad} - held
        found.append(_seconds(place, piece, executor, own, decisions, hops, splits_backward))
        held |= own
    return found


def _seconds(
    place: Place,
    piece: Stage,
    executor: Executor,
    own: Set[Tensor],
    decisions: Decisions,
    hops: Sequence[Hop],
    splits_backward: bool,
) -> tuple[StageSeconds, tuple[float, float, float]]:
    """Return a piece's seconds, and those of a micro-batch's communication, reruns and transfers that nothing hides.

    own: the parameters that it updates.
    """
    problem, optimizer = place.problem, place.task.optimizer_cost
    regions = price_regions(executor, problem.costs).values()
    rerun_s = sum(region.rerun_s for region in regions)
    update_s = sum(
        problem.costs.optimizer_s(tensor, decisions.params[tensor], optimizer)
        for tensor in piece.program.params
        if tensor in own
    )
    handed, returned = _crossing_bytes(place, piece, decisions)
    hop = None if piece.is_last else hop_behind(hops, piece.index)
    fixed_s = problem.costs.fixed_s(piece.program) / problem.costs.num_runs
    forward_s, weight_s = fixed_s + sum(each.forward_s for each in regions), sum(each.weight_s for each in regions)
    backward_s = sum(region.backward_s for region in regions) + rerun_s
    out_s, back_s = _shown_s(place, executor, forward_s, backward_s - (weight_s if splits_backward else 0.0))
    seconds = StageSeconds(
        forward_s=forward_s + out_s,
        backward_s=backward_s + back_s,
        begin_s=begin_seconds(executor, problem.costs),
        reduce_s=sum(region.reduce_s for region in regions),
        update_s=update_s,
        hand_s=0.0 if hop is None else hop.seconds(handed),
        return_s=0.0 if hop is None else hop.seconds(returned),
        weight_s=weight_s,
    )
    return seconds, (sum(region.comm_s for region in regions), rerun_s, out_s + back_s)


def _shown_s(place: Place, executor: Executor, forward_s: float, backward_s: float) -> tuple[float, float]:
    """Return by how much what a micro-batch offloads outlasts its forward, and what comes back its backward."""
    tier, store = place.problem.costs.tier, executor.store
    if tier is None or not isinstance(store, CountingStore):
        return 0.0, 0.0
    out_s, back_s = tier.transfers_s(store.num_bytes, store.num_transfers)
    return tier.exposed_s(out_s, forward_s), tier.exposed_s(back_s, backward_s)


def _crossing_bytes(place: Place, stage: Stage, decisions: Decisions) -> tuple[int, int]:
    """Return the bytes that a rank sends to the next stage for a micro-batch, and those of their gradients."""
    sizes = [(local_bytes(place.problem, decisions, tensor), tensor.requires_grad) for tensor in stage.handed]
    return sum(size for size, _ in sizes), sum(size for size, has_grad in sizes if has_grad)


def _tied_sums(
    place: Place, pieces: Sequence[Stage], decisions: Decisions, hops: Sequence[Hop], num_stages: int
) -> list[Tied]:
    params: dict[str, Tensor] = {tensor.key: tensor for piece in pieces for tensor in piece.program.params}
    readers = {name: at for name, at in stages_of(tied(pieces), num_stages).items() if params[name].requires_grad}
    sizes = {
        name: float(place.problem.costs.local_bytes(params[name], decisions.params[params[name]])) for name in readers
    }
    return tied_sums(readers, sizes, hops)


def _prediction(
    rows: Sequence[tuple[StageSeconds, tuple[float, float, float]]],
    simulation: Simulation,
    stage: Sequence[Stage],
    sums: Sequence[Tied],
    place: Place,
    decisions: Decisions,
    schedule: Schedule,
) -> StagePrediction:
    comm_s, rerun_s, shown_s = (sum(more[place] for _, more in rows) for place in range(3))
    seconds = summed([own for own, _ in rows])
    return StagePrediction(
        peak_bytes=simulation.peak_bytes,
        peak_at=simulation.peak_at,
        breakdown=simulation.breakdown,
        forward_s=seconds.forward_s,
        backward_s=seconds.backward_s,
        recompute_s=rerun_s,
        transfer_s=shown_s,
        moved_bytes=simulation.moved_bytes,
        comm_s=comm_s,
        begin_s=seconds.begin_s,
        update_s=seconds.update_s,
        reduce_s=seconds.reduce_s,
        tied=tuple((group.stages, group.seconds) for group in sums if stage[0].index == group.stages[0]),
        hand_bytes=sum(_crossing_bytes(place, piece, decisions)[0] for piece in stage),
        hand_s=seconds.hand_s,
        return_s=seconds.return_s,
        comm_bytes=simulation.comm_bytes,
        weight_s=seconds.weight_s if schedule.splits_backward else 0.0,
        pieces=tuple(
            PiecePrediction(
                forward_s=own.forward_s, backward_s=own.backward_s, hand_s=own.hand_s, return_s=own.return_s
            )
            for own, _ in rows[: len(rows) if schedule.virtual > 1 else 0]
        ),
    )


def summed(pieces: Sequence[StageSeconds]) -> StageSeconds:
    """Return the seconds of a stage, summed over its pieces."""
    return StageSeconds(
        **{each.name: sum(getattr(piece, each.name) for piece in pieces) for each in fields(StageSeconds)}
    )


def _predicted(stages: Sequence[StagePrediction], timeline: StepTimeline, num_micro_batches: int) -> Predicted:
    """Return the prediction of the whole step: the bytes of the fullest stage and the seconds of the busiest one."""
    fullest = max(stages, key=lambda stage: stage.peak_bytes)
    at = timeline.busy_s.index(max(timeline.busy_s))
    busy, busy_s = stages[at], timeline.busy_s[at]
    recompute_s, transfer_s = num_micro_batches * busy.recompute_s, num_micro_batches * busy.transfer_s
    micro_s = busy.forward_s + busy.backward_s - busy.comm_s - busy.recompute_s - busy.transfer_s
    computing_s = num_micro_batches * micro_s + busy.update_s
    # a difference, which rounds to less than nothing where nothing is exchanged
    comm_s = max(0.0, busy_s - computing_s - recompute_s - transfer_s)
    return Predicted(
        step_s=timeline.step_s,
        compute_s=computing_s,
        comm_s=comm_s,
        exposed_comm_s=comm_s,
        recompute_s=recompute_s,
        transfer_s=transfer_s,
        moved_bytes=busy.moved_bytes,
        update_s=busy.update_s,
        bubble_s=timeline.step_s - busy_s,
        peak_bytes=fullest.peak_bytes,
        breakdown=fullest.breakdown,
        comm_bytes=busy.comm_bytes,
        stages=tuple(stages),
    )


def schedule_of(plan: Plan) -> StepTimeline | None:
    """Return the simulated timeline of a step from a plan's predictions; None for a plan without stages."""
    predicted = plan.predicted
    if plan.pipeline is None or not predicted.stages:
        return None
    stages = [_recorded(s, chunk) for chunk in range(plan.pipeline.virtual) for s in predicted.stages]
    sums = [Tied(at, seconds) for stage in predicted.stages for at, seconds in stage.tied]
    schedule = Schedule.of(plan.pipeline, plan.micro_batches)
    return simulated_step(schedule, stages, sums, overlaps=plan.cluster.device.kind == "gpu", keep_spans=True)


def _recorded(stage: StagePrediction, chunk: int) -> StageSeconds:
    """Return a piece's seconds from a plan's prediction; seconds once a step count for the stage's first piece."""
    own = stage.pieces[chunk] if stage.pieces else stage
    once = (stage.begin_s, stage.reduce_s, stage.update_s) if chunk == 0 else (0.0, 0.0, 0.0)
    return StageSeconds(own.forward_s, own.backward_s, *once, own.hand_s, own.return_s, stage.weight_s)
