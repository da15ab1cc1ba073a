"""Trainwright: how should this PyTorch model be trained on this hardware?

    profile      model, batch            → Profile    what one training step costs
    plan         model, batch, hardware  → Plan       layouts and recomputation, under a memory budget
    parallelize  model, Plan             → nn.Module  this rank's part, under torch.distributed
    verify       model_fn, Plan          → Report     same loss, same gradients, the promised peak?

Names of hardware (`"8xh200"`), optimizers (`"adamw"`) and sizes (`"40GiB"`) are resolved here; everything else takes
the artifacts themselves. Heavy imports wait until a verb is used.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from . import hardware as _hardware  # imported before the verb of that name, which then stands in its place
from .artifacts import Cluster, Difference, ModelRef, Plan, Profile, Refusal, Report, UserError, diff
from .cli.sizes import parse_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .planner import Explanation, Simulation
    from .runtime import ParallelModule

    LossFn = Callable[[Any, Any], Tensor]

__version__ = "0.1.0"
SOLVERS = ("ddp", "fsdp", "megatron", "two-stage", "joint")
_COLLECT_EVERY = 200_000
MEMORY_SHARE = 0.9
"""Of a device's memory, the budget where none is given."""


def hardware(text: str | Cluster) -> Cluster:
    """Return the cluster that `text` names: `cpu:2`, `8xh200`, `2x4xa100`, or a JSON file; `UserError` when none does.

    >>> hardware("8xh200").num_devices
    8
    """
    if isinstance(text, Cluster):
        return text
    return _hardware.resolve(text)


def load_model(spec: str, **options: Any) -> Any:
    """Build the model that `spec` names (`zoo:NAME`, `FILE.py:function`, `package.module:function`) and its batch."""
    from .capture.targets import load

    return load(spec, **options)


def profile(
    model: nn.Module,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    optimizer: Any = "adamw",
    autocast: str | None = None,
    accumulate: int = 1,
    hardware: str | Cluster | None = None,
    name: str = "",
    capture: bool | None = None,
    run: bool = False,
) -> Profile:
    """Return what one training step of `model` on `batch` costs, whose memory is not taken and which is not run.

    optimizer: a name, or a function from parameters to an optimizer. accumulate: micro-batches (each like `batch`) to a
    step. hardware: predict its time and its differences. capture: can the model be captured, hence planned? None: asked
    where that is quick. run: if the forward asks for values, run two real steps of a copy instead.

    >>> import torch
    >>> found = profile(torch.nn.Linear(4, 2), (torch.ones(3, 4),), loss_fn=lambda out, batch: out.sum())
    >>> found.num_params, found.param_bytes
    (10, 40)
    """
    from .profiler import profile as follow

    make, label = _optimizer(optimizer)
    cluster = _cluster(hardware) if hardware is not None else None
    found = follow(
        model,
        batch,
        loss_fn=loss_fn,
        make_optimizer=make,
        optimizer=label,
        autocast=autocast,
        accumulate=accumulate,
        hardware=cluster,
        name=name,
        capture=capture,
        run=run,
    )
    return _with_extra_passes(found, cluster) if isinstance(optimizer, str) else found


@contextmanager
def _rarely_collecting() -> Iterator[None]:
    """Look for garbage in cycles less often: planning makes millions of small objects, few of them in cycles.

    A fifth of the time of planning went into such looks.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _COLLECT_EVERY) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_rarely_collecting()
def plan(
    model: nn.Module,
    batch: Any,
    *,
    hardware: str | Cluster,
    memory: int | str | None = None,
    optimizer: str = "adamw",
    loss_fn: LossFn | None = None,
    mesh: Sequence[int] | None = None,
    solver: str = "joint",
    pins: Sequence[str] = (),
    offload: str = "auto",
    time_limit_s: float = 30.0,
    autocast: str | None = None,
    micro_batches: int | str = 1,
    shapes: Sequence[Any] = (),
    model_ref: ModelRef | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Choose how every tensor is laid out and what is kept, recomputed or offloaded, so that a step is fastest within `memory`.

    memory: per device, the batch excluded; default 90 % of the device's. mesh: sizes of its axes, outermost first;
    default: the factorisations are searched. solver: joint, two-stage, ddp, fsdp, megatron. offload: host, disk, none, or
    auto: to the host, for GPUs, where nothing fits without (`frontier` and the other solvers then offload nothing).
    micro_batches: into how many parts a step cuts the batch, one after the other, with the whole batch's loss and
    gradients; `"auto"` chooses. time_limit_s: of the search, after which the best plan found so far is taken; its
    `solver.gap` says how far from the optimum it may be. shapes: further batches, of other shapes, that the plan is to run
    within the same memory; batches that are nowhere larger than one of the planned run anyway.

    Raises `Refusal` when nothing fits, with what binds, the smallest budget that would do, and the cheapest way out; or
    when nothing was found in the time.
    """
    from .planner import make_plan, make_plan_for

    if shapes:
        batch, others = _by_size(model, [batch, *shapes], loss_fn, autocast, micro_batches)
        return make_plan_for(others, **_question(model, batch, hardware, memory, optimizer, loss_fn, mesh, pins, offload,
                                                 time_limit_s, autocast, model_ref, progress, 1), solver=solver)  # fmt: skip
    return make_plan(**_question(model, batch, hardware, memory, optimizer, loss_fn, mesh, pins, offload, time_limit_s,
                                 autocast, model_ref, progress, micro_batches), solver=solver)  # fmt: skip


@_rarely_collecting()
def compare(
    model: nn.Module,
    batch: Any,
    *,
    hardware: str | Cluster,
    memory: int | str | None = None,
    optimizer: str = "adamw",
    loss_fn: LossFn | None = None,
    mesh: Sequence[int] | None = None,
    pins: Sequence[str] = (),
    offload: str = "auto",
    time_limit_s: float = 30.0,
    autocast: str | None = None,
    micro_batches: int | str = 1,
    model_ref: ModelRef | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Plan | Refusal]:
    """Plan with every solver; one that cannot meet the budget answers with its `Refusal`. Without `memory`, all can."""
    from .planner import compare as run

    question = _question(model, batch, hardware, memory, optimizer, loss_fn, mesh, pins, offload, time_limit_s, autocast,
                         model_ref, progress, micro_batches)  # fmt: skip
    if memory is None:
        question["budget_bytes"] = None
    return run(**question)


@_rarely_collecting()
def frontier(
    model: nn.Module,
    batch: Any,
    *,
    hardware: str | Cluster,
    memory: int | str | None = None,
    optimizer: str = "adamw",
    loss_fn: LossFn | None = None,
    mesh: Sequence[int] | None = None,
    pins: Sequence[str] = (),
    offload: str = "auto",
    time_limit_s: float = 30.0,
    autocast: str | None = None,
    micro_batches: int | str = 1,
    model_ref: ModelRef | None = None,
    num_points: int = 8,
    progress: Callable[[str], None] | None = None,
) -> list[Plan]:
    """Return plans from the smallest peak to the fastest step within `memory`: none is both slower and larger than another.

    num_points: budgets to solve for on each mesh, from 2 on. The rest is as for `plan`.
    """
    from .planner import frontier as run

    return run(**_question(model, batch, hardware, memory, optimizer, loss_fn, mesh, pins, offload, time_limit_s,
                           autocast, model_ref, progress, micro_batches), num_points=num_points)  # fmt: skip


def check(
    plan: Plan, model: nn.Module, batch: Any, *, loss_fn: LossFn | None = None, memory: int | str | None = None
) -> Plan:
    """Return an edited plan with its prediction made anew, without solving; `memory` replaces its budget."""
    from .planner import Shaped, check_shapes
    from .planner import check as run
    from .runtime.steps import batch_like

    budget = parse_bytes(memory) if memory is not None else plan.budget_bytes
    make, _ = _optimizer(plan.optimizer)
    cost, program = _optimizer_cost(plan.optimizer), _program_of(plan, model, batch, loss_fn)
    checked = run(plan, program, budget, cost, make)
    others = [
        Shaped(_program_of(plan, model, batch_like(plan, each.batch), loss_fn), each.batch) for each in plan.shapes
    ]
    return check_shapes(checked, program, others, cost, make) if others else checked


def explain(
    plan: Plan, model: nn.Module, batch: Any, key: str | None = None, *, loss_fn: LossFn | None = None
) -> Explanation:
    """Say why a plan is as it is: for each op (or those that `key` names) its choice, its cost, and the next best."""
    from .planner import explain as run

    return run(plan, _program_of(plan, model, batch, loss_fn), key, _optimizer_cost(plan.optimizer))


def simulate_plan(plan: Plan, model: nn.Module, batch: Any, *, loss_fn: LossFn | None = None) -> Simulation:
    """Return one rank's memory over a step of `plan`, moment by moment."""
    from .capture.decide import decisions_of
    from .planner import simulate

    program = _program_of(plan, model, batch, loss_fn)
    make, _ = _optimizer(plan.optimizer)
    return simulate(program, decisions_of(program, plan), make, target=plan.cluster.device.kind, timeline=True,
                    optimizer_cost=_optimizer_cost(plan.optimizer))  # fmt: skip


def parallelize(model: nn.Module, plan: Plan, weights: Any = None, *, loss_fn: LossFn | None = None, seed: int | None = None
                ) -> ParallelModule:  # fmt: skip
    """Return `model` as `plan` lays it out on this rank; see `trainwright.runtime.parallelize`."""
    from .runtime import parallelize as run

    return run(model, plan, weights, loss_fn=loss_fn, seed=seed)


def verify(model_fn: Callable[[], Any], plan: Plan, *, dtype: str = "float64", seed: int = 0) -> Report:
    """Compare a plan's loss, gradients and peak with one process's; see `trainwright.runtime.verify`."""
    from . import optim
    from .runtime import verify as run

    optim.check_plannable(plan.optimizer)
    return run(model_fn, plan, dtype=dtype, seed=seed,
               make_optimizer=lambda params: optim.create(plan.optimizer, params))  # fmt: skip


def calibrate(
    num_processes: int | None = None, quick: bool = False, progress: Callable[[str], None] | None = None
) -> Cluster:
    """Measure this machine; the result is a cluster to plan for."""
    return _hardware.calibrate(num_processes, quick=quick, progress=progress)


def full_state_dict(model: ParallelModule, *, trainable: bool = False) -> dict[str, Tensor]:
    """Return a parallel module's whole weights in the user's names and shapes; a collective call.

    trainable: those alone that are trained (an adapter's), so that a frozen base is not gathered.
    """
    from .runtime import full_state_dict as run

    return run(model, trainable=trainable)


def register_op(
    op: Any,
    loops: str | Callable[[Any], Any],
    *,
    reduced: str = "",
    whole: str = "",
    once: Sequence[int] = (),
    kind: Literal["heavy", "elementwise"] = "heavy",
    localize: Callable[..., Any] | None = None,
) -> None:
    """Say which loops an op of your own runs over, so that plans may split it; see `trainwright.capture.user_ops.register_op`."""
    from .capture.user_ops import register_op as run

    run(op, loops, reduced=reduced, whole=whole, once=once, kind=kind, localize=localize)


def reference_step(model: nn.Module, optimizer: Any, batch: Any, loss_fn: LossFn | None = None) -> Tensor:
    """Run one ordinary training step: the loop of every measurement."""
    from .profiler import reference_step as run

    return run(model, optimizer, batch, loss_fn)


def __getattr__(name: str) -> Any:
    if name == "zoo":
        from .capture import zoo

        return zoo
    raise AttributeError(f"module 'trainwright' has no attribute {name!r}")


def _question(model: Any, batch: Any, hardware: Any, memory: Any, optimizer: str, loss_fn: Any, mesh: Any, pins: Sequence[str],
              offload: str, time_limit_s: float, autocast: str | None, model_ref: ModelRef | None, progress: Any,
              micro_batches: int | str) -> dict[str, Any]:  # fmt: skip
    cluster = _cluster(hardware)
    budget = parse_bytes(memory) if memory is not None else int(MEMORY_SHARE * cluster.device.memory_bytes)
    make, label = _optimizer(optimizer)
    program, variants = _programs(model, batch, loss_fn, autocast, micro_batches)
    return {
        "program": program,
        "variants": variants,
        "model_ref": model_ref or ModelRef(name=type(model).__name__),
        "cluster": cluster,
        "budget_bytes": budget,
        "mesh": tuple(mesh) if mesh is not None else None,
        "optimizer": label,
        "optimizer_cost": _optimizer_cost(optimizer),
        "make_optimizer": make,
        "literals": _literals(batch),
        "dtype": _dtype_name(model),
        "autocast": autocast,
        "pins": tuple(pins),
        "offload": offload,
        "time_limit_s": time_limit_s,
        "progress": progress,
    }


_cluster = hardware


def _programs(model: nn.Module, batch: Any, loss_fn: Any, autocast: str | None, micro_batches: int | str) -> Any:
    """The program of `micro_batches`, and those of other numbers where it is to be chosen."""
    from .capture.micro_batches import batch_size, candidates, capture_step
    from .planner import Variants
    from .runtime.module import DTYPES

    dtype = DTYPES[autocast] if autocast else None
    if micro_batches != "auto" and (not isinstance(micro_batches, int) or micro_batches < 1):
        raise UserError(f"a number of micro-batches is needed, 1 or more, or auto; got {micro_batches!r}; try auto")
    if isinstance(micro_batches, int):
        return capture_step(model, batch, loss_fn, dtype, micro_batches), None
    whole = capture_step(model, batch, loss_fn, dtype)
    return whole, Variants(
        candidates(batch_size(batch)), lambda num: capture_step(model, batch, loss_fn, dtype, num, whole=whole)
    )


def _by_size(
    model: nn.Module, batches: Sequence[Any], loss_fn: Any, autocast: str | None, micro_batches: int | str
) -> Any:
    """The batch to plan on, and the others as captures of their own; batches of equal shapes count once."""
    from .capture.micro_batches import capture_step, shapes_of
    from .planner import Shaped, check_alike, largest
    from .runtime.module import DTYPES

    if micro_batches != 1:
        raise UserError(
            f"one micro-batch is needed to plan for several shapes; got {micro_batches}; plan for the largest shape alone: "
            "smaller batches run under its plan"
        )
    found = [shapes_of(batch) for batch in batches]
    for each in found:
        check_alike(found[0], each)
    at, dtype = largest(found), DTYPES[autocast] if autocast else None
    different = [k for k in range(len(found)) if found[k] not in (found[at], *found[:k])]
    return batches[at], [Shaped(capture_step(model, batches[k], loss_fn, dtype), found[k]) for k in different]


def _program_of(plan: Plan, model: nn.Module, batch: Any, loss_fn: Any) -> Any:
    from .capture.micro_batches import capture_step
    from .runtime.module import DTYPES

    dtype = DTYPES[plan.autocast] if plan.autocast else None
    return capture_step(model, batch, loss_fn, dtype, plan.micro_batches, plan.corrections)


def _optimizer(optimizer: Any) -> tuple[Callable[[Any], Any], str]:
    if not isinstance(optimizer, str):
        return optimizer, getattr(optimizer, "__name__", "custom")
    from . import optim
    from .optim.declared import DeclaredStep

    entry = optim.record(optimizer)
    if entry.needs_values:
        return (lambda params: DeclaredStep(params, entry)), entry.name
    return (lambda params: optim.create(entry.name, params)), entry.name


def _with_extra_passes(found: Profile, cluster: Cluster | None) -> Profile:
    """Add what the stand-in for a method that reads values did not run: its further passes and its update."""
    from . import optim

    entry = optim.record(found.optimizer)
    if not entry.needs_values:
        return found
    note = (
        f"{entry.name} takes {entry.num_passes:.3g} forward and backward passes a step on average; bytes are those of one and of "
        "what it declares, without the graph of a Hessian-vector product"
    )
    update: dict[str, Any] = {"notes": (*found.notes, note)}
    whole = found.modules[0]
    if cluster is not None and found.step_s is not None:
        pass_s = (whole.forward_s or 0.0) + (whole.backward_s or 0.0)
        moved = 2 * found.param_bytes + found.grad_bytes + 2 * found.optimizer_bytes
        update_s = moved / cluster.device.bandwidth_bytes_per_s
        update["step_s"] = found.step_s + (entry.num_passes - 1) * pass_s + update_s
    return found.model_copy(update=update)


def _optimizer_cost(name: str) -> Any:
    from . import optim

    return optim.record(name)


def _literals(batch: Any) -> dict[str, Any]:
    import torch

    from .capture._torch_private import flatten_batch
    from .capture.export import as_batch

    return {name: leaf for name, leaf in flatten_batch(as_batch(batch))[0] if not isinstance(leaf, torch.Tensor)}


def _dtype_name(model: nn.Module) -> str:
    from .runtime.module import DTYPES

    found = next((param.dtype for param in model.parameters() if param.is_floating_point()), DTYPES["fp32"])
    return next((name for name, dtype in DTYPES.items() if dtype == found), str(found).removeprefix("torch."))


__all__ = [
    "SOLVERS",
    "Cluster",
    "Difference",
    "ModelRef",
    "Plan",
    "Profile",
    "Refusal",
    "Report",
    "UserError",
    "calibrate",
    "check",
    "compare",
    "diff",
    "explain",
    "frontier",
    "full_state_dict",
    "hardware",
    "load_model",
    "parallelize",
    "parse_bytes",
    "plan",
    "profile",
    "reference_step",
    "register_op",
    "simulate_plan",
    "verify",
]
