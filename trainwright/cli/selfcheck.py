"""`trainwright selfcheck`: predictions held against this machine, as a report that can be sent."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..artifacts import Cluster, Refusal, Report, SelfCheck, need
from ..artifacts.record import write_atomically
from .errors import FAILED, OK
from .model import ModelOptions
from .output import JsonOption, answer, command_line, quiet_stdout, remark, status
from .places import check_file
from .ranks import num_ranks_given
from .verify import holds, run_verification

if TYPE_CHECKING:
    from collections.abc import Callable

VERIFIED = ModelOptions("zoo:gpt2-tiny")
"""The model of the plan that is verified over several devices."""


def selfcheck(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME:BATCH[:LENGTH][@DTYPE]", help="Of the zoo. Default: ten.", show_default=False),
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Measure on a GPU; without it on the processor.")] = False,
    hardware: Annotated[
        str | None, typer.Option(metavar="H", help="To predict for. Default: the GPU's preset, or cpu:1.")
    ] = None,
    minutes: Annotated[float, typer.Option(metavar="M", help="No further model begins after these.")] = 10.0,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="Of the steps.")] = "adamw",
    nproc: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Devices to verify a plan on; 1: none. Default: all GPUs, or 2 processes."
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE.md", help="Write the report, to be sent.")
    ] = None,
    json_path: JsonOption = None,
) -> int:
    """Measure peak and time of several models' steps, and hold them against the predictions. Exit status 1: a plan was wrong."""
    need("transformers", "the models of the self-check")
    if output is not None:
        check_file("--output", output)
    with quiet_stdout(), status("checking") as tell:
        found = _checked(models or [], gpu, hardware, minutes, optimizer, tell)
        number = nproc or num_ranks_given(None) or (found.num_devices if gpu else 2)
        if number > 1:
            tell(f"verifying a plan on {number} devices")
            found = found.model_copy(update=_verified(gpu, number))
    found = found.model_copy(update={"command": shlex.join(command_line())})
    answer(found.table(), found.to_json, json_path)
    if output is not None:
        write_atomically(Path(output), found.to_markdown())
        remark(f"wrote {output}")
    return OK if found.verification is None or holds(found.verification) else FAILED


def _checked(
    models: list[str], gpu: bool, hardware: str | None, minutes: float, optimizer: str, tell: Callable[[str], None]
) -> SelfCheck:
    from ..self_checking import Case, selfcheck

    cases = [Case.parse(text) for text in models]
    return selfcheck(
        _cluster(gpu, hardware), "cuda" if gpu else "cpu", cases, minutes=minutes, optimizer=optimizer, progress=tell
    )


def _cluster(gpu: bool, hardware: str | None) -> Cluster:
    """The hardware to predict for: what was said, or one device of this machine."""
    from ..hardware import resolve
    from ..self_checking import own_gpu

    return resolve(hardware or (own_gpu() if gpu else "cpu:1"))


def _verified(gpu: bool, number: int) -> dict[str, Report | tuple[str, ...]]:
    """The fields that a small plan over all devices fills."""
    import trainwright as tw

    from ..self_checking import own_gpu

    loaded = VERIFIED.load()
    try:
        plan = tw.plan(
            loaded.model, loaded.batch, hardware=f"{number}x{own_gpu()}" if gpu else f"cpu:{number}", solver="fsdp"
        )
    except Refusal as refusal:
        return {"notes": (f"no plan was verified: {refusal}",)}
    return {"verification": run_verification(VERIFIED, plan, "float64", number)}
