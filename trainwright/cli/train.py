"""`trainwright train`: run a plan."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from ..artifacts import Plan, UserError
from ..reports.units import format_bytes, format_s
from .interruption import told_when_interrupted
from .learning import (
    DecayOption,
    EvalDataOption,
    EvalEveryOption,
    GrowEtaOption,
    GrowEveryOption,
    GrowOption,
    NormsOption,
    ScheduleOption,
    WarmupOption,
    check_learning,
)
from .model import ModelOptions, as_planned, takes_model
from .optimizing import FormOption, OptionOption
from .output import STDOUT, JsonOption, quiet_stdout, remarks, write_json
from .places import check_file, check_readable, check_tensorboard
from .progress import StepProgress, held_against, of_planned_shape
from .ranks import NprocOption, is_first_rank, run_worker
from .recovery import OnImbalanceOption, OnNanOption, RestartsOption, TimeoutOption, with_restarts
from .saving import (
    KEEP,
    CheckpointEveryOption,
    CheckpointOption,
    KeepOption,
    ResumeOption,
    SavePolicy,
    SyncOption,
    check_saving,
)
from .selecting import EveryOption, FractionOption, SelectOption, check_select, selection_line
from .streaming import (
    BlocksOption,
    MemoryOption,
    StorageOption,
    StreamOption,
    WeightsOption,
    check_alone,
    check_unstreamed,
    train_streamed,
)
from .syncing import ReplicasOption, SyncMethodOption, SyncOptionOption, check_sync, sync_line
from .tiers import (
    TierClipOption,
    TierCommitOption,
    TierKeepOption,
    TierOption,
    TierRateOption,
    TierUpdateOption,
    TierWindowOption,
    check_tier,
    commits_every,
    rests_in_host,
    tier_lines,
    updates_during,
)

PlanOption = Annotated[str, typer.Option("--plan", metavar="FILE", help="From `trainwright plan -o`.")]
UnlessStreamedOption = Annotated[
    str | None, typer.Option("--plan", metavar="FILE", help="From `trainwright plan -o`; needed, but for --stream.")
]
WORKER = "trainwright.cli.workers:train"
NUM_UNTRACED = 2
"""Steps before the ones that are recorded: their allocations are followed, and they make what later ones find made."""


@takes_model
def train(
    model: ModelOptions,
    plan_path: UnlessStreamedOption = None,
    nproc: NprocOption = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Bytes to learn, for causal language models; repeatable. None: the batch."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="In total, also with --resume. Default: 100.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(metavar="NAME", help="Default: the plan's.")] = None,
    optimizer_option: OptionOption = None,
    optimizer_form: FormOption = None,
    lr: Annotated[float | None, typer.Option(metavar="X", help="Default: the optimizer's own.")] = None,
    schedule: ScheduleOption = "constant",
    warmup_steps: WarmupOption = 0,
    decay_steps: DecayOption = None,
    norms: NormsOption = None,
    eval_every: EvalEveryOption = None,
    eval_data: EvalDataOption = None,
    grow_batch: GrowOption = None,
    grow_every: GrowEveryOption = 10,
    grow_eta: GrowEtaOption = 0.5,
    sync: SyncMethodOption = None,
    sync_option: SyncOptionOption = None,
    replicas: ReplicasOption = None,
    checkpoint: CheckpointOption = None,
    checkpoint_every: CheckpointEveryOption = None,
    keep: KeepOption = KEEP,
    sync_checkpoints: SyncOption = False,
    resume: ResumeOption = False,
    restarts: RestartsOption = 0,
    on_nan: OnNanOption = "stop",
    on_imbalance: OnImbalanceOption = "warn",
    timeout_s: TimeoutOption = 600.0,
    metrics: Annotated[str | None, typer.Option(metavar="F.jsonl", help="Write a line of JSON per step.")] = None,
    tensorboard: Annotated[str | None, typer.Option(metavar="DIR", help="Write TensorBoard's files there.")] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Record the third to the fifth step of this run, every rank's, for Perfetto."
        ),
    ] = None,
    select: SelectOption = None,
    select_fraction: FractionOption = None,
    select_every: EveryOption = None,
    stream: StreamOption = None,
    stream_storage: StorageOption = None,
    stream_blocks: BlocksOption = None,
    stream_memory: MemoryOption = None,
    stream_weights: WeightsOption = None,
    tier: TierOption = None,
    tier_window: TierWindowOption = None,
    tier_keep: TierKeepOption = None,
    tier_update: TierUpdateOption = None,
    tier_commit_every: TierCommitOption = None,
    tier_rate: TierRateOption = None,
    tier_clip_previous_norm: TierClipOption = None,
    json_path: JsonOption = None,
) -> None:
    """Train the model as planned, on processes started here or on the ranks that torchrun started.

    --optimizer mezo --stream host (or a directory) trains by forwards alone a model of which three blocks at a time are on the
    device, by a plan of which blocks stream, or with every one.
    """
    from ..optim.options import parse_options
    from ..runtime.training.imbalance import check_policy as check_imbalance
    from ..runtime.training.nonfinite import check_policy
    from ..training import optimizer_of

    if stream:
        check_alone({
            "--optimizer-form": (optimizer_form, None), "--norms": (norms, None),
            "--eval-data": (eval_data, None), "--grow-batch": (grow_batch, None), "--sync": (sync, None),
            "--sync-option": (sync_option, None), "--replicas": (replicas, None), "--sync-checkpoints": (sync_checkpoints, False),
            "--restarts": (restarts, 0), "--on-imbalance": (on_imbalance, "warn"), "--trace": (trace, None),
            "--select": (select, None), "--autocast": (model.autocast, None), "--tier": (tier, None),
            "--timeout": (timeout_s, 600.0),
        })  # fmt: skip
        train_streamed(
            model, stream=stream, optimizer=optimizer, memory=stream_memory, nproc=nproc, steps=100 if steps is None else steps,
            schedule={"name": schedule, "warmup_steps": warmup_steps, "decay_steps": decay_steps}, json_path=json_path,
            plan_path=plan_path,
            storage=stream_storage, blocks=stream_blocks, weights=stream_weights, options=parse_options(optimizer_option), lr=lr,
            data=data or [], eval_every=eval_every, checkpoint=checkpoint, checkpoint_every=checkpoint_every, keep=keep,
            resume=resume, on_nan=on_nan, metrics=metrics, tensorboard=tensorboard,
        )  # fmt: skip
        return
    check_unstreamed(stream_storage, stream_blocks, stream_memory, stream_weights)
    if plan_path is None:
        raise UserError("a plan is needed to train by; got none; give --plan FILE, from trainwright plan -o FILE")
    check_policy(on_nan)
    check_imbalance(on_imbalance)
    given_steps, steps = steps, 100 if steps is None else steps
    if trace is not None and steps < NUM_UNTRACED + 1:
        raise UserError(f"at least {NUM_UNTRACED + 1} steps are needed for --trace; there are {steps}; take more")
    selecting = check_select(select, select_fraction, select_every, data)
    plan = Plan.from_json(plan_path)
    is_host = rests_in_host(tier, plan)
    has_checkpoints = tier is None or is_host
    check_saving(checkpoint, checkpoint_every, resume and has_checkpoints, restarts if has_checkpoints else 0)
    check_readable("--data", data or [])
    check_readable("--eval-data", eval_data or [])
    if is_first_rank():
        check_tensorboard(tensorboard)
        for option, path in (("--metrics", metrics), ("--trace", trace), ("--json", json_path)):
            check_file(option, path)
    stepping: dict[str, Any] = {"name": optimizer, "options": parse_options(optimizer_option), "form": optimizer_form}
    chosen, contradictions = optimizer_of(plan, **stepping)
    learning = {
        "schedule": schedule, "warmup_steps": warmup_steps, "decay_steps": decay_steps, "norms": norms,
        "eval_every": eval_every, "eval_data": eval_data, "grow_batch": grow_batch, "grow_every": grow_every,
        "grow_eta": grow_eta,
    }  # fmt: skip
    check_learning(learning, plan, given_steps, chosen.name, chosen.needs_loss)
    if selecting is not None and grow_batch is not None:
        raise UserError("--select and --grow-batch both choose the examples of a step; got both; leave one of them out")
    beside = [option for option, value in (("--grow-batch", grow_batch), ("--select", select)) if value is not None]
    exchange, replicas = check_sync(sync, sync_option, replicas, plan, nproc, chosen, beside)
    resting = check_tier(
        tier, tier_window, tier_keep, tier_update, tier_commit_every, tier_rate, tier_clip_previous_norm, resume, plan,
        {
            "--checkpoint": checkpoint is not None and not is_host,
            "--grow-batch": grow_batch is not None, "--sync": sync is not None,
            "--norms": norms is not None, "--schedule lanczos": schedule == "lanczos", "--select": select is not None,
            f"--optimizer {chosen.name}, which takes the loss": chosen.needs_loss,
            "--restarts: start it again with --resume": restarts > 0 and not is_host,
            "--on-nan skip (or with plan --tier-update after)": on_nan == "skip" and is_host and updates_during(tier_update, plan),
            "--on-nan skip beside --tier-commit-every": on_nan == "skip" and commits_every(tier_commit_every, plan) > 1,
        },
    )  # fmt: skip
    if is_first_rank():
        remarks(contradictions)
    model = as_planned(plan, model)
    payload = {
        "model": model.payload(),
        "plan": plan.to_json(),
        "steps": steps,
        "optimizer": stepping,
        "lr": lr,
        "seed": model.seed or 0,
        "data": data or [],
        "metrics": metrics,
        "tensorboard": tensorboard,
        "on_nan": on_nan,
        "on_imbalance": on_imbalance,
        "timeout_s": timeout_s,
        "select": selecting,
        "learning": learning,
        "trace": trace,
        "sync": exchange,
        "replicas": replicas,
        "tier": resting,
    }
    saving = SavePolicy(checkpoint, checkpoint_every, keep, not sync_checkpoints, resume)
    progress = StepProgress(steps, plan)
    with quiet_stdout(), told_when_interrupted(lambda: progress.steps, steps, checkpoint), progress:

        def run(restarted: bool) -> Any:
            policy = asdict(replace(saving, restarted=restarted))
            return run_worker(WORKER, {**payload, "saving": policy}, plan, nproc, progress.on_event, replicas)

        found = with_restarts(run, restarts)
    if not is_first_rank():
        return
    if json_path != STDOUT:
        print(summary(progress.steps, plan, replicas))
        if progress.steps and resting is not None:
            print(tier_lines(progress.steps, statistics.median(step["step_s"] for step in progress.steps), is_host))
        if progress.steps and exchange is not None:
            print(sync_line(progress.steps, found["sync"], replicas))
        if progress.steps and selecting is not None:
            print(selection_line(found["selection"], progress.steps))
    if json_path is not None and not progress.steps:
        raise UserError("--json needs steps to report; nothing was left to do; give more --steps")
    write_json(lambda: held_against(progress.steps, plan, _machine(plan)).to_json(), json_path)


def _machine(plan: Plan) -> str | None:
    """The fingerprint of this machine, where it is the one that has trained."""
    from ..hardware.machine import fingerprint

    return fingerprint() if plan.cluster.device.kind == "cpu" else None


def summary(steps: list[dict[str, Any]], plan: Plan, replicas: int = 1) -> str:
    """Return the end of a run in a few lines; `steps` are the events of its steps."""
    if not steps:
        return "nothing was left to do"
    losses = [step["loss"] for step in steps if math.isfinite(step["loss"])] or [math.nan]
    alike = of_planned_shape(steps) or steps
    step_s = statistics.median(step["step_s"] for step in alike[1:] or alike)
    peak_bytes = max(step["peak_bytes"] or 0 for step in steps)
    lines = [
        f"{len(steps)} steps on {plan.num_ranks * replicas} ranks: loss {losses[0]:.4f} → {losses[-1]:.4f}",
        f"step   {format_s(step_s)} (median), predicted {format_s(plan.predicted.step_s)}",
    ]
    held_out = [step["eval_loss"] for step in steps if step.get("eval_loss") is not None]
    if held_out:
        lines.insert(1, f"held-out loss {held_out[0]:.4f} → {held_out[-1]:.4f}")
    if peak_bytes:
        lines.append(f"peak   {format_bytes(peak_bytes)}, predicted {format_bytes(plan.predicted.peak_bytes)}")
    return "\n".join(lines)
