"""`plan --tier`, `train --tier`: the options of a run whose parameters, gradients and states rest on disks or the host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ..artifacts import Plan, UserError, parse_bytes
from ..reports.units import format_bytes, format_s

if TYPE_CHECKING:
    from ..tiers import Policy

PLACES = ("disk", "host")
"""As those of `trainwright.tiers`, which would import torch."""
PANEL = "Disks or the host as a tier"
TierOption = Annotated[
    str | None,
    typer.Option(
        "--tier", metavar="DIR[,DIR]|host", rich_help_panel=PANEL,
        help="Parameters, gradients and optimizer states rest there, striped; with --resume, go on from there. Or in the host's "
        "memory, as plans of --tier host do anyway.",
    ),
]  # fmt: skip
PlannedTierOption = Annotated[
    str | None,
    typer.Option(
        "--tier", metavar="[disk|host]", rich_help_panel=PANEL,
        help="Let parameters, states and activations rest on disks, or in the host's memory, where --memory is short; say what "
        "moves, and how disks wear. Alone: disk.",
    ),
]  # fmt: skip


class TakesTier(TyperCommand):
    """A command whose `--tier` may stand alone, as the option of disks."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse with `disk` behind a `--tier` that no place follows."""
        return super().parse_args(ctx, with_place(args))


def with_place(args: list[str]) -> list[str]:
    """Return the arguments with `disk` behind a `--tier` that no place follows.

    >>> with_place(["--tier", "zoo:gpt2"])
    ['--tier', 'disk', 'zoo:gpt2']
    """
    own = args[: args.index("--")] if "--" in args else args
    completed: list[str] = []
    for index, arg in enumerate(own):
        completed.append(arg)
        if arg == "--tier" and not any(map(_is_word, own[index + 1 : index + 2])):
            completed.append(PLACES[0])
    return completed + args[len(own) :]


def _is_word(arg: str) -> bool:
    """Tell whether an argument is a place or meant as one: models are written with a colon, or as files."""
    return arg.isalpha() or Path(arg).is_dir()


TierWindowOption = Annotated[
    str | None,
    typer.Option(metavar="M", rich_help_panel=PANEL, help="Memory for what comes and goes; without a plan's 1GiB."),
]
TierKeepOption = Annotated[
    str | None,
    typer.Option(
        metavar="M", rich_help_panel=PANEL,
        help="Most memory for parameters and states that stay. A plan takes what --memory has room for by default.",
    ),
]  # fmt: skip
TierUpdateOption = Annotated[
    str | None,
    typer.Option(metavar="during|after", rich_help_panel=PANEL, help="The update, against the backward: during."),
]
TierCommitOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, rich_help_panel=PANEL, help="Steps between two that can be gone on from: 1."),
]
TierRateOption = Annotated[
    str | None,
    typer.Option(
        metavar="READ[,WRITE]", rich_help_panel=PANEL, help="Bytes a second at most: 1GB,500MB. Default: the disk's."
    ),
]
TierClipOption = Annotated[
    float | None,
    typer.Option(
        "--tier-clip-previous-norm", metavar="X", rich_help_panel=PANEL,
        help="Scale gradients as if their norm were the last step's.",
    ),
]  # fmt: skip


def check_tier(
    tier: str | None, window: str | None, keep: str | None, update: str | None, commit_every: int | None, rate: str | None,
    clip: float | None, resume: bool, plan: Plan, beside: dict[str, bool],
) -> dict[str, Any] | None:  # fmt: skip
    """Return what `tier_of` takes, checked before a rank starts; `UserError` for what cannot be or cannot go together."""
    from ..runtime.tiered.tier import resting

    is_host = rests_in_host(tier, plan)
    if tier is None and not is_host:
        resting(plan, None)
        return None
    given = [option for option, is_given in beside.items() if is_given]
    if given:
        why = "gradients are not kept" if is_host else "its folders have every step whole, and gradients are not kept"
        raise UserError(f"--tier needs a run without {given[0]}: {why}; leave it out")
    read, write = _rates(rate)
    found = {
        "folders": [] if is_host or tier is None else [each for each in tier.split(",") if each],
        "host": is_host,
        "window_bytes": _bytes(window),
        "keep_bytes": _bytes(keep),
        "update": update,
        "commit_every": commit_every,
        "resume": resume and not is_host,
        "clip_previous_norm": clip,
        "read_rate": read,
        "write_rate": write,
    }
    from ..tiers import check_folders
    from ..tiers.places import check_empty
    from ..tiers.store import check_options

    options = tier_of(found)
    resting(plan, options)
    check_options(options.store)
    if is_host:
        return found
    paths = check_folders(options.folders)
    if not resume:
        check_empty(paths)
    return found


def rests_in_host(tier: str | None, plan: Plan) -> bool:
    """Tell whether a run of `plan` with this `--tier` rests in the host's memory."""
    return tier == "host" or (tier is None and plan.tier is not None and plan.tier.place == "host")


def policy_of(place: str, window: str | None, keep: str | None, update: str | None, commit_every: int | None) -> Policy:
    """Return how `plan --tier` is to use its disks, or the host; `UserError` for what cannot be."""
    if place not in PLACES:
        raise UserError(
            f"--tier needs {' or '.join(PLACES)} in a plan; got {place!r}; folders are given to `train --tier`"
        )
    from ..runtime import TierOptions

    return TierOptions(
        (),
        _bytes(window or "1GiB"),
        _bytes(keep),
        update or "during",
        commit_every=commit_every or 1,
        host=place == "host",
    ).policy()


def _bytes(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text)


def commits_every(given: int | None, plan: Plan) -> int:
    """Return the number of steps between two that can be gone on from: as given, else the plan's."""
    return given or (1 if plan.tier is None else plan.tier.commit_every)


def updates_during(given: str | None, plan: Plan) -> bool:
    """Tell whether updates run during the backward: as given, else as the plan says."""
    return (given or ("during" if plan.tier is None else plan.tier.update)) == "during"


def tier_of(given: dict[str, Any]) -> Any:
    """Return the `TierOptions` of what `check_tier` returned."""
    from ..runtime import TierOptions
    from ..tiers import StoreOptions

    rest = {key: value for key, value in given.items() if key not in ("read_rate", "write_rate")}
    return TierOptions(**rest, store=StoreOptions(read_rate=given["read_rate"], write_rate=given["write_rate"]))


def _rates(text: str | None) -> tuple[float | None, float | None]:
    """Return the rates of reads and of writes."""
    if text is None:
        return None, None
    parts = [float(parse_bytes(each)) for each in text.split(",")]
    if len(parts) > 2:
        raise UserError(
            f"--tier-rate needs one rate, or that of reads and that of writes; got {text!r}; write 1GB,500MB"
        )
    return parts[0], parts[-1]


LEVELS = "▁▂▃▄▅▆▇█"


def tier_lines(steps: list[dict[str, Any]], step_s: float, is_host: bool = False) -> str:
    """Return what the tier has moved, a step, a day and over the last step, and how long steps waited for it."""
    later = steps[1:] or steps
    read, written, waited_s = (
        sum(step[name] for step in later) / len(later)
        for name in ("tier_read_bytes", "tier_write_bytes", "tier_waited_s")
    )
    planned_read, planned_written = (later[-1][f"tier_planned_{name}_bytes"] for name in ("read", "write"))
    a_day = "" if is_host else f", {format_bytes(written * 86_400 / step_s)} a day at this pace"
    total = (
        f"{'host ' if is_host else 'disks'}  read {format_bytes(read)} a step, planned {format_bytes(planned_read)}; written "
        f"{format_bytes(written)}, planned {format_bytes(planned_written)}{a_day}; waited for "
        f"{format_s(waited_s)} of {format_s(step_s)}"
    )
    rates = later[-1]["tier_rates"]
    most = max(max(each) for each in rates.values())
    return "\n".join([total, *(_link_line(direction, each, most) for direction, each in rates.items())])


def _link_line(direction: str, rates: list[float], most: float) -> str:
    """Return one direction's bytes a second over the step, both directions drawn to one scale."""
    drawn = "".join(LEVELS[round((len(LEVELS) - 1) * rate / most)] if most else LEVELS[0] for rate in rates)
    mean = sum(rates) / len(rates)
    return f"{direction:<5}  {drawn}  {format_bytes(mean)}/s over the last step, {format_bytes(max(rates))}/s at most"
