"""`trainwright calibrate`: measure this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from ..artifacts import UserError
from .output import STDOUT, answer, quiet_stdout, remark, status


def calibrate(
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="For --hardware; - is standard output.")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Processes that train at once. Default: one a core, 4 at most."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Some seconds instead of minutes.")] = False,
    learn: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN.json", help="Of `train --json`: correct the file that it was planned for; repeatable."
        ),
    ] = None,
) -> None:
    """Measure what this machine's processes reach: arithmetic, memory, collectives. Or learn from training runs."""
    if learn and (nproc is not None or quick):
        raise UserError("--learn measures nothing; --nproc or --quick was given too; leave them out")
    with quiet_stdout(), status("learning" if learn else "measuring") as tell:
        from ..reports.terminal import cluster_table

        if learn:
            from ..artifacts import Run
            from ..hardware.learn import learn as correct

            found = correct([Run.from_json(path) for path in learn])
        else:
            import trainwright as tw

            found = tw.calibrate(nproc, quick=quick, progress=tell)
    answer(cluster_table(found), found.to_json, output)
    if output not in (None, STDOUT):
        remark(f"wrote {output}; next: trainwright plan MODEL --hardware {output}")
