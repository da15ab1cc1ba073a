"""`make_plan`, `compare` and `check`: from a program and a cluster to a plan that fits, or to why there is none."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..artifacts import OffloadPlan, Plan, Predicted, Refusal, SolverInfo, UserError
from ..capture.decide import decisions_of, plan_sections
from ..capture.local import Decisions
from ..capture.program import Program
from .budget import budget_for
from .costs import OptimizerCost
from .deadline import Deadline
from .mesh_search import Found, MeshSearch
from .micro_batches import fastest_number
from .price import Price
from .recipes import RECIPES
from .simulate import MakeOptimizer, Simulation
from .solve import Infeasible
from .task import Place, Task


def make_plan(*, solver: str = "joint", **question: Any) -> Plan:
    """Return the fastest plan that fits, among those that `solver` may choose; `question` is what a `Task` holds.

    solver: `joint`, or one of the textbook recipes `two-stage`, `fsdp`, `megatron`, `ddp`. Raises `Refusal` when
    nothing fits, with what binds, the smallest budget that would do and the ways out; `UserError` for an unknown solver
    or pin.
    """
    began = time.perf_counter()
    if solver == "pipeline":
        raise UserError(
            "a solver without pipeline stages is needed; pipeline parallelism is not supported yet; try joint"
        )
    if solver not in RECIPES:
        raise UserError(f"a solver is one of {', '.join(RECIPES)}; got {solver!r}")
    task = Task(**question)
    found = _search(task, solver)
    return as_plan(solver, found, time.perf_counter() - began)


def compare(*, solvers: Sequence[str] = RECIPES, **question: Any) -> dict[str, Plan | Refusal]:
    """Return each solver's plan, or why it has none; `joint`, the last, may take an answer of the others."""
    task = Task(**question)
    results: dict[str, Plan | Refusal] = {}
    found: dict[str, Found] = {}
    for solver in solvers:
        began = time.perf_counter()
        try:
            found[solver] = _search(task, solver)
            if solver == "joint":
                found[solver] = min(found.values(), key=lambda item: (item.price.step_s, item is not found[solver]))
            results[solver] = as_plan(solver, found[solver], time.perf_counter() - began)
        except Refusal as refusal:
            results[solver] = refusal
            if solver == "joint" and found:
                best = min(found.values(), key=lambda item: item.price.step_s)
                results[solver] = as_plan(solver, best, time.perf_counter() - began)
    return results


def check(
    plan: Plan, program: Program, budget_bytes: int | None, optimizer_cost: OptimizerCost, make_optimizer: MakeOptimizer
) -> Plan:
    """Return `plan`, simulated and priced anew, as it stands; `Refusal` when it does not fit the budget."""
    task = task_of(plan, program, optimizer_cost, make_optimizer)
    task.budget_bytes = budget_bytes
    (place,) = task.places
    simulation = place.simulate(decisions_of(program, plan))
    predicted = _predicted(place.price(simulation), simulation)
    budget, usable = task.budget_bytes, task.usable_bytes
    if budget is not None and usable is not None and simulation.peak_bytes > usable:
        more = budget_for(simulation.peak_bytes, task.divisor) - budget
        raise Refusal(
            f"a peak of at most {size_text(usable)} is needed; this plan's is "
            f"{size_text(simulation.peak_bytes)}, at {simulation.peak_at}; a budget of {size_text(more, up=True)} more "
            "would do, or recompute more"
        )
    return plan.model_copy(update={"predicted": predicted, "budget_bytes": budget})


def task_of(plan: Plan, program: Program, optimizer_cost: OptimizerCost, make_optimizer: MakeOptimizer) -> Task:
    """Return the question that `plan` answers, on its own mesh."""
    return Task(
        program, plan.model, plan.cluster, plan.budget_bytes, plan.optimizer, optimizer_cost, make_optimizer,
        mesh=tuple(plan.mesh.values()), dtype=plan.dtype, autocast=plan.autocast, literals=plan.literals, loss_fn=plan.loss_fn,
        offload=plan.offload.tier if plan.offload is not None else "none",
    )  # fmt: skip


def _search(task: Task, solver: str) -> Found:
    """Return the fastest answer of all meshes and numbers of micro-batches; `Refusal` where there is none.

    Where offloading is left to us, it is taken up when nothing fits without: it doubles the columns of what is kept.
    """
    task.deadline = Deadline(task.time_limit_s)
    try:
        return _until_deadline(task, solver)
    except Refusal:
        if task.offload != "auto" or solver != "joint" or not task.has_host:
            raise
        return _until_deadline(replace(task, offload="host", deadline=Deadline(task.time_limit_s)), solver)


def _until_deadline(task: Task, solver: str) -> Found:
    """Search until the deadline, or Ctrl-C: that interrupts only where nothing is known yet."""
    deadline = task.deadline
    with deadline.at_ctrl_c():
        try:
            found = _search_as_asked(task, solver)
        except Refusal:
            if deadline.is_interrupted:
                raise KeyboardInterrupt from None
            raise
    return replace(found, notes=(*found.notes, _STOPPED)) if deadline.is_interrupted else found


_STOPPED = "the search was stopped by Ctrl-C; this is the best plan found by then"


def _search_as_asked(task: Task, solver: str) -> Found:
    if task.variants is not None:
        return fastest_number(task, task.variants, lambda variant, limit_s: _search_meshes(variant, solver, limit_s))
    found = _search_meshes(task, solver)
    assert found is not None
    return found


def _search_meshes(task: Task, solver: str, cutoff_s: float = math.inf) -> Found | None:
    """Return the fastest answer of all meshes, `None` where none takes less than `cutoff_s`; `Refusal` where none fits."""
    search = MeshSearch(task, solver, cutoff_s)
    for place in search.places:
        search.look_at(place)
    if search.best is not None:
        return replace(search.best, notes=search.notes())
    if search.slower:
        return None
    raise Refusal(_why_not(task, solver, search.failures))


def _why_not(task: Task, solver: str, failures: Sequence[tuple[Place, Infeasible]]) -> str:
    """Say what binds, the smallest budget that would do, and the ways out."""
    budget = task.budget_bytes
    known = [(place, failure) for place, failure in failures if failure.smallest is not None]
    if not known and any(failure.out_of_time for _, failure in failures):
        less = ", or try fsdp, which has less to choose" if solver == "joint" else ""
        return (
            f"more time is needed: {solver} found no plan in {task.time_limit_s:g} s, and no proof that there is none; "
            f"give --time-limit {max(10.0, 4 * task.time_limit_s):g}{less}"
        )
    if budget is None or not known:
        return f"a plan by {solver} is needed; there is none: {failures[0][1].binding[0]}; loosen the pins or try joint"
    place, failure = min(
        known, key=lambda item: item[1].smallest.simulation.peak_bytes if item[1].smallest else math.inf
    )
    assert failure.smallest is not None
    smallest = failure.smallest.simulation
    least = budget_for(smallest.peak_bytes, task.divisor)
    other = "" if solver == "joint" else ", or --solver joint"
    where = f"{task.cluster.name} (mesh {place.shape})"
    parts = [
        f"a plan within {size_text(budget)} a device is needed; {solver} has none on {where}",
        f"what binds is {' and '.join(failure.binding)}",
        f"the smallest budget that would do is {size_text(least, up=True)}",
        f"try {size_text(least - budget, up=True)} more{_smaller_batch(task, smallest, budget)}{other}",
    ]
    return "; ".join(parts)


def _smaller_batch(task: Task, smallest: Simulation, budget: int) -> str:
    """An estimate of the batch that would fit: activations shrink with it, the rest does not."""
    static = sum(smallest.breakdown.get(kind, 0) for kind in ("param", "buffer", "grad", "optimizer"))
    sizes = [tensor.shape[0] for tensor in task.program.inputs if tensor.shape]
    if not sizes or static >= budget or smallest.peak_bytes <= static:
        return ""
    fits = int(max(sizes) * (budget - static) / (smallest.peak_bytes - static))
    if fits < 1:
        return ""
    what, cut = (
        ("micro-batch", "") if task.program.num_runs > 1 else ("batch", "; --micro-batches auto may cut this one")
    )
    return f", or a {what} of about {fits} instead of {max(sizes)} (an estimate{cut})"


def as_plan(solver: str, found: Found, plan_s: float) -> Plan:
    """Write an answer as a plan."""
    answer, place = found.answer, found.place
    task = place.task
    params, modules, batch = plan_sections(task.program, answer.decisions)
    return Plan(
        model=task.model_ref,
        fingerprint=task.program.fingerprint,
        torch_version=torch.__version__,
        batch=batch,
        literals=dict(task.literals),
        loss_fn=task.loss_fn,
        dtype=task.dtype,
        autocast=task.autocast,
        optimizer=task.optimizer,
        cluster=task.cluster,
        budget_bytes=task.budget_bytes,
        mesh={axis.name: axis.size for axis in place.axes},
        offload=_offload(task, answer.decisions),
        micro_batches=task.program.num_runs,
        corrections=dict(task.program.corrections),
        predicted=_predicted(found.price, answer.simulation),
        solver=SolverInfo(
            name=solver,
            status=answer.status,
            gap=answer.gap,
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
            *_passes(task),
            *answer.notes,
            *found.notes,
        ),
    )


def _offload(task: Task, decisions: Decisions) -> OffloadPlan | None:
    if not (decisions.offloaded or decisions.offloaded_states) or task.tier_name is None:
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


def size_text(num_bytes: float, up: bool = False) -> str:
    """Write bytes for people, to the nearest hundredth or, with `up`, to the next one.

    >>> size_text(1536 * 2**20), size_text(2**20), size_text(2**20 + 1, up=True)
    ('1.50 GiB', '1.00 MiB', '1.01 MiB')
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            shown = math.ceil(100 * num_bytes / size) / 100 if up else num_bytes / size
            return f"{shown:.2f} {unit}"
    return f"{num_bytes:.0f} B"


def _gathered(program: Program, price: Price) -> tuple[str, ...]:
    """A note on the ops that no rule describes, with what running them whole takes of the step."""
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
    """A note on the ops whose rule was found by trying."""
    names = sorted({op.name for op in program.ops if op.signature.discovered})
    if not names:
        return ()
    return (
        f"the rule of {', '.join(names)} was found by trying shards of small inputs; `verify` holds it against one process",
    )


def _passes(task: Task) -> tuple[str, ...]:
    """A note on an optimizer whose step takes more than one forward and backward pass."""
    num_passes = task.optimizer_cost.num_passes
    if num_passes == 1.0:
        return ()
    return (
        f"{task.optimizer} takes {num_passes:.3g} forward and backward passes a step on average, which the times count; the "
        "peak is that of one pass and the declared state, without the graph of a Hessian-vector product",
    )
