"""Which `TrainingArguments` hold for a planned model, and which do not: a line each, with what to do."""

from __future__ import annotations

from typing import Any

from ..artifacts import Plan, UserError
from ..runtime.batch import global_batch_size
from .planned import check_precision
from .replicated import Replication

LAID_OUT = "the plan lays the model out; leave it out"
REFUSED: dict[str, str] = {
    "gradient_checkpointing": "the plan recomputes; leave it out, and plan with --memory for less",
    "activation_checkpointing": "the plan recomputes; leave it out, and plan with --memory for less",
    "fp16": "a plan computes in its own precision; plan with --autocast bf16",
    "tf32": "a plan computes in its own precision; leave it out, or plan with --autocast bf16",
    "fp16_full_eval": "evaluation computes in the plan's precision; leave it out",
    "bf16_full_eval": "evaluation computes in the plan's precision; leave it out",
    "torch_compile": "the plan's own graph runs; leave it out",
    "fsdp": LAID_OUT,
    "deepspeed": LAID_OUT,
    "parallelism_config": LAID_OUT,
    "auto_find_batch_size": "the plan says which batch fits; leave it out, and plan for another --batch-size",
    "neftune_noise_alpha": "the planned step has no place for the noise; add it in the model's forward, and plan that",
    "use_liger_kernel": "it would replace parts of a model that is planned already; apply it to the model, and plan that",
    "label_smoothing_factor": "the planned step has the model's own loss; plan with a loss_fn that smooths, and pass loss_fn=",
    "save_on_each_node": "a checkpoint is one folder that all nodes see; leave it out",
    "push_to_hub": "each rank would push; call save_model, and push the folder",
    "hub_always_push": "each rank would push; call save_model, and push the folder",
    "enable_jit_checkpoint": "it saves from a signal on each rank by itself; save by save_steps",
    "debug": "the planned module has no submodules that run; leave it out",
}
"""By argument: why it does not go with a plan; what to do."""
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Values of `optim` that update each weight by itself, wherever it is cut."""
SAMPLING = ("random", "sequential")


def check_arguments(args: Any, plan: Plan, evaluates: bool, replication: Replication | None = None) -> None:
    """Raise `UserError` for the first of the `TrainingArguments` that a planned model cannot follow."""
    for name, why in REFUSED.items():
        value = getattr(args, name, None)
        if value:
            raise UserError(f"{name} is not for planned models: {why} (got {name}={_shown(value)})")
    replicas = (replication or Replication(plan)).check(args.world_size, "TrainingArguments")
    if replicas > 1 and args.load_best_model_at_end:
        raise UserError(
            "one model is needed to choose the best of; replicas differ between rounds (got load_best_model_at_end=True); leave it "
            "out, and evaluate what the run ends with"
        )
    check_precision(plan, "bf16" if args.bf16 else "no", f"bf16={args.bf16}")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer not in OPTIMIZERS:
        raise UserError(
            f"an optimizer that updates sharded weights is needed, optim= one of {', '.join(OPTIMIZERS)}; got {optimizer}; for one "
            "of trainwright.optim or your own pass optimizer_cls_and_kwargs=(class, settings)"
        )
    sampling = str(getattr(args.train_sampling_strategy, "value", args.train_sampling_strategy))
    if sampling not in SAMPLING:
        raise UserError(
            f"batches of one shape, drawn alike on all ranks, are needed: train_sampling_strategy {' or '.join(SAMPLING)}; got "
            f"{sampling}; pad the examples to the planned length"
        )
    _check_batch_sizes(args, plan, evaluates, replicas)


def _check_batch_sizes(args: Any, plan: Plan, evaluates: bool, replicas: int) -> None:
    wanted, found = global_batch_size(plan) * replicas, args.per_device_train_batch_size
    the_plans = "the plan's batch" if replicas == 1 else f"the plan's batch for {replicas} replicas, together"
    if found * args.world_size != wanted:
        each = (
            f"per_device_train_batch_size={wanted // args.world_size}" if wanted % args.world_size == 0 else "another"
        )
        raise UserError(
            f"{the_plans} of {wanted} is needed, {wanted / args.world_size:g} for each of {args.world_size} processes; got "
            f"per_device_train_batch_size={found}; set {each}, or plan with --batch-size {found * args.world_size // replicas}"
        )
    evaluated = args.per_device_eval_batch_size
    if evaluates and evaluated * args.world_size > wanted:
        raise UserError(
            f"an evaluation batch of at most {the_plans} of {wanted} is needed; got per_device_eval_batch_size={evaluated} on "
            f"{args.world_size} processes; set per_device_eval_batch_size={max(wanted // args.world_size, 1)}"
        )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "…"
