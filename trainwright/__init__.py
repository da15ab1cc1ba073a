"""Trainwright: how should this PyTorch model be trained on this hardware?

    profile      model, batch            → Profile    what one training step costs
    plan         model, batch, hardware  → Plan       layouts and recomputation, under a memory budget
    parallelize  model, Plan             → nn.Module  this rank's part, under torch.distributed
    train        model, Plan, data       → Trained    the losses, and this rank's part, trained
    verify       model_fn, Plan          → Report     same loss, same gradients, the promised peak?

The folders (`optim`, `schedules`, `selection`, `solvers`, `nn`, `runtime`, `launch` …) are attributes too: `tw.optim.create(…)`.
Names of hardware (`"8xh200"`), optimizers (`"adamw"`) and sizes (`"40GiB"`) are resolved here; everything else takes
the artifacts themselves. Heavy imports wait until a verb is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Unpack

from . import hardware as _hardware  # imported before the verb of that name, which then stands in its place
from .arguments import as_cluster, as_dtype_name, as_maker, as_plan, check_model
from .artifacts import (
    Cluster,
    Difference,
    Explanation,
    ModelRef,
    Offers,
    Plan,
    Profile,
    Refusal,
    Report,
    UserError,
    diff,
    parse_bytes,
    parse_count,
)
from .collecting import rarely_collecting
from .request import PlanOptions, PlanRequest, by_size, program_of, refuse_compiled, refuse_stages
from .training import Trained, train

if TYPE_CHECKING:
    import os

    from torch import Tensor, nn

    from . import artifacts as artifacts
    from . import capture as capture
    from . import federated as federated
    from . import integrations as integrations
    from . import launch as launch
    from . import numerics as numerics
    from . import ops as ops
    from . import optim as optim
    from . import planner as planner
    from . import profiler as profiler
    from . import reports as reports
    from . import runtime as runtime
    from . import schedules as schedules
    from . import selection as selection
    from . import solvers as solvers
    from . import sync as sync
    from .capture.experts import experts as experts
    from .capture.experts import register_experts as register_experts
    from .capture.experts import register_gate as register_gate
    from .models import zoo as zoo
    from .planner import Simulation
    from .request import DtypeLike, HardwareLike, LossFn, OptimizerLike
    from .runtime import ParallelModule, TierOptions

    PlanLike = str | Plan | os.PathLike[str]

__version__ = "0.1.0"
SOLVERS = ("ddp", "fsdp", "megatron", "two-stage", "joint")
FOLDERS = (
    "artifacts", "capture", "federated", "fusion", "integrations", "launch", "models", "nn", "numerics", "ops",
    "optim", "planner", "profiler", "program", "rank", "reports", "runtime", "schedules", "selection", "solvers",
    "streaming", "sync", "tiers", "torch_internals",
)  # fmt: skip
"""The folders that are attributes of this module: all but `hardware`, which is the verb, and the command line."""
EXPERTS = ("experts", "register_experts", "register_gate")
"""The functions of `capture.experts`, attributes of this module too: models call them."""


def hardware(text: HardwareLike) -> Cluster:
    """Return the cluster that `text` names.

    text: `cpu:2` (processes of this machine; in Python the number alone will do), `8xh200`, `2x4xa100` (two nodes of
    four), or the path of a JSON file from `calibrate`. Raises `UserError` when it names none.

    >>> hardware("8xh200").num_devices, hardware(2).name
    (8, 'cpu:2')
    """
    return as_cluster(text)


def load_model(spec: str, **options: Any) -> Any:
    """Build what `spec` names; the result has `model`, `batch`, `loss_fn`, and what else the user's function returned.

    spec: `zoo:NAME`, `FILE.py:function` or `package.module:function`. options: `device` (`"meta"`, the default, or
    `"cpu"`), `batch_size`, `seq_len`, `dtype`, `seed`, and `settings`, a dict of the function's other keywords as text.

    >>> loaded = load_model("zoo:gpt2-tiny", batch_size=2)
    >>> loaded.batch["input_ids"].shape[0]
    2
    """
    from .models.targets import load

    return load(spec, **options)


def profile(
    model: nn.Module | Callable[[], Any],
    batch: Any = None,
    *,
    loss_fn: LossFn | None = None,
    optimizer: OptimizerLike = "adamw",
    autocast: DtypeLike | None = None,
    accumulate: int = 1,
    keep_grads: bool = False,
    clip_norm: float | None = None,
    processes: int = 1,
    tf32: bool = False,
    expandable_segments: bool = False,
    hardware: HardwareLike | None = None,
    name: str = "",
    capture: bool | None = None,
    run: bool = False,
    compile: bool = False,
    cuda_graphs: bool = False,
) -> Profile:
    """Return what one training step of `model` on `batch` costs, whose memory is not taken and which is not run.

    model: a `torch.nn.Module` on any device, the meta device included; it is not changed.
    batch: one batch, as a dict (`model(**batch)`), a tuple (`model(*batch)`) or a lone tensor.
    loss_fn: called with the output and what `forward` does not take of the batch: with `(x, y)` and a `forward(x)`,
        `nn.CrossEntropyLoss()` gets `(output, y)`. One whose second parameter is named `batch`, or whose model takes the
        whole batch, gets `(output, batch)`. Without it, the loss is the output's `.loss`, its `["loss"]`, or itself.
    optimizer: a name (`trainwright optimizers` lists them), a class, an optimizer, or a function from parameters to one.
    autocast: the type of `torch.autocast` around forward and loss: `"bf16"` or `torch.bfloat16`, `"fp16"`.
    accumulate: micro-batches (each like `batch`) to a step.
    keep_grads: the loop zeroes gradients (`zero_grad(set_to_none=False)`, torch's default before 2.0) and keeps them.
    clip_norm: the loop clips gradients to this norm before the update, by `torch.nn.utils.clip_grad_norm_`.
    hardware: as for `hardware()`; the step's time is predicted on one of its devices, and a GPU's differences modelled.
    processes: `model` is then a function that makes a model and wraps it (`fully_shard`, `parallelize_module`) as a script
        does in one of so many processes; it returns that, or `(model, batch)`, or `(model, batch, loss_fn)`, the batch this
        process's. The process group is there, its other members imagined; meshes are `init_device_mesh("cpu", …)`.
    tf32: fp32 products round to TF32 on devices that can (`torch.set_float32_matmul_precision("high")`); convolutions do
        so anyway, torch's default.
    expandable_segments: as `PYTORCH_CUDA_ALLOC_CONF` says of CUDA's allocator; it decides `reserved_bytes`.
    name: how the profile calls the model. capture: can the model be captured, hence planned? None: asked where that is
    quick. run: if the step cannot be followed without values, run two real steps of a copy instead.
    compile: the model runs as `torch.compile(model)` would have it: its graphs and what they keep are torch's own, their
        kernels told by a rule (docs/profiling.md). cuda_graphs: in its mode `"reduce-overhead"`, on a GPU.

    Raises `UserError` where the model does not run on the batch, types that torch refuses included.

    >>> import torch
    >>> net = torch.nn.Linear(4, 2)
    >>> found = profile(net, (torch.ones(3, 4), torch.tensor([0, 1, 1])), loss_fn=torch.nn.CrossEntropyLoss())
    >>> found.num_params, found.param_bytes
    (10, 40)
    """
    from .profiler import profile as follow

    if processes == 1 and batch is not None:
        check_model(model)
    cluster = as_cluster(hardware) if hardware is not None else None
    make, label = as_maker(optimizer, "cpu" if cluster is None else cluster.device.kind)
    if cluster is not None and tf32:
        cluster = cluster.model_copy(update={"device": cluster.device.with_tf32()})
    found = follow(
        model,
        batch,
        loss_fn=loss_fn,
        make_optimizer=make,
        optimizer=label,
        autocast=as_dtype_name(autocast),
        accumulate=accumulate,
        keep_grads=keep_grads,
        clip_norm=clip_norm,
        processes=processes,
        expandable_segments=expandable_segments,
        hardware=cluster,
        name=name,
        capture=capture,
        run=run,
        compile=compile,
        cuda_graphs=cuda_graphs,
    )
    return _with_extra_passes(found, cluster) if isinstance(optimizer, str) else found


@rarely_collecting()
def plan(
    model: nn.Module,
    batch: Any,
    *,
    solver: str = "joint",
    shapes: Sequence[Any] = (),
    batch_size: int | str | None = None,
    global_batch: int | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Choose how every tensor is laid out and what is kept, recomputed or offloaded, so that a step is fastest within `memory`.

    model, batch, loss_fn, autocast: as for `profile`; the batch is the whole one, of all devices together.
    solver: `"joint"`, `"two-stage"`, `"ddp"`, `"fsdp"` or `"megatron"`.
    shapes: further batches, of other shapes, that the plan is to run within the same memory; batches that are nowhere
        larger than one of the planned run anyway.
    batch_size: the batch is cut, or repeated, to so many examples; `"auto"`: to as many as train the most examples a second
        within the memory, found by planning for several sizes (a note of the plan says which).
    global_batch: with `batch_size="auto"`, a step is to train on so many examples; how many are taken at once, and how
        many such micro-batches follow one another, is chosen.

    The options, all by keyword, of which `hardware` is needed:

    hardware: as for `hardware()`: `"8xh100"`, `"cpu:2"`, `2`, the path of a file from `calibrate`.
    memory: per device, the batch excluded: `"20GiB"`, or bytes; default 90 % of the device's.
    optimizer: a name, or a class, an instance or a `functools.partial` of one that has a name, whose settings count too.
    optimizer_options: its settings by name, but for the learning rate: `{"betas": (0.9, 0.95)}`; the plan keeps them, and
        the parameter groups that the method's documentation asks for.
    optimizer_form: how its step runs: `"fused"`, `"foreach"` or `"loop"`; default: fused where the method has that.
    mesh: sizes of its axes, outermost first: `(2, 4)`, `"2x4"`, `8`; default: the factorisations are searched.
    pins: decisions that are not left to the solver, as text; one or several (docs/planning.md).
    offload: `"host"`, `"disk"`, `"none"`, or `"auto"`: to the host, for GPUs, where memory binds and it is faster than to
        compute again (`frontier` and the other solvers then offload nothing).
    keep_graph: keep all that a second backward through the loss needs, which nothing that is recomputed, offloaded or sent in
        buckets is; for the schedule `lanczos`. Optimizers that take the loss have it anyway.
    micro_batches: into how many parts a step cuts the batch, one after the other, with the whole batch's loss and
        gradients; `"auto"` chooses.
    pipeline: into how many stages the model's blocks are cut, each on ranks of its own: a number, `"auto"`: as many as are
        fastest, none among them; `mesh` is then the mesh of one stage, and micro-batches of 1 mean `"auto"` (docs/pipeline.md).
    pipeline_schedule: the order in which stages work: `"1f1b"`, `"interleaved"`, `"zero-bubble"`, or `"auto"`, the fastest.
    expert_imbalance: by how much a rank's experts may get more rows than their even share, in any layer, for the peak to hold:
        1.25, `"worst"`, or `"measured:FILE"`, the largest that the metrics file of a run has. Plans that split no experts
        over ranks do not need it.
    loss_chunks: into how many chunks each rank cuts its rows to take a linear head and its cross-entropy together, so that
        logits never stand whole, and are no output of a step; `"none"`; `"free"`: where that is faster; `"auto"`: where nothing
        fits without.
    compile: on one device, torch compiles each block, which keeps what its partitioner chooses; where that does not fit, the plan
        says which blocks keep less and compute more anew (docs/planning.md#compiled-blocks).
    tier: a `tiers.Policy`, how disks are used on which parameters, gradients and states rest; the plan's `tier` says what they
        move then, a step and a day (docs/tiers.md).
    sampled: the share of its rows (tokens), above 0 and at most 1, that a linear map may keep for its weight's gradient, which is
        then an unbiased estimate and not exact; loss and all other gradients stay exact. Left out: all are exact
        (docs/estimated-gradients.md).
    time_limit_s: of the search, after which the best plan found so far is taken; its `solver.gap` says how far from the
        optimum it may be.
    model_ref: where the model comes from, for the plan's `model`. progress: told, in words, how the search goes.

    Raises `Refusal` when nothing fits, with what binds, the smallest budget that would do, and the cheapest way out; or
    when nothing was found in the time; `UserError` where an argument cannot be, and for what `profile` refuses.

    >>> import torch
    >>> net = torch.nn.Linear(4, 2)
    >>> found = plan(net, (torch.ones(8, 4), torch.arange(8) % 2), loss_fn=torch.nn.CrossEntropyLoss(), hardware="cpu:2")
    >>> found.num_ranks, list(found.batch)
    (2, ['0', '1'])
    """
    if batch_size is None and global_batch is None:
        return _planned(model, batch, solver, shapes, options)
    if shapes:
        raise UserError("one batch is needed for a batch size; got shapes too; leave one of them out")
    from .batch_size import plan_sized

    def planned(batch: Any, **more: Any) -> Plan:
        return _planned(model, batch, solver, (), {**more, **options})

    return plan_sized(planned, batch, PlanRequest.of("plan", model, batch, options).cluster, batch_size, global_batch)


@rarely_collecting()
def offers(
    model: nn.Module,
    batch: Any,
    *,
    hardware: Sequence[HardwareLike],
    prices: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    tokens: float | str | None = None,
    samples: float | str | None = None,
    **options: Any,
) -> Offers:
    """Plan on several kinds of hardware and return what training comes to on each: examples or tokens a second, and money.

        hours = tokens / (tokens per second · 3600),   cost = hours · price of an hour

    model, batch, options: those of `plan`, `batch_size` and `global_batch` among them; each hardware has its own budget, mesh
        and batch size. hardware: each as for `hardware()`.
    prices: a TOML or JSON file, or a mapping like it: `{"currency": "EUR", "device_hour": {"a100": 1.5}, "hour": {"8xh100":
        20}}`, of a device for an hour, or of all of that hardware. None: no money.
    tokens, samples: how much is to be trained on, `"300B"` or a number; one of them at most.

    Raises `UserError` for hardware without a price, before planning; `Refusal` where nothing fits on any. Prices and rates say
    nothing of what is available, or of how many steps another batch size needs to the same loss.

    >>> import torch
    >>> net, batch, loss_fn = torch.nn.Linear(4, 1), (torch.ones(8, 4),), lambda output: output.mean()
    >>> found = offers(net, batch, loss_fn=loss_fn, hardware=["a100", "h100"], prices={"device_hour": {"a100": 1, "h100": 3}})
    >>> [offer.hardware for offer in found.offers], found.cheapest.hardware, found.offers[1].price_per_hour
    (['a100', 'h100'], 'a100', 3.0)
    """
    from .offering import check_tokens, offers_of
    from .prices import Prices

    count = None if tokens is None else parse_count(tokens)
    check_tokens(count, batch)
    given = [(each if isinstance(each, str) else as_cluster(each).name, as_cluster(each)) for each in hardware]
    return offers_of(
        lambda cluster: plan(model, batch, hardware=cluster, **options),
        given,
        None if prices is None else Prices.read(prices),
        count,
        None if samples is None else parse_count(samples),
    )


def _planned(model: nn.Module, batch: Any, solver: str, shapes: Sequence[Any], options: Mapping[str, Any]) -> Plan:
    from .planner import make_compiled_plan, make_plan, make_plan_for

    request = PlanRequest.of("plan", model, batch, options)
    if request.compile and not shapes:
        return make_compiled_plan(make_plan, **request.question(), solver=solver)
    if not shapes:
        return make_plan(**request.question(), solver=solver)
    chunks = request.loss_chunks if isinstance(request.loss_chunks, int) else "none"
    request = replace(request, loss_chunks=chunks)  # all shapes take it alike: whole, unless it is said
    largest, others = by_size(request, shapes)
    return make_plan_for(others, **replace(request, batch=largest).question(), solver=solver)


@rarely_collecting()
def compare(model: nn.Module, batch: Any, **options: Unpack[PlanOptions]) -> dict[str, Plan | Refusal]:
    """Plan with every solver; one that cannot meet the budget answers with its `Refusal`. Without `memory`, all can.

    model, batch, options: those of `plan`, but for `solver` and `shapes`. The result is a dict from the solver's name to its
    plan.

    >>> import torch
    >>> found = compare(torch.nn.Linear(4, 1), (torch.ones(8, 4),), loss_fn=lambda output: output.mean(), hardware=2)
    >>> sorted(found)
    ['ddp', 'fsdp', 'joint', 'megatron', 'two-stage']
    """
    from .planner import compare as run

    request = PlanRequest.of("compare", model, batch, options)
    refuse_compiled(request, "a comparison")
    question = request.question()
    if request.memory is None:
        question["budget_bytes"] = None
    return run(**question)


@rarely_collecting()
def frontier(model: nn.Module, batch: Any, *, num_points: int = 8, **options: Unpack[PlanOptions]) -> list[Plan]:
    """Return plans from the smallest peak to the fastest step within `memory`: none is both slower and larger than another.

    num_points: budgets to solve for on each mesh, from 2 on. model, batch, options: those of `plan`, but for `solver` and
    `shapes`.

    >>> import torch
    >>> found = frontier(torch.nn.Linear(4, 1), (torch.ones(8, 4),), loss_fn=lambda output: output.mean(), hardware=2,
    ...                  num_points=2)
    >>> all(one.predicted.peak_bytes < other.predicted.peak_bytes for one, other in zip(found, found[1:]))
    True
    """
    from .planner import frontier as run

    request = PlanRequest.of("frontier", model, batch, options)
    refuse_compiled(request, "a frontier")
    refuse_stages(request, "a frontier")
    return run(**request.question(), num_points=num_points)


def check(
    plan: PlanLike, model: nn.Module, batch: Any, *, loss_fn: LossFn | None = None, memory: float | str | None = None
) -> Plan:
    """Return an edited plan with its prediction made anew, without solving.

    plan: a `Plan`, or the path of its file. model, batch, loss_fn: those it was made with. memory: a budget in place of
    its own, `"18GiB"` or bytes. Raises `Refusal` where it does not fit, `UserError` where it is not this model's.

    >>> import torch
    >>> net, batch, loss_fn = torch.nn.Linear(4, 1), (torch.ones(8, 4),), lambda output: output.mean()
    >>> made = globals()["plan"](net, batch, loss_fn=loss_fn, hardware="cpu:2")
    >>> check(made, net, batch, loss_fn=loss_fn).predicted.peak_bytes == made.predicted.peak_bytes
    True
    """
    from . import optim
    from .planner import Shaped, check_shapes
    from .planner import check as run
    from .runtime.steps import batch_like

    plan = as_plan(plan)
    budget = parse_bytes(memory) if memory is not None else plan.budget_bytes
    chosen, program = optim.of_plan(plan), program_of(plan, model, batch, loss_fn)
    cost, make = chosen, chosen.on_fakes
    checked = run(plan, program, budget, cost, make)
    others = [
        Shaped(program_of(plan, model, batch_like(plan, each.batch), loss_fn), each.batch) for each in plan.shapes
    ]
    return check_shapes(checked, program, others, cost, make) if others else checked


def explain(
    plan: PlanLike, model: nn.Module, batch: Any, key: str | None = None, *, loss_fn: LossFn | None = None
) -> Explanation:
    """Say why a plan is as it is: for each op its choice, its cost, and the best other option while all others stay.

    With `key`, the other options of the first six decisions are simulated and priced, as `check` does an edited plan; without,
    they are estimated by the sum of their parts.

    plan: a `Plan`, or the path of its file. model, batch, loss_fn: those it was made with. key: a key of the plan, a
    module's path, a parameter, or a pattern of those, such as `"transformer.h.0*"`; default: everything.

    >>> import torch
    >>> net, batch, loss_fn = torch.nn.Linear(4, 1), (torch.ones(8, 4),), lambda output: output.mean()
    >>> made = globals()["plan"](net, batch, loss_fn=loss_fn, hardware="cpu:2")
    >>> len(explain(made, net, batch, ":linear", loss_fn=loss_fn).rows)
    1
    """
    from . import optim
    from .planner import explain as run

    plan = as_plan(plan)
    chosen = optim.of_plan(plan)
    return run(plan, program_of(plan, model, batch, loss_fn), key, chosen, chosen.on_fakes)


def simulate_plan(plan: PlanLike, model: nn.Module, batch: Any, *, loss_fn: LossFn | None = None) -> Simulation:
    """Return one rank's memory over a step of `plan`, of the fullest stage, moment by moment; the arguments are `check`'s."""
    from . import optim
    from .planner import simulate_plan as run

    plan = as_plan(plan)
    chosen = optim.of_plan(plan)
    return run(plan, program_of(plan, model, batch, loss_fn), chosen, chosen.on_fakes)


def init(device: str | None = None) -> None:
    """Join torchrun's process group, or one of this process alone, until the process ends; see `trainwright.launch.init`.

    `parallelize` and `verify` do so by themselves: call it where a script asks for `torch.distributed.get_rank()` before.
    device: `"cuda"` or `"cpu"`; default: `cuda` where there is a GPU. The second call does nothing.

    >>> init("cpu")
    """
    from .launch import init as run

    run(device)  # type: ignore[arg-type]


def parallelize(
    model: nn.Module, plan: PlanLike, weights: str | os.PathLike[str] | None = None, *, loss_fn: LossFn | None = None,
    seed: int | None = None, replicas: int = 1, tier: TierOptions | None = None,
) -> ParallelModule:  # fmt: skip
    """Return `model` as `plan` lays it out on this rank; see `trainwright.runtime.parallelize`.

    model: the one planned for, with its values, or on the meta device. plan: a `Plan`, or the path of its file.
    weights: files to read the values from. loss_fn: the one the plan was made with; the module then takes the whole
    batch and returns `LossOutput(loss, output)`. seed: of dropout, and of what is initialised. replicas: how many times
    the plan runs side by side, without sums of gradients between them: for a method of `tw.sync`. tier: the disks on which
    parameters, gradients and optimizer states rest (docs/tiers.md).

    >>> import torch
    >>> net, batch, loss_fn = torch.nn.Linear(4, 2), (torch.ones(8, 4), torch.arange(8) % 2), torch.nn.CrossEntropyLoss()
    >>> made = globals()["plan"](net, batch, loss_fn=loss_fn, hardware="cpu:1")
    >>> module = parallelize(net, made, loss_fn=loss_fn)
    >>> loss = module(*made.shard_batch(batch)).loss
    >>> loss.backward()
    """
    from .runtime import parallelize as run

    check_model(model)
    return run(model, as_plan(plan), weights, loss_fn=loss_fn, seed=seed, replicas=replicas, tier=tier)


def verify(model_fn: Callable[[], Any], plan: PlanLike, *, dtype: str = "float64", seed: int = 0) -> Report:
    """Compare a plan's loss, gradients and peak with one process's; see `trainwright.runtime.verification.verify`.

    model_fn: a function that builds and returns `(model, batch)` or `(model, batch, loss_fn)`, the same on every rank.
    plan: a `Plan`, or the path of its file. dtype: `"float64"`, or `"fp32"`, the model as it is. Every rank calls this.

    Of an optimizer that takes the loss itself, update and peak are not compared: both need its own closure.

    >>> import torch
    >>> def build():
    ...     torch.manual_seed(0)
    ...     return torch.nn.Linear(4, 2), (torch.ones(8, 4), torch.arange(8) % 2), torch.nn.CrossEntropyLoss()
    >>> net, batch, loss_fn = build()
    >>> verify(build, globals()["plan"](net, batch, loss_fn=loss_fn, hardware="cpu:1")).passed
    True
    """
    from .verifying import verified

    plan = as_plan(plan)
    if not callable(model_fn) or hasattr(model_fn, "forward"):
        raise UserError(
            f"a function that builds (model, batch, loss_fn) is needed to verify; got a {type(model_fn).__name__}; each run "
            "starts from the same values: try lambda: (Model(), batch, loss_fn)"
        )
    return verified(model_fn, plan, dtype, seed)


def calibrate(
    num_processes: int | None = None, quick: bool = False, progress: Callable[[str], None] | None = None
) -> Cluster:
    """Measure this machine; the result is a cluster to plan for, `to_json(path)` keeps it.

    num_processes: how many ranks; default: the machine's cores decide. quick: fewer repetitions. progress: told, in words,
    what is measured. It takes a minute or two, in which nothing else should run.
    """
    return _hardware.calibrate(num_processes, quick=quick, progress=progress)


def full_state_dict(model: ParallelModule, *, trainable: bool = False) -> dict[str, Tensor]:
    """Return a parallel module's whole weights in the user's names and shapes; a collective call.

    trainable: those alone that are trained (an adapter's), so that a frozen base is not gathered.
    """
    from .runtime import full_state_dict as run

    return run(model, trainable=trainable)


def clip_grad_norm_(module: ParallelModule, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm, over all ranks and stages, is at most `max_norm`; return the norm before.

    See `trainwright.runtime.clip_grad_norm_`; a collective call. torch's own sees one stage's gradients alone.
    """
    from .runtime import clip_grad_norm_ as run

    return run(module, max_norm)


def sample_activations(model: nn.Module, budget: float = 0.3, **options: Any) -> list[str]:
    """Let linear layers of a model keep a share of their input's rows for the backward, in place; returns their names.

    The weight's gradient is then estimated, without bias; see `trainwright.nn.SampledLinear`, and
    `trainwright.nn.sample_activations` for the options.

    >>> import torch
    >>> sample_activations(torch.nn.Sequential(torch.nn.Linear(4, 2)), budget=0.5)
    ['0']
    """
    from .nn import sample_activations as run

    return run(model, budget, **options)


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
    """Say which loops an op of your own runs over, so that plans may split it; see `trainwright.program.user_ops.register_op`."""
    from .program.user_ops import register_op as run

    run(op, loops, reduced=reduced, whole=whole, once=once, kind=kind, localize=localize)


def reference_step(model: nn.Module, optimizer: Any, batch: Any, loss_fn: LossFn | None = None) -> Tensor:
    """Run one ordinary training step and return its loss: the loop of every measurement.

    batch, loss_fn: as for `profile`.

    >>> import torch
    >>> net = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> reference_step(net, optimizer, (torch.ones(3, 4), torch.tensor([0, 1, 1])), torch.nn.CrossEntropyLoss()).shape
    torch.Size([])
    """
    from .profiler import reference_step as run

    return run(model, optimizer, batch, loss_fn)


def __getattr__(name: str) -> Any:
    """Import a folder, the zoo, or what stands for a part of a model when it is first asked for."""
    if name in EXPERTS:
        return getattr(importlib.import_module(".capture.experts", __name__), name)
    if name == "zoo":
        return importlib.import_module(".models.zoo", __name__)
    if name in FOLDERS:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'trainwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *FOLDERS, "zoo", *(name for name in globals() if name.startswith("__"))})


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


__all__ = [
    "SOLVERS",
    "Cluster",
    "Difference",
    "ModelRef",
    "Offers",
    "Plan",
    "Profile",
    "Refusal",
    "Report",
    "Trained",
    "UserError",
    "calibrate",
    "check",
    "clip_grad_norm_",
    "compare",
    "diff",
    "experts",
    "explain",
    "frontier",
    "full_state_dict",
    "hardware",
    "init",
    "load_model",
    "offers",
    "parallelize",
    "parse_bytes",
    "plan",
    "profile",
    "reference_step",
    "register_experts",
    "register_gate",
    "register_op",
    "sample_activations",
    "simulate_plan",
    "train",
    "verify",
]
