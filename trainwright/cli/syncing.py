"""The options of `train` that say by which method replicas of the plan exchange, and the line that sums it up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..artifacts import Plan, UserError
from ..reports.units import format_bytes
from .ranks import num_ranks_given

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..optim.chosen import Chosen
    from ..sync import Sync

PANEL = "Replicas"
SyncMethodOption = Annotated[
    str | None,
    typer.Option(
        "--sync", metavar="NAME", rich_help_panel=PANEL,
        help="How replicas of the plan exchange, instead of summing gradients: `trainwright sync` lists the methods.",
    ),
]  # fmt: skip
SyncOptionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--sync-option", metavar="KEY=VALUE", rich_help_panel=PANEL,
        help="A setting of the method, such as period=8; repeatable.",
    ),
]  # fmt: skip
ReplicasOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", rich_help_panel=PANEL,
        help="How many times the plan is run side by side, each on batches of its own. Default: as the ranks make up.",
    ),
]  # fmt: skip


def check_sync(
    name: str | None, options: list[str] | None, replicas: int | None, plan: Plan, nproc: int | None,
    chosen: Chosen, beside: Sequence[str],
) -> tuple[dict[str, Any] | None, int]:  # fmt: skip
    """Return name and options of the method, `None` for none, and the number of replicas; `UserError` for what cannot be.

    chosen: the optimizer of the run. beside: options that were given and choose the examples of a step.
    """
    from ..sync import parse_options
    from ..syncing import SyncOptions, check_replicas

    if name is None and options:
        raise UserError(f"--sync-option needs the method that it is for; got {options[0]}; add --sync NAME")
    asked = None if name is None else SyncOptions(name, parse_options(options))
    if asked is not None:
        asked.check(plan, chosen.name, chosen.needs_loss, beside)
    number = check_replicas(replicas, plan, None if name is None else num_ranks_given(nproc), name)
    return (None if asked is None else {"name": asked.record.name, "options": dict(asked.options)}), number


def sent_by_all(sync: Sync) -> dict[str, Any]:
    """Return what all ranks of a run have sent by its method; a collective call."""
    import torch.distributed as dist

    own: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(own, sync.traffic.sent_bytes)
    return {"name": sync.record.name, "sent_bytes": sum(own), "num_ranks": len(own)}


def sync_line(steps: list[dict[str, Any]], found: dict[str, Any], replicas: int) -> str:
    """Return the line about the exchange at the end of a run.

    >>> steps = [{"sync_rounds": 0}, {"sync_rounds": 1}]
    >>> sync_line(steps, {"name": "diloco", "sent_bytes": 2048, "num_ranks": 2}, 2)
    'sync   diloco between 2 replicas: 1 round in 2 steps, 2 KiB sent by all, 1 KiB a rank'
    """
    rounds, num_bytes = steps[-1]["sync_rounds"], found["sent_bytes"]
    each = format_bytes(num_bytes // found["num_ranks"])
    return (
        f"sync   {found['name']} between {replicas} replicas: {rounds} round{'' if rounds == 1 else 's'} in {len(steps)} steps, "
        f"{format_bytes(num_bytes)} sent by all, {each} a rank"
    )
