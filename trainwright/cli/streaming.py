"""The options of `train` that stream a model's blocks, and the run that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..artifacts import StreamPlan, UserError
from ..reports.units import format_bytes, format_s
from .interruption import told_when_interrupted
from .model import ModelOptions
from .output import STDOUT, answer, quiet_stdout, remark, status, write_json
from .places import check_file, check_folder, check_readable, check_tensorboard
from .progress import StepProgress
from .ranks import is_first_rank, num_ranks_given, run_alone

PANEL = "Streaming (MeZO)"
WORKER = "trainwright.streamed_run:work"

StreamOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stream", metavar="host|DIR", rich_help_panel=PANEL,
        help="Where blocks rest: host, or empty directories (repeatable, striped). For --optimizer mezo; all, or a --plan's.",
    ),
]  # fmt: skip
PlannedStreamOption = Annotated[
    str | None,
    typer.Option(
        "--stream", metavar="host|disk", rich_help_panel=PANEL,
        help="With --optimizer mezo: which blocks rest there, the fewest for which a step fits --memory, and what it takes.",
    ),
]  # fmt: skip
StorageOption = Annotated[
    str | None,
    typer.Option(
        "--stream-storage", metavar="DTYPE", rich_help_panel=PANEL,
        help="At rest: bf16 or fp16, rounded stochastically, or fp32. Default: the model's.",
    ),
]  # fmt: skip
BlocksOption = Annotated[
    list[str] | None,
    typer.Option(
        "--stream-blocks", metavar="PATTERN", rich_help_panel=PANEL,
        help="The blocks' paths, such as encoder.*; repeatable. Default: the elements of lists of modules.",
    ),
]  # fmt: skip
MemoryOption = Annotated[
    str | None,
    typer.Option("--stream-memory", metavar="M", rich_help_panel=PANEL, help="Refuse what needs more of the device."),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        "--stream-weights", metavar="PATH", rich_help_panel=PANEL,
        help="A safetensors file or folder; the model is never in memory as a whole.",
    ),
]  # fmt: skip
_STORAGES = ("bf16", "fp16", "fp32", "fp64")
_POLICIES = ("stop", "skip")
_MEDIANS = ("step_s", "read_bytes", "written_bytes")


def check_alone(given: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise `UserError` for options that have no meaning beside `--stream`: by name, their values and defaults."""
    for option, (value, default) in given.items():
        if value != default:
            raise UserError(
                f"{option} is of planned training; --stream trains without a plan and without gradients; leave one of them out"
            )


def plan_streamed(
    model: ModelOptions, *, stream: str, hardware: str, memory: str | None, optimizer: str, storage: str | None,
    blocks: Sequence[str] | None, output: str | None, json_path: str | None, options: Mapping[str, Any],
) -> int:  # fmt: skip
    """Plan which blocks stream, and answer with what a step takes; exit status 1 where not even all of them streamed fit."""
    from ..artifacts.sizes import parse_bytes
    from ..hardware import resolve
    from ..optim.mezo import RECORD
    from ..optim.options import checked_options
    from ..optim.record import as_dtype
    from ..streamed_run import loss_for
    from ..streaming import plan_stream

    if stream not in ("host", "disk"):
        raise UserError(f"--stream of a plan is host or disk; got {stream!r}; train names the directories")
    if optimizer.lower() != "mezo":
        raise UserError(
            f"MeZO is needed for --stream, whose blocks have no gradients; got {optimizer}; add --optimizer mezo"
        )
    _check_storage(storage)
    check_file("--output", output)
    exact = bool(checked_options(RECORD, options).get("exact", False))
    with quiet_stdout(), status(f"planning {model.spec}"):
        loaded = model.load()
        plan = plan_stream(
            loaded.model.train(), loaded.batch, loss_for(loaded), resolve(hardware), place="host" if stream == "host" else "disk",
            memory_bytes=None if memory is None else parse_bytes(memory), storage=None if storage is None else as_dtype(storage),
            blocks=blocks, exact=exact, ref=loaded.ref,
        )  # fmt: skip
    answer(plan.table(), lambda: plan.model_dump(mode="json"), json_path)
    if output is not None:
        plan.to_json(output)
        place = "host" if stream == "host" else "DIR"
        remark(
            f"wrote {output}; next: trainwright train {model.spec} --optimizer mezo --plan {output} --stream {place}"
        )
    return 0


def _followed(
    path: str, stream: Sequence[str], options: dict[str, Any], memory: str | None
) -> tuple[StreamPlan, str | None]:
    """Put what a plan says in place of the options of a run; `UserError` where the two disagree."""
    from ..optim.record import as_dtype

    plan = StreamPlan.from_json(path)
    place = "host" if tuple(stream) == ("host",) else "disk"
    if place != plan.place:
        raise UserError(
            f"--stream as planned is needed, to {plan.place}; got {', '.join(stream)}; change it, or plan anew"
        )
    for option, value in (("--stream-storage", options["storage"]), ("--stream-blocks", options["blocks"])):
        if value is not None:
            raise UserError(f"{option} is the plan's to say; got {option} beside --plan; leave it out, or plan anew")
    options["blocks"] = list(plan.blocks)
    options["storage"] = None if plan.storage is None else plan.storage
    if options["storage"] is not None:
        as_dtype(options["storage"])
    return plan, memory if memory is not None or plan.budget_bytes is None else f"{plan.budget_bytes}B"


def check_unstreamed(storage: str | None, blocks: Any, memory: str | None, weights: str | None) -> None:
    """Raise `UserError` for options of streaming where nothing is streamed."""
    given = {"storage": storage, "blocks": blocks, "memory": memory, "weights": weights}
    for name, value in given.items():
        if value:
            raise UserError(
                f"--stream-{name} needs --stream; got none; add --stream host, or leave --stream-{name} out"
            )


def train_streamed(
    model: ModelOptions, *, stream: Sequence[str], optimizer: str | None, memory: str | None, nproc: int | None,
    steps: int, schedule: Mapping[str, Any], json_path: str | None, plan_path: str | None = None, **options: Any,
) -> None:  # fmt: skip
    """Train with MeZO and streamed blocks, on one rank or, each on batches of its own, on several."""
    from ..artifacts.sizes import parse_bytes
    from ..optim import record
    from ..scheduling import ScheduleOptions
    from ..streamed_run import StreamedRun

    if optimizer is None or optimizer.lower() != "mezo":
        if optimizer is not None:
            record(optimizer)  # a name that there is not is said to be none
        raise UserError(
            f"MeZO is needed for --stream, whose blocks have no gradients; got {optimizer or 'no --optimizer'}; add --optimizer "
            "mezo, or plan with --offload"
        )
    plan = None
    if plan_path is not None:
        plan, memory = _followed(plan_path, stream, options, memory)
    _check(stream, options, plan)
    ScheduleOptions(**schedule).check(steps, "mezo")
    run = StreamedRun(
        model.payload(), tuple(stream), steps, schedule=dict(schedule), seed=model.seed or 0,
        memory_bytes=None if memory is None else parse_bytes(memory), plan=None if plan is None else plan.to_json(), **options,
    )  # fmt: skip
    progress = StepProgress(steps, None)
    found: dict[str, Any] = {}
    with quiet_stdout(), told_when_interrupted(lambda: progress.steps, steps, run.checkpoint, _newest), progress:

        def on_event(event: dict[str, Any]) -> None:
            if event.get("kind") == "predicted":
                peak = event["peak_bytes"]
                if peak:
                    progress.say(f"predicted: {format_bytes(peak)} of the device at the peak of a step")
            else:
                progress.on_event(event)

        found = run_alone(WORKER, {"asked": asdict(run)}, num_ranks_given(nproc) or 1, on_event)
    if is_first_rank():
        if json_path != STDOUT:
            print(_summary(progress.steps, found))
        write_json(lambda: {"steps": progress.steps, **found}, json_path)


def _check_storage(storage: str | None) -> None:
    if storage is not None and storage not in _STORAGES:
        raise UserError(f"--stream-storage is one of {', '.join(_STORAGES)}; got {storage!r}; choose one")


def _check(stream: Sequence[str], options: Mapping[str, Any], plan: StreamPlan | None = None) -> None:
    if "host" in stream and len(stream) > 1:
        raise UserError(
            f"--stream host or directories are needed; got {', '.join(stream)}; leave host out, or them (./host is a directory)"
        )
    if "host" not in stream:
        from ..tiers.places import check_empty, check_folders

        check_empty(check_folders(list(stream)))
    if options["storage"] is not None and plan is None:
        _check_storage(options["storage"])
    if options["on_nan"] not in _POLICIES:
        raise UserError(
            f"--on-nan beside --stream is one of {', '.join(_POLICIES)}; got {options['on_nan']!r}; choose one"
        )
    check_readable("--data", options["data"])
    if is_first_rank():
        check_tensorboard(options["tensorboard"])
        check_file("--metrics", options["metrics"])
        check_folder("--checkpoint", options["checkpoint"])
    _check_saving(options["checkpoint"], options["checkpoint_every"], options["resume"])


def _check_saving(folder: str | None, every: int | None, resume: bool) -> None:
    from ..streaming.saving import saved_steps

    for option, given in (("--checkpoint-every", every is not None), ("--resume", resume)):
        if given and folder is None:
            raise UserError(f"{option} needs the directory of the checkpoints; got none; add --checkpoint DIR")
    if folder is None:
        return
    place = Path(folder)
    if resume and not saved_steps(folder):
        raise UserError(
            f"--resume needs a streamed run's steps; there are none in {folder}; check the path, or leave it out"
        )
    if not resume and place.is_dir() and any(place.iterdir()):
        raise UserError(
            f"an empty or a new directory is needed for --checkpoint; {folder} is in use; add --resume, or choose another"
        )


def _newest(folder: Path) -> tuple[Path, int] | None:
    from ..streaming.saving import saved_steps

    found = saved_steps(folder)
    return (found[-1][1], found[-1][0]) if found else None


def _summary(steps: Sequence[Mapping[str, Any]], found: Mapping[str, Any]) -> str:
    import statistics

    if not steps:
        return "nothing was left to do"
    lines = [f"{len(steps)} steps: loss {steps[0]['loss']:.4f} → {steps[-1]['loss']:.4f}"]
    held_out = [step["eval_loss"] for step in steps if step.get("eval_loss") is not None]
    if held_out:
        lines.append(f"held-out loss {held_out[0]:.4f} → {held_out[-1]:.4f}")
    later = steps[1:] or steps
    step_s, read, written = (statistics.median(step[name] for step in later) for name in _MEDIANS)
    lines.append(f"step   {format_s(step_s)} (median)")
    lines.append(
        f"blocks {found['num_blocks']}; a step brings in {format_bytes(read)} ({format_bytes(read / step_s)}/s) and takes out "
        f"{format_bytes(written)} ({format_bytes(written / step_s)}/s)"
    )
    if found["predicted_peak_bytes"]:
        lines.append(f"peak   {format_bytes(found['predicted_peak_bytes'])}, predicted")
    return "\n".join(lines)
