"""The options of `train` that choose examples: checked at the command line, carried out on the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..artifacts import UserError, check_range
from ..reports.units import format_s

if TYPE_CHECKING:
    from ..models.targets import Loaded
    from ..runtime import ParallelModule, SelectedBatches

PANEL = "Selection of examples"
FRACTION, EVERY = 0.1, 5

SelectOption = Annotated[
    str | None,
    typer.Option(
        "--select", metavar="NAME", rich_help_panel=PANEL,
        help="Train on a part of MODEL's `dataset`: craig, largest-loss, random; or on strongly augmented copies beside it: "
        "augment, augment-coreset, augment-loss, augment-all, augment-random.",
    ),
]  # fmt: skip
FractionOption = Annotated[
    float | None,
    typer.Option(
        "--select-fraction",
        metavar="X",
        rich_help_panel=PANEL,
        help=f"Of the examples that is chosen; default {FRACTION}.",
    ),
]
EveryOption = Annotated[
    int | None,
    typer.Option(
        "--select-every", metavar="R", rich_help_panel=PANEL,
        help=f"Choose anew after R epochs of the subset; default {EVERY}.",
    ),
]  # fmt: skip


def check_select(
    name: str | None, fraction: float | None, every: int | None, data: Sequence[str] | None
) -> dict[str, Any] | None:
    """Return what the ranks need to choose examples; None where none are to be chosen."""
    if name is None:
        for option, value in (("--select-fraction", fraction), ("--select-every", every)):
            if value is not None:
                raise UserError(f"{option} needs a way to select; got no --select; add --select craig")
        return None
    if data:
        raise UserError("--select needs examples by index; got --data, which is text; leave one of them out")
    from ..selection import selection

    selection(name)
    fraction, every = FRACTION if fraction is None else fraction, EVERY if every is None else every
    check_range(
        "train",
        **{
            "--select-fraction": (fraction, "in (0, 1]", lambda value: 0 < value <= 1),
            "--select-every": (every, "of at least 1", lambda value: value >= 1),
        },
    )
    return {"name": name, "fraction": fraction, "every": every}


def selected(module: ParallelModule, loaded: Loaded, options: Mapping[str, Any], seed: int) -> SelectedBatches:
    """Return batches from a subset of the loaded model's examples, as `check_select` described it."""
    from ..rank.randomness import derived_seed
    from ..runtime import ExampleBatches, SelectedBatches
    from ..selection import logit_gradients, selection

    way, spec = selection(options["name"]), loaded.ref.spec
    if loaded.dataset is None:
        raise UserError(
            f"--select needs examples to choose from; {spec} returns none; let its function return a dict with model, batch and "
            "dataset"
        )
    if way.compose is not None and loaded.augment is None:
        raise UserError(
            f"--select {way.name} needs a strong augmentation; {spec} returns none; add to its function's dict an `augment` that "
            "maps an example to an example"
        )
    strong = None if way.compose is None else loaded.augment
    batches = ExampleBatches(module.plan, loaded.dataset, seed=seed, strong=strong)
    return SelectedBatches(
        module, batches, lambda step: way.make(options["fraction"], derived_seed(seed, step) % 2**31),
        logit_gradients if way.reads_gradients else None, every=options["every"], compose=way.compose,
    )  # fmt: skip


def selection_line(found: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> str:
    """Return what choosing did and cost, beside the seconds of the steps; `found` is the ranks' account."""
    seconds, step_s = sum(step["selection_s"] for step in steps), sum(step["step_s"] for step in steps)
    times = sum(step["selection_s"] > 0 for step in steps)
    return (
        f"subset {found['num_chosen']} of {found['num_examples']} examples, chosen {times} times in "
        f"{format_s(seconds)}, {seconds / (seconds + step_s):.0%} of the run"
    )
