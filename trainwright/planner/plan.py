"""`make_plan`, `compare` and `check`: from a program and a cluster to a plan that fits, or to why there is none."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..artifacts import (
    EDITED,
    PIPE,
    STAGED_VERSION,
    OffloadPlan,
    Pipeline,
    Plan,
    Predicted,
    Refusal,
    SolverInfo,
    TierPlan,
    UserError,
)
from ..program.decisions import Decisions
from ..program.groups import is_routed
from ..program.plan_text import decisions_of, plan_sections
from ..program.program import Program
from ..program.sampling import share_of
from ..program.stages import cut
from ..rank.stage_actions import Schedule
from ..tiers import Policy
from .best_first import search
from .budget import budget_for
from .compiled import check_compiled, simulated
from .costs.costs import OptimizerCost
from .costs.effects import NO_EFFECT, without_effect
from .costs.known_updates import MakeOptimizer
from .costs.price import Price
from .costs.simulate import Simulation, simulate, simulate_stage
from .costs.units import size_text
from .incumbent import Found
from .pipeline.price import hops_of, price_stages, shared_by
from .pipeline.recipes import PIPELINE_RECIPES
from .pipeline.search import StagedAnswer
from .problem.problem import Problem
from .problem.recipes import RECIPES
from .search.effort import GAP
from .task import Place, Task
from .tiered import tier_plan

PROVEN_OPTIMAL = 1.0001 * GAP
"""An answer is called optimal where it is proven to be within so much of the optimum: what searches stop at."""


def make_plan(*, solver: str = "joint", **question: Any) -> Plan:
    """Return the fastest plan that fits, among those that `solver` may choose; `question` is what a `Task` holds.

    solver: `joint`, or one of the textbook recipes `two-stage`, `fsdp`, `megatron`, `ddp`. Raises `Refusal` when
    nothing fits, with what binds, the smallest budget that would do and the ways out; `UserError` for an unknown solver
    or pin.
    """
    began = time.perf_counter()
    task = Task(**question)
    known = RECIPES if task.pipeline is None else PIPELINE_RECIPES
    if solver not in known:
        stages = " where there are stages" if task.pipeline is not None else ""
        raise UserError(f"a solver is one of {', '.join(known)}{stages}; got {solver!r}")
    if task.tier is not None and solver != "joint":
        raise UserError(
            f"the solver joint is needed to choose what rests on a tier; got {solver}, which lets nothing leave; leave --tier out"
        )
    return as_plan(solver, search(task, solver), time.perf_counter() - began)


def compare(*, solvers: Sequence[str] | None = None, **question: Any) -> dict[str, Plan | Refusal]:
    """Return each solver's plan, or why it has none; `joint`, the last, may take an answer of the others.

    Of these solvers `joint` alone lets anything rest on disks; where that is asked for, the others are plans without.
    """
    task = Task(**question)
    without = task if task.tier is None else replace(task, tier=None)
    results: dict[str, Plan | Refusal] = {}
    found: dict[str, Found] = {}
    for solver in solvers or (RECIPES if task.pipeline is None else PIPELINE_RECIPES):
        began = time.perf_counter()
        try:
            found[solver] = search(task if solver == "joint" else without, solver)
            if solver == "joint" and task.tier is None:
                found[solver] = _fastest_of(found)
            results[solver] = as_plan(solver, found[solver], time.perf_counter() - began)
        except Refusal as refusal:
            results[solver] = refusal
            if solver == "joint" and found and task.tier is None:
                results[solver] = as_plan(solver, _fastest_of(found), time.perf_counter() - began)
    return results


def _fastest_of(found: Mapping[str, Found]) -> Found:
    """Return the fastest answer as one of `joint`, with what that has proven; joint's own where it is as fast."""
    joint = found.get("joint")
    best = min(found.values(), key=lambda item: (item.step_s, item is not joint))
    if best is joint:
        return best
    if joint is None:
        bound_s = best.answer.bound_s if best.staged is not None else best.place.solver.lower_bound_s()
    else:
        bound_s = joint.answer.bound_s
    unseen = () if joint is None else joint.unseen_meshes
    return replace(best, answer=best.answer.bounded(bound_s), unseen_meshes=unseen)


def check(
    plan: Plan, program: Program, budget_bytes: int | None, optimizer_cost: OptimizerCost, make_optimizer: MakeOptimizer
) -> Plan:
    """Return `plan`, simulated and priced anew, as it stands; `Refusal` when it does not fit the budget.

    Of a plan that was edited by hand, or is held against another budget, nothing is proven any more; a note names what
    an edit says to no effect.
    """
    task = task_of(plan, program, optimizer_cost, make_optimizer)
    task.budget_bytes = budget_bytes
    predicted, simulations, where = as_written(plan, task)
    predicted = _with_budget(predicted, task)
    simulation = max(simulations, key=lambda found: found.peak_bytes)
    budget, usable = task.budget_bytes, task.usable_bytes
    if plan.tier is not None:
        (place,) = task.places
        decisions = decisions_of(program, plan)
        moved = tier_plan(place, decisions, place.price(simulation), simulation)
        _check_room(moved, place, predicted.moved_bytes)
        plan = plan.model_copy(update={"tier": moved})
    if budget is not None and usable is not None and simulation.peak_bytes > usable:
        more = budget_for(simulation.peak_bytes, task.divisor) - budget
        kept = f" ({size_text(budget - usable)} of the budget are kept for what no simulation sees)"
        raise Refusal(
            f"a peak of at most {size_text(usable)} is needed{kept}; this plan's is "
            f"{size_text(simulation.peak_bytes)}{where}, at {simulation.peak_at}; a budget of {size_text(more, up=True)} more "
            "would do, or recompute more"
        )
    notes = tuple(note for note in plan.notes if not note.startswith(NO_EFFECT))
    if plan.is_edited:
        executors = [executor for found in simulations for executor in found.executors]
        notes += without_effect(plan, program, executors)
        solver = plan.solver.model_copy(update={"status": EDITED, "gap": None})
    elif budget != plan.budget_bytes:
        solver = plan.solver.model_copy(update={"status": "feasible", "gap": None})
    else:
        return plan.model_copy(update={"predicted": predicted})
    found = plan.model_copy(update={"predicted": predicted, "budget_bytes": budget, "solver": solver, "notes": notes})
    return found if plan.is_edited else found.signed()


def _check_room(tier: TierPlan | None, place: Place, moved_bytes: int) -> None:
    """Raise `Refusal` where the tier does not hold what rests there, with what of activations leaves."""
    known = place.problem.costs.tier
    if tier is None or known is None or known.capacity_bytes is None:
        return
    there = tier.disk_bytes + tier.host_bytes + moved_bytes
    if there > known.capacity_bytes:
        raise Refusal(
            f"a {tier.place} of {size_text(there, up=True)} a device is needed for what rests there; the hardware has "
            f"{size_text(known.capacity_bytes)}; let more stay, or raise `capacity_bytes` in its file"
        )


def as_written(plan: Plan, task: Task) -> tuple[Predicted, list[Simulation], str]:
    """Return what a plan takes as it stands, the simulations of its stages, and which of them holds most, in words."""
    if plan.compile is not None:
        predicted, compiled = check_compiled(plan, task)
        return predicted, [compiled.plain], ""
    (place,) = task.places
    decisions = decisions_of(task.program, plan)
    if plan.pipeline is None:
        simulation = place.simulate(decisions)
        return _predicted(place.price(simulation), simulation), [simulation], ""
    if plan.offloads_states:
        raise UserError(
            "optimizer states that stay on the device are needed beside pipeline stages; `offloaded` of the plan's params says "
            "otherwise; take it out, or plan without stages"
        )
    stages = cut(task.program, plan.pipeline.begins)
    schedule = Schedule.of(plan.pipeline, plan.micro_batches)
    priced = price_stages(place, stages, decisions, schedule, hops_of(plan.cluster, plan.num_stages))
    return priced.predicted, priced.simulations, f", on stage {priced.fullest}"


def simulate_plan(
    plan: Plan, program: Program, optimizer_cost: OptimizerCost, make_optimizer: MakeOptimizer
) -> Simulation:
    """Return the memory over a step of one rank, of the fullest stage where there are several."""
    decisions = decisions_of(program, plan)
    if plan.compile is not None:
        task = task_of(plan, program, optimizer_cost, make_optimizer)
        return simulated(task, decisions).plain
    kind = plan.cluster.device.kind
    if plan.tier is not None:
        (place,) = task_of(plan, program, optimizer_cost, make_optimizer).places
        return place.simulate(decisions, timeline=True)
    if plan.pipeline is None:
        return simulate(program, decisions, make_optimizer, target=kind, timeline=True, optimizer_cost=optimizer_cost)
    pieces = cut(program, plan.pipeline.begins)
    stages = [pieces[stage :: plan.num_stages] for stage in range(plan.num_stages)]
    peaks = [stage.peak_bytes for stage in plan.predicted.stages] or [0]
    return simulate_stage(
        stages[peaks.index(max(peaks))], decisions, make_optimizer,
        schedule=Schedule.of(plan.pipeline, plan.micro_batches), tied=tuple(shared_by(stages)), target=kind, timeline=True,
        optimizer_cost=optimizer_cost,
    )  # fmt: skip


def task_of(plan: Plan, program: Program, optimizer_cost: OptimizerCost, make_optimizer: MakeOptimizer) -> Task:
    """Return the question that `plan` answers, on its own mesh."""
    return Task(
        program, plan.model, plan.inner_cluster, plan.budget_bytes, plan.optimizer, optimizer_cost, make_optimizer,
        mesh=tuple(plan.inner_mesh.values()), num_stages=plan.num_stages, dtype=plan.dtype, autocast=plan.autocast,
        literals=plan.literals, loss_fn=plan.loss_fn, offload=plan.offload.tier if plan.offload is not None else "none",
        imbalance=plan.imbalance, sampled=max(plan.sampled.values(), default=0.0), tier=_policy(plan),
    )  # fmt: skip


def _policy(plan: Plan) -> Policy | None:
    """Return how the tier of a plan is used; what stays in memory stands with its parameters."""
    if plan.tier is None:
        return None
    return Policy(plan.tier.window_bytes, None, plan.tier.update, plan.tier.commit_every, plan.tier.place)


def as_plan(solver: str, found: Found, plan_s: float) -> Plan:
    """Write an answer as a plan."""
    answer, place = found.answer, found.place
    task = place.task
    params, modules, batch = plan_sections(task.program, answer.decisions)
    gap = answer.gap if answer.gap is not None and answer.gap < 1 else None
    plan = Plan(
        model=task.model_ref,
        fingerprint=task.program.fingerprint,
        torch_version=torch.__version__,
        batch=batch,
        literals=dict(task.literals),
        loss_fn=task.loss_fn,
        dtype=task.dtype,
        autocast=task.autocast,
        **task.optimizer_fields,
        optimizer_owned=_owned(place, answer.decisions),
        cluster=task.cluster,
        budget_bytes=task.budget_bytes,
        mesh={axis.name: axis.size for axis in place.axes},
        offload=_offload(task, answer.decisions),
        tier=tier_plan(place, answer.decisions, found.price, answer.simulation),
        micro_batches=task.program.num_runs,
        corrections=dict(task.program.corrections),
        loss_chunks=task.program.captured.loss_chunks,
        expert_imbalance="worst" if math.isinf(task.imbalance) else task.imbalance,
        predicted=_with_budget(_predicted(found.price, answer.simulation), task),
        solver=SolverInfo(
            name=solver,
            status="optimal" if gap is not None and gap <= PROVEN_OPTIMAL else "feasible",
            gap=gap,
            unseen_meshes=found.unseen_meshes,
            solve_s=round(answer.solve_s, 3),
            plan_s=round(plan_s, 3),
            notes=tuple(answer.notes),
        ),
        params=params,
        modules=modules,
        overlap=answer.decisions.overlap,
        notes=(
            *task.program.captured.notes,
            *_gathered(task.program, found.price),
            *_discovered(task.program),
            *_promise(answer.decisions, task.budget_bytes),
            *_sampled(place.problem, answer.decisions),
            *_passes(task),
            *answer.notes,
            *found.notes,
        ),
    )
    return (plan if found.staged is None else _with_stages(plan, found.staged, task)).signed()


def _with_stages(plan: Plan, staged: StagedAnswer, task: Task) -> Plan:
    """Return the plan of one stage's ranks as that of all stages."""
    schedule = staged.schedule
    pipeline = Pipeline(
        begins=staged.begins,
        in_flight=schedule.in_flight,
        virtual=schedule.virtual,
        split_backward=schedule.splits_backward,
    )
    fields = {name: getattr(plan, name) for name in Plan.model_fields}
    return Plan(
        **{
            **fields,
            "format_version": STAGED_VERSION,
            "cluster": staged.cluster,
            "mesh": {PIPE: pipeline.num_stages, **plan.mesh},
            "pipeline": pipeline,
            "predicted": _with_budget(staged.priced.predicted, task),
        }
    )


def _owned(place: Place, decisions: Decisions) -> tuple[str, ...]:
    """Return the parameters that one rank steps on for all."""
    task, costs = place.task, place.problem.costs
    trained = (tensor for tensor in task.program.params if tensor.requires_grad)
    return tuple(
        tensor.key for tensor in trained if costs.is_owned(tensor, decisions.params[tensor], task.optimizer_cost)
    )


def _offload(task: Task, decisions: Decisions) -> OffloadPlan | None:
    states = decisions.offloaded_states if task.tier is None else ()
    if not (decisions.offloaded or states) or task.tier_name is None:
        return None
    return OffloadPlan(tier=task.tier_name, in_flight_bytes=decisions.in_flight_bytes)


def _predicted(costs: Price, simulation: Simulation) -> Predicted:
    return Predicted(
        step_s=costs.step_s,
        compute_s=costs.compute_s,
        comm_s=costs.comm_s,
        exposed_comm_s=costs.exposed_comm_s,
        recompute_s=costs.recompute_s,
        transfer_s=costs.transfer_s,
        moved_bytes=simulation.moved_bytes,
        moved_state_bytes=simulation.moved_state_bytes,
        update_s=costs.update_s,
        peak_bytes=simulation.peak_bytes,
        breakdown=simulation.breakdown,
        comm_bytes=simulation.comm_bytes,
    )


def _with_budget(predicted: Predicted, task: Task) -> Predicted:
    return predicted.model_copy(update={"fits_in_bytes": budget_for(predicted.peak_bytes, task.divisor)})


def _gathered(program: Program, price: Price) -> tuple[str, ...]:
    """Return a note on the ops that no rule describes, with what running them whole takes of the step."""
    ops = [op for op in program.ops if not op.constant and not op.signature.known]
    if not ops:
        return ()
    keys = {key for op in ops for key in (op.key, *(f"{op.key}.in{place}" for place in range(len(op.inputs))))}
    taken_s = sum(price.by_op.get(key, 0.0) for key in keys)
    names = ", ".join(sorted({op.name for op in ops}))
    return (
        f"no rule describes {names}: every rank runs it on whole, gathered tensors, {taken_s * 1e3:.3g} ms of the step",
    )


def _discovered(program: Program) -> tuple[str, ...]:
    """Return a note on the ops whose rule was found by trying."""
    names = sorted({op.name for op in program.ops if op.signature.discovered})
    if not names:
        return ()
    return (
        f"the rule of {', '.join(names)} was found by trying shards of small inputs; `verify` holds it against one process",
    )


def _promise(decisions: Decisions, budget_bytes: int | None) -> tuple[str, ...]:
    """Return a note on what the peak depends on, where rows of experts depend on the data."""
    routed = [group for group, split in decisions.splits.items() if is_routed(group, split, decisions.mesh)]
    if not routed:
        return ()
    peak = "the peak is that promised" if budget_bytes is None else f"peak ≤ {size_text(budget_bytes)}"
    if math.isinf(decisions.imbalance):
        return (f"{peak} however the experts' rows fall",)
    return (
        f"{peak} while no layer sends any rank more than {decisions.imbalance:g} × its even share of the experts' rows",
    )


def _sampled(problem: Problem, decisions: Decisions) -> tuple[str, ...]:
    """Return a note on the linear maps whose weights' gradients are estimates, and how far these scatter at most."""
    found = [d for d in problem.groups if d.group is not None and share_of(decisions.splits[d.group])]
    if not found:
        return ()
    num = sum(decision.count for decision in found)
    most = max(problem.costs.variance_bound(d.group, decisions.splits[d.group]) for d in found if d.group is not None)
    keys = ", ".join(decision.key for decision in found)
    return (
        f"gradients are not exact: those of the weights of {num} linear maps are unbiased estimates from "
        f"{problem.costs.sampled:.3g} of their rows ({keys}); loss and all other gradients are exact",
        f"the variance of such an estimate is at most {most:.3g} · Σ_i ‖g_i‖² ‖x_i‖², where all rows have the same norm, and less "
        "where few rows hold most of it; `verify` measures it",
    )


def _passes(task: Task) -> tuple[str, ...]:
    """Return a note on an optimizer whose step takes more than one forward and backward pass."""
    num_passes = task.optimizer_cost.num_passes
    if num_passes == 1.0:
        return ()
    cost, held = task.optimizer_cost, "that of one pass and the declared state: what further passes hold is not in it"
    if cost.differentiates_twice and cost.reads != "model":
        held = "that of a step with a Hessian-vector product, the graph of the gradient included"
    elif cost.differentiates_twice:
        held = "that of a Hessian-vector product among the vectors of a solve by conjugate gradients"
    return (
        f"{task.optimizer} takes {num_passes:.3g} forward and backward passes a step on average, which the times count; the "
        f"peak is {held}",
    )
