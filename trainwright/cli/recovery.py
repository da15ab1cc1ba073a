"""Starting a run anew when a rank of it has died or hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..artifacts import UserError
from .output import remark
from .ranks import under_torchrun

RestartsOption = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="If a rank dies or hangs, restart all from --checkpoint, up to N times."),
]
OnNanOption = Annotated[
    str, typer.Option(metavar="stop|skip|raise", help="When loss or gradients are not finite; no weight sees them.")
]
OnImbalanceOption = Annotated[
    str,
    typer.Option(
        metavar="POLICY",
        help="When experts are sent more rows than planned: warn, stop, rerun (in pieces, so that the peak holds), drop.",
    ),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="S", min=0.1, help="Seconds that a rank may be at one op or batch.")
]


def with_restarts(run: Callable[[bool], Any], num_restarts: int) -> Any:
    """Return `run(restarted)`, called again, up to `num_restarts` times, where ranks failed: all have been ended then.

    What the user has to mend and what was answered *no* is not tried again. Under torchrun its own `--max-restarts` is for
    this. The last failure is raised.

    >>> from trainwright.launch import WorkerError
    >>> def run(restarted):
    ...     if not restarted:
    ...         raise WorkerError("rank 1 of 2 was ended by SIGKILL")
    ...     return "done"
    >>> with_restarts(run, 1)
    'done'
    """
    from ..launch import WorkerError

    if num_restarts and under_torchrun():
        raise UserError(
            "--restarts needs ranks that this command started; these are torchrun's; leave it out, and give torchrun --max-restarts"
        )
    for attempt in range(num_restarts + 1):
        try:
            return run(attempt > 0)
        except WorkerError as error:
            if attempt == num_restarts:
                raise
            cause = str(error).splitlines()[0].removesuffix("; it last wrote:")
            remark(f"note: {cause}; restart {attempt + 1} of {num_restarts} from the last checkpoint")
    raise AssertionError("the loop returns or raises")
