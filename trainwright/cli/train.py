"""`trainwright train`: run a plan."""

from __future__ import annotations

import statistics
from typing import Annotated, Any

import typer

from ..artifacts import Plan, UserError
from ..reports.units import format_bytes, format_s
from .model import ModelOptions, as_planned, takes_model
from .output import quiet_stdout
from .progress import StepProgress
from .ranks import NprocOption, is_first_rank, run_worker

PlanOption = Annotated[str, typer.Option("--plan", metavar="FILE", help="From `trainwright plan -o`.")]
WORKER = "trainwright.cli.workers:train"


@takes_model
def train(
    model: ModelOptions,
    plan_path: PlanOption,
    nproc: NprocOption = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Bytes to learn, for causal language models; repeatable. None: the batch."),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="In total, also with --resume.")] = 100,
    optimizer: Annotated[str | None, typer.Option(metavar="NAME", help="Default: the plan's.")] = None,
    lr: Annotated[float | None, typer.Option(metavar="X", help="Default: the optimizer's own.")] = None,
    checkpoint: Annotated[str | None, typer.Option(metavar="DIR", help="Write checkpoints there.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Steps between checkpoints; the last step has one too.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest in --checkpoint.")] = False,
    metrics: Annotated[str | None, typer.Option(metavar="F.jsonl", help="Write a line of JSON per step.")] = None,
) -> None:
    """Train the model as planned, on processes started here or on the ranks that torchrun started."""
    from ..optim import check_plannable

    _check_checkpoint(checkpoint, checkpoint_every, resume)
    plan = Plan.from_json(plan_path)
    check_plannable(optimizer or plan.optimizer)
    model = as_planned(plan, model)
    payload = {
        "model": model.payload(),
        "plan": plan.to_json(),
        "steps": steps,
        "optimizer": optimizer or plan.optimizer,
        "lr": lr,
        "seed": model.seed or 0,
        "data": data or [],
        "checkpoint": checkpoint,
        "checkpoint_every": checkpoint_every,
        "resume": resume,
        "metrics": metrics,
    }
    with quiet_stdout(), StepProgress(steps) as progress:
        run_worker(WORKER, payload, plan, nproc, progress.on_event)
    if is_first_rank():
        print(summary(progress.steps, plan))


def summary(steps: list[dict[str, Any]], plan: Plan) -> str:
    """Return the end of a run in a few lines; `steps` are the events of its steps."""
    if not steps:
        return "nothing was left to do"
    losses = [step["loss"] for step in steps]
    step_s = statistics.median(step["step_s"] for step in steps[1:] or steps)
    peak_bytes = max(step["peak_bytes"] or 0 for step in steps)
    lines = [
        f"{len(steps)} steps on {plan.num_ranks} ranks: loss {losses[0]:.4f} → {losses[-1]:.4f}",
        f"step   {format_s(step_s)} (median), predicted {format_s(plan.predicted.step_s)}",
    ]
    if peak_bytes:
        lines.append(f"peak   {format_bytes(peak_bytes)}, predicted {format_bytes(plan.predicted.peak_bytes)}")
    return "\n".join(lines)


def _check_checkpoint(checkpoint: str | None, checkpoint_every: int | None, resume: bool) -> None:
    for option, given in (("--checkpoint-every", checkpoint_every is not None), ("--resume", resume)):
        if given and checkpoint is None:
            raise UserError(f"{option} needs the directory of the checkpoints; got none; add --checkpoint DIR")
