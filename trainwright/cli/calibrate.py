"""`trainwright calibrate`: measure this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..artifacts import Plan, Run, UserError
from .output import STDOUT, answer, quiet_stdout, remark, status
from .places import check_readable


def calibrate(
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="For --hardware; - is standard output.")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Processes that train at once. Default: one a core, 4 at most."),
    ] = None,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Copies between this machine's GPU and its host; the rest is the GPU's preset."),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Some seconds instead of minutes.")] = False,
    learn: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Of `train --json`, or a log (--plan): correct the hardware of its plan; repeatable."
        ),
    ] = None,
    plans: Annotated[
        list[str] | None,
        typer.Option(
            "--plan", metavar="PLAN.json", help="That stands for the run of a log; one for each log, in order."
        ),
    ] = None,
) -> None:
    """Measure what this machine's processes reach: arithmetic, memory, copies, collectives. Or learn from training runs."""
    if learn and (nproc is not None or quick or gpu):
        raise UserError("--learn measures nothing; --nproc, --gpu or --quick was given too; leave them out")
    if gpu and nproc is not None:
        raise UserError("--gpu measures one process; --nproc was given too; leave one of them out")
    if plans and not learn:
        raise UserError("--plan needs the log of a run; got none; add --learn LOG")
    with quiet_stdout(), status("learning" if learn else "measuring") as tell:
        from ..reports.terminal import cluster_table, left_out_lines

        lines: list[str] = []
        if learn:
            from ..hardware.learn import learn as correct
            from ..hardware.learn import left_out

            runs = _runs(learn, plans or [])
            found, lines = correct(runs), left_out_lines(left_out(runs))
        elif gpu:
            from ..hardware import resolve
            from ..hardware.calibrate import with_host
            from ..self_checking import own_gpu

            found = with_host(resolve(own_gpu()), quick)
        else:
            import trainwright as tw

            found = tw.calibrate(nproc, quick=quick, progress=tell)
    answer("\n".join([cluster_table(found), *lines]), found.to_json, output)
    if output not in (None, STDOUT):
        remark(f"wrote {output}; next: trainwright plan MODEL --hardware {output}")


def _runs(paths: Sequence[str], plans: Sequence[str]) -> list[Run]:
    """Read each file: what `train --json` wrote stands for itself, a log takes the next of the plans."""
    from ..hardware.logs import is_log, run_of_log

    check_readable("--learn", paths)
    texts = {path: Path(path).read_text(encoding="utf8", errors="replace") for path in paths}
    logs = [path for path, text in texts.items() if is_log(text)]
    if len(logs) != len(plans):
        raise UserError(
            f"a plan for each log is needed, what the run was, as --plan; got {len(logs)} logs and {len(plans)} plans; make one "
            "with `trainwright plan MODEL --hardware H --solver fsdp`"
        )
    of_log = dict(zip(logs, plans))
    return [
        run_of_log(text, Plan.from_json(of_log[path]), path) if path in of_log else Run.parse(text, where=path)
        for path, text in texts.items()
    ]
