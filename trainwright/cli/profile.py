"""`trainwright profile`: what one training step of a model costs, without running it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ..artifacts import Cluster, Profile, UserError
from ..collecting import rarely_collecting
from ..reports.measures import SORTABLE
from ..reports.units import format_bytes
from .errors import FAILED, OK
from .fits import answer_fits
from .fitting import asked_devices, budget_of, fitting
from .model import ModelOptions, takes_model
from .output import HtmlOption, JsonOption, answer, quiet_stdout, remark, remarks, status
from .size_sweep import Sweep, SweepRun, parse_sweep
from .variants import Variants

_TRACE_HARDWARE = "cpu:1"


@takes_model
@rarely_collecting()
def profile(
    model: ModelOptions,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="See `trainwright optimizers`.")] = "adamw",
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="H[,H]",
            help="One device of it is modelled and the step's time predicted; of several: which can train it, whole, "
            "with LoRA, with QLoRA?",
        ),
    ] = None,
    accumulate: Annotated[int, typer.Option(metavar="N", min=1, help="Micro-batches to a step, each the batch.")] = 1,
    keep_grads: Annotated[
        bool, typer.Option("--keep-grads", help="Gradients are zeroed, not dropped: set_to_none=False.")
    ] = False,
    clip_norm: Annotated[
        float | None, typer.Option("--clip-norm", metavar="X", help="Gradients are clipped to this norm.")
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The model wraps itself (fully_shard …) as in one of N processes."),
    ] = None,
    tf32: Annotated[
        bool, typer.Option("--tf32", help="fp32 products may round to TF32, as torch does when it is told so.")
    ] = False,
    expandable: Annotated[
        bool, typer.Option("--expandable-segments", help="CUDA's allocator has expandable_segments:True.")
    ] = False,
    compile: Annotated[
        bool,
        typer.Option(
            "--compile", help="The model runs as torch.compile would have it: fused, and keeping what it keeps."
        ),
    ] = False,
    cuda_graphs: Annotated[
        bool, typer.Option("--cuda-graphs", help="--compile in its mode reduce-overhead: replayed from CUDA graphs.")
    ] = False,
    fits: Annotated[
        str | None,
        typer.Option(metavar="M", help="Does it fit into 24GiB, or auto, 90 % of the device? If not, what would?"),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="WHAT", help="batch-size or seq-len; or with values, batch-size=1,2,4.")
    ] = None,
    depth: Annotated[int, typer.Option(metavar="N", min=0, help="Levels of modules in the table.")] = 2,
    sort: Annotated[str | None, typer.Option(metavar="BY", help=f"Sort the modules by {', '.join(SORTABLE)}.")] = None,
    json_path: JsonOption = None,
    html_path: HtmlOption = None,
    trace_path: Annotated[
        str | None,
        typer.Option("--trace", metavar="FILE", help="Write the step for Perfetto; without --hardware, cpu:1's."),
    ] = None,
    capture: Annotated[
        bool | None,
        typer.Option("--capture/--no-capture", help="Capture the graph that a plan needs; default: where quick."),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="If the forward asks for the data's values, run two real steps instead.")
    ] = False,
) -> int:
    """Predict memory, FLOPs and, with --hardware, time of a training step. Nothing is run, no memory taken.

    Exit status 1 when --fits is given and the step does not fit.
    """
    devices = asked_devices(hardware)
    if devices:
        alone = {
            "--sweep": sweep,
            "--trace": trace_path,
            "--processes": processes,
            "--sort": sort,
            "--run": run or None,
        }
        return _on_each(model, devices, fits, alone, {
            "optimizer": optimizer, "autocast": model.autocast, "accumulate": accumulate, "keep_grads": keep_grads,
            "clip_norm": clip_norm,
            "tf32": tf32, "expandable_segments": expandable, "compile": compile, "cuda_graphs": cuda_graphs,
        }, json_path, html_path)  # fmt: skip
    budget_bytes = None if fits is None else budget_of(fits, hardware)
    asked = None if sweep is None else parse_sweep(sweep)
    if trace_path is not None and hardware is None:
        hardware = _TRACE_HARDWARE
        remark(f"note: no --hardware was given; times are predicted for {hardware}")
    _check_sort(sort, hardware)
    asked_how: dict[str, Any] = {
        "optimizer": optimizer, "autocast": model.autocast, "hardware": hardware, "accumulate": accumulate,
        "keep_grads": keep_grads, "clip_norm": clip_norm, "tf32": tf32, "expandable_segments": expandable,
        "compile": compile, "cuda_graphs": cuda_graphs,
    }  # fmt: skip
    if processes is not None:
        found = _wrapped(model, processes, asked_how)
        answer(found.table(depth, sort), found.to_json, json_path)
        return OK
    with quiet_stdout(), status(f"profiling {model.spec}") as tell:
        import trainwright as tw

        loaded = model.load("cpu" if run else "meta")
        remarks(loaded.notes)
        how = {**asked_how, "run": run}
        found = tw.profile(
            loaded.model, loaded.batch, loss_fn=loaded.loss_fn, name=loaded.ref.name, capture=capture, **how
        )
        if budget_bytes is not None or asked is not None:
            say = tell if sys.stderr.isatty() else lambda text: remark(f"profiling with {text}")
            found = _answered(Variants(model, loaded, found, how, say), budget_bytes, asked)
        if html_path is not None:
            found.to_html(html_path)
        if trace_path is not None:
            found.to_trace(trace_path)
    answer(found.table(depth, sort), found.to_json, json_path)
    return _verdict(found)


def _on_each(
    model: ModelOptions, devices: tuple[tuple[str, Cluster], ...], fits: str | None, alone: dict[str, Any],
    how: dict[str, Any], json_path: str | None, html_path: str | None,
) -> int:  # fmt: skip
    """Answer which of several devices can train the model; exit status 1 where none can in any way."""
    if stray := [name for name, value in alone.items() if value is not None]:
        raise UserError(f"one device is needed for {stray[0]}; got {len(devices)}; name one, or leave {stray[0]} out")
    with quiet_stdout(), status(f"profiling {model.spec}") as tell:
        loaded = model.load()
        remarks(loaded.notes)
        say = tell if sys.stderr.isatty() else lambda _: None
        found = fitting(model, loaded, how, devices, fits, say)
        if html_path is not None:
            found.to_html(html_path)
    answer(found.table(), found.to_json, json_path)
    if found.fits:
        return OK
    remark("error: a device with room for a step is needed; none of these has it in any way; try a shorter --seq-len")
    return FAILED


def _wrapped(model: ModelOptions, processes: int, how: dict[str, Any]) -> Profile:
    """Profile a model whose function wraps it as in one of several processes."""
    import trainwright as tw

    def make() -> tuple[Any, Any, Any]:
        loaded = model.load("meta")
        return loaded.model, loaded.batch, loaded.loss_fn

    with quiet_stdout(), status(f"profiling {model.spec} as one of {processes} processes"):
        return tw.profile(make, processes=processes, name=model.spec, **how)


def _answered(variants: Variants, budget_bytes: int | None, asked: Sweep | None) -> Profile:
    """Return the profile with the answers to `--fits` and `--sweep`."""
    run = None if asked is None else SweepRun(variants, asked)
    fit = None if budget_bytes is None else answer_fits(variants, budget_bytes)
    if fit is not None and run is not None:
        largest = run.largest_that_fits(fit.budget_bytes)
        fit = fit.model_copy(update={"largest_that_fits": {} if largest is None else {run.sweep.axis: largest}})
    points = () if run is None else run.points
    notes = (*variants.base.notes, *variants.notes)
    return variants.base.model_copy(update={"fit": fit, "sweep": points, "notes": notes})


def _check_sort(sort: str | None, hardware: str | None) -> None:
    if sort is not None and sort not in SORTABLE:
        raise UserError(f"--sort needs one of {', '.join(SORTABLE)}; got {sort!r}; choose one of them")
    if sort == "time" and hardware is None:
        raise UserError("--sort time needs predicted times; no hardware was given; add --hardware H")


def _verdict(profile: Profile) -> int:
    if profile.fit is None or profile.fit.fits:
        return OK
    budget_bytes = profile.fit.budget_bytes
    helping = next(
        (remedy.name for remedy in profile.fit.remedies if remedy.fits), "`trainwright plan` over several devices"
    )
    remark(
        f"error: a peak of at most {format_bytes(budget_bytes)} is needed; the step's is "
        f"{format_bytes(profile.peak_bytes)}, {format_bytes(profile.peak_bytes - budget_bytes)} more; try {helping}"
    )
    return FAILED
