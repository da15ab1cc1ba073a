"""The options of `train` that say how fast it learns and what it is held against: schedule, growing batches, held-out loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..artifacts import Plan, UserError

if TYPE_CHECKING:
    from ..models.targets import Loaded
    from ..training import Extras

PANEL = "Learning rate, batch size, held-out loss"
MOST_EVAL_BATCHES = 16
"""Batches of `--eval-data` that are read: those at its beginning."""

ScheduleOption = Annotated[
    str,
    typer.Option(
        "--schedule", metavar="NAME", rich_help_panel=PANEL,
        help="Of the learning rate: constant, linear, cosine, wsd, refined (by --norms), lanczos (SGD).",
    ),
]  # fmt: skip
WarmupOption = Annotated[
    int, typer.Option("--warmup-steps", metavar="N", rich_help_panel=PANEL, help="Over which the rate rises first.")
]
DecayOption = Annotated[
    int | None,
    typer.Option("--decay-steps", metavar="N", rich_help_panel=PANEL, help="Of wsd, at its end; default a fifth."),
]
NormsOption = Annotated[
    str | None,
    typer.Option(
        "--norms", metavar="F.jsonl", rich_help_panel=PANEL, help="The --metrics of an earlier run, for refined."
    ),
]
EvalEveryOption = Annotated[
    int | None,
    typer.Option(
        "--eval-every", metavar="N", min=1, rich_help_panel=PANEL,
        help="Steps between losses on MODEL's `eval_batch`, or --eval-data; the last step has one too.",
    ),
]  # fmt: skip
EvalDataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--eval-data", metavar="FILE", rich_help_panel=PANEL,
        help=f"Bytes that are not trained on, for --eval-every; the first {MOST_EVAL_BATCHES} batches; repeatable.",
    ),
]  # fmt: skip
GrowOption = Annotated[
    int | None,
    typer.Option(
        "--grow-batch", metavar="M", rich_help_panel=PANEL,
        help="Take up to M planned batches a step, as the noise of the gradient asks for.",
    ),
]  # fmt: skip
GrowEveryOption = Annotated[
    int, typer.Option("--grow-every", metavar="N", rich_help_panel=PANEL, help="Steps between measurements.")
]
GrowEtaOption = Annotated[
    float,
    typer.Option("--grow-eta", metavar="X", rich_help_panel=PANEL, help="Largest noise, as a share of the gradient."),
]


def check_learning(options: dict[str, Any], plan: Plan, steps: int | None, optimizer: str, takes_loss: bool) -> None:
    """Raise `UserError` for options that say nothing, contradict one another, or that the plan cannot follow."""
    if options["schedule"] not in ("constant", "lanczos") and steps is None:
        raise UserError(
            f"the number of steps is needed for --schedule {options['schedule']}, which ends with them; got none; add --steps N"
        )
    if options["eval_data"] and options["eval_every"] is None:
        raise UserError("--eval-data needs the steps between held-out losses; got none; add --eval-every N")
    extras_of(options, None, plan).check(plan, steps or 1, optimizer, object() if takes_loss else None)


def extras_of(options: dict[str, Any], loaded: Loaded | None, plan: Plan) -> Extras:
    """Return what a run does beside its steps; without the model, all but the held-out loss."""
    from ..growing import GrowthOptions
    from ..scheduling import ScheduleOptions
    from ..training import Extras, held_out

    growth = None
    if options["grow_batch"] is not None:
        growth = GrowthOptions(options["grow_batch"], options["grow_every"], options["grow_eta"])
    schedule = ScheduleOptions(
        options["schedule"], options["warmup_steps"], options["decay_steps"], options["norms"]
    )  # fmt: skip
    if options["eval_every"] is None or loaded is None:
        return Extras(schedule, None, growth)
    return Extras(schedule, held_out(loaded, _text(options["eval_data"], loaded, plan), options["eval_every"]), growth)


def _text(paths: Sequence[str] | None, loaded: Loaded, plan: Plan) -> list[Any] | None:
    """The batches of `--eval-data`, each once."""
    from itertools import islice
    from pathlib import Path

    from ..runtime.training.train import text_batches

    if not paths:
        return None
    size = plan.batch["input_ids"].shape if "input_ids" in plan.batch else (1,)
    num_bytes = sum(Path(path).stat().st_size for path in paths)
    num = max(1, min(MOST_EVAL_BATCHES, num_bytes // max(1, size[0] * size[-1])))
    vocab_size = getattr(getattr(loaded.model, "config", None), "vocab_size", None)
    return list(islice(text_batches(plan, list(paths), 0, vocab_size), num))
