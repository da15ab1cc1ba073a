"""`trainwright calibrate`: measure this machine."""

from __future__ import annotations

from typing import Annotated

import typer

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
) -> None:
    """Measure what this machine's processes reach: arithmetic, memory, collectives."""
    with quiet_stdout(), status("measuring") as tell:
        import trainwright as tw

        from ..reports.terminal import cluster_table

        found = tw.calibrate(nproc, quick=quick, progress=tell)
    answer(cluster_table(found), found.to_json, output)
    if output not in (None, STDOUT):
        remark(f"wrote {output}; next: trainwright plan MODEL --hardware {output}")
