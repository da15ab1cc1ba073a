"""The options of `plan` that ask what sync methods would cost between replicas, and the table that answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..artifacts import Cluster, Plan, UserError
from ..pricing import Priced, ReplicaLink, split
from ..reports.units import format_bytes, format_s
from .output import rows_as_table
from .syncing import PANEL, SyncOptionOption

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LinkOption", "PricedSyncOption", "ReplicasOption", "SyncOptionOption", "SyncQuestion", "ask_for_sync"]

PricedSyncOption = Annotated[
    str | None,
    typer.Option(
        "--sync", metavar="NAME[,NAME]", rich_help_panel=PANEL,
        help="Price methods between replicas of the plan, or all of them: auto.",
    ),
]  # fmt: skip
ReplicasOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", rich_help_panel=PANEL,
        help="So many times the hardware. Default: its outermost axis is that of the replicas, and the plan is for the rest.",
    ),
]  # fmt: skip
LinkOption = Annotated[
    str | None,
    typer.Option(
        metavar="AXIS=RATE", rich_help_panel=PANEL,
        help="The link of each replica, such as node=100Mbit or node=1Gbit,2ms (with its latency).",
    ),
]  # fmt: skip
SHARE = 0.1
"""The share of a step that an exchange may take before a longer period is named."""


@dataclass(frozen=True)
class SyncQuestion:
    """A question about sync: methods, their options, the number of replicas, and the link between them."""

    names: tuple[str, ...]
    options: dict[str, Any]
    link: ReplicaLink
    replicas: int

    def priced(self, plan: Plan, model: nn.Module) -> Priced:
        """Return the methods' prices between replicas of a plan."""
        from ..pricing import prices

        return prices(plan, model, self.names, self.link, self.replicas, self.options)


def ask_for_sync(
    names: str | None, options: Sequence[str] | None, link: str | None, replicas: int | None, cluster: Cluster
) -> tuple[SyncQuestion | None, Cluster]:
    """Return the question about sync, `None` where nothing is asked, and the hardware of one replica."""
    from ..sync import parse_options, record

    if names is None:
        given = {"--sync-option": options, "--link": link, "--replicas": replicas}
        if stray := [name for name, value in given.items() if value]:
            raise UserError(f"{stray[0]} needs the method that it is for; got none; add --sync NAME, or --sync auto")
        return None, cluster
    wanted = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in wanted if wanted != ("auto",) else ():
        record(name)
    own, between, number = split(cluster, None if link is None else ReplicaLink.parse(link), replicas)
    return SyncQuestion(wanted, parse_options(list(options or ())), between, number), own


def sync_table(priced: Priced, plan: Plan) -> str:
    """Return the prices as a table, what is behind them above it, and what cannot be taken below."""
    link, ranks = priced.link, priced.ranks_a_replica
    shared = f", shared by its {ranks} ranks" if ranks > 1 else ""
    late = f", {format_s(link.latency_s)}" if link.latency_s else ""
    head = (
        f"{priced.replicas} replicas along {link.axis}, each on {ranks} rank{'' if ranks == 1 else 's'} and a batch of its own:\n"
        f"{format_bytes(link.bytes_per_s)}/s{late} each{shared}; a step computes for\n{format_s(plan.predicted.step_s)}, and "
        "nothing of the exchange is hidden"
    )
    rows = [
        {
            "method": each.name,
            "step": format_s(each.step_s),
            "exchange": format_s(each.exchange_s),
            "sent": format_bytes(each.sent_bytes * ranks),
            "every": str(each.period) if each.period > 1 else "step",
            "state": format_bytes(each.state_bytes),
            "trajectory": _given_up(each.gives_up),
        }
        for each in priced.prices
    ]
    lines = [head, "", rows_as_table(rows, drop=("state", "exchange"))] if rows else [head, ""]
    lines += _longer(priced)
    lines += [f"not {name}: {why}" for name, why in priced.refused.items()]
    return "\n".join(lines)


def _given_up(promise: str) -> str:
    """A promise without the words that all share.

    >>> _given_up("another trajectory; the same stationary points"), _given_up("the maths of one worker with all data")
    ('another; the same stationary points', 'one worker with all data')
    """
    return promise.replace("another trajectory", "another").replace("the maths of ", "").replace(", close to", ": near")


def _longer(priced: Priced) -> list[str]:
    """Say from which period on the exchange is a tenth of a step, of the methods that have one and take more."""
    slow = [each for each in priced.prices if each.period > 1 and each.exchange_s > SHARE * each.step_s]
    if not slow:
        return []
    said = ", ".join(f"{each.name} {each.period_for(SHARE)}" for each in slow)
    return [f"the exchange is a tenth of a step from these periods on: {said}"]


def sync_as_json(priced: Priced) -> dict[str, Any]:
    """Return what `plan --sync --json` has beside the plan."""
    return {
        "link": asdict(priced.link),
        "replicas": priced.replicas,
        "methods": [{**asdict(each), "period_for_a_tenth": each.period_for(SHARE)} for each in priced.prices],
        "refused": dict(priced.refused),
    }
