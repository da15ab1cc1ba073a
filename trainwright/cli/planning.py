"""One plan, as the command line asks for it: of one optimizer or the best of several, for a batch of a size or of the best."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..artifacts import Cluster, Plan, Refusal, UserError
from ..artifacts.offers import num_examples
from ..batch_size import check_batch_size, fastest_batch
from ..reports.terminal import compare_table
from ..reports.units import format_s
from .batches import Batches
from .model import PANEL, ModelOptions
from .planned import named

if TYPE_CHECKING:
    from ..models.targets import Loaded

BatchSizeOption = Annotated[
    str | None,
    typer.Option(
        metavar="N|auto", rich_help_panel=PANEL,
        help="Examples in the global batch; auto: as many as train the most examples a second within the memory.",
    ),
]  # fmt: skip
GlobalBatchOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, rich_help_panel=PANEL,
        help="With --batch-size auto: examples a step trains on, cut into as many micro-batches as is fastest.",
    ),
]  # fmt: skip


@dataclass(frozen=True)
class AutoBatch:
    """The size of the batch is asked for: free, or a step's examples fixed and their micro-batches free."""

    batches: Batches
    global_batch: int | None = None

    def load(self, num_examples: int) -> Loaded:
        """Return the model with a batch of that size."""
        return self.batches.load(num_examples)


@dataclass(frozen=True, eq=False)
class Question:
    """The arguments of `tw.plan` but for the optimizer, of which there may be several."""

    model: ModelOptions
    loaded: Loaded
    options: dict[str, Any]
    optimizers: list[str]
    solver: str
    auto: AutoBatch | None = None

    def on(self, cluster: Cluster, tell: Callable[[str], None]) -> Question:
        """Return the same question of other hardware; `tell` hears how it goes."""
        return replace(self, options={**self.options, "hardware": cluster, "progress": tell})

    def loaded_for(self, plan: Plan | None) -> Loaded:
        """Return the model with the batch that a plan is for."""
        return self.loaded if plan is None or self.auto is None else self.auto.load(num_examples(plan))


def ask_for_batch(
    model: ModelOptions, batch_size: str | None, global_batch: int | None
) -> tuple[ModelOptions, AutoBatch | None]:
    """Return the model with the batch size that was given, and what is asked about it where that is `auto`."""
    size = _parsed(batch_size)
    check_batch_size(size, global_batch)
    if not isinstance(size, str):
        return replace(model, batch_size=size), None
    return model, AutoBatch(Batches(model), global_batch)


def fastest(question: Question) -> tuple[Plan, str]:
    """Plan for each optimizer and return the fastest, and what the others reach as text; `Refusal` where none fits."""
    plans: dict[str, Plan | Refusal] = {}
    for optimizer in question.optimizers:
        try:
            plans[optimizer] = _plan(question, optimizer)
        except Refusal as refusal:
            plans[optimizer] = refusal
    fitting = [plan for plan in plans.values() if isinstance(plan, Plan)]
    if not fitting:
        raise next(refusal for refusal in plans.values() if isinstance(refusal, Refusal))
    best = min(fitting, key=lambda plan: plan.predicted.step_s / num_examples(plan))
    if len(plans) == 1:
        return best, ""
    best = best.model_copy(update={"notes": (*best.notes, _why_this(best, plans))})
    return best, compare_table(plans) + "\n"


def _why_this(best: Plan, plans: Mapping[str, Plan | Refusal]) -> str:
    """Say which optimizer was chosen, and what the others would have cost."""
    others = [
        f"{name} {format_s(found.predicted.step_s)}" if isinstance(found, Plan) else f"{name} does not fit"
        for name, found in plans.items()
        if found is not best and not (isinstance(found, Plan) and found.optimizer == best.optimizer)
    ]
    return (
        f"{best.optimizer} was chosen for its step, {format_s(best.predicted.step_s)}, the fastest that fits; "
        f"{', '.join(others)}; steps to a loss are not compared"
    )


def _plan(question: Question, optimizer: str) -> Plan:
    import trainwright as tw

    auto, solver = question.auto, question.solver
    if auto is None:
        return tw.plan(**asked_with(question, optimizer), solver=solver)

    def of_size(num_examples: int, **more: Any) -> Plan:
        assert auto is not None
        loaded = auto.load(num_examples)
        tell = question.options["progress"]
        asked = {
            **asked_with(replace(question, loaded=loaded), optimizer),
            **more,
            "progress": lambda text: tell(f"batch of {num_examples}: {text}"),
        }
        with named(replace(question.model, batch_size=num_examples), loaded):
            return tw.plan(**asked, solver=solver)

    if auto.global_batch is not None:
        chosen = question.options["micro_batches"]
        return of_size(auto.global_batch, micro_batches="auto" if chosen == 1 else chosen)
    return fastest_batch(of_size, question.options["hardware"].num_devices)


def asked_with(question: Question, optimizer: str) -> dict[str, Any]:
    """Return what `tw.plan`, `tw.compare` and `tw.frontier` are all asked with."""
    loaded = question.loaded
    return {
        "model": loaded.model,
        "batch": loaded.batch,
        "loss_fn": loaded.loss_fn,
        "model_ref": loaded.ref,
        "optimizer": optimizer,
        **question.options,
    }


def _parsed(text: str | None) -> int | str | None:
    if text is None or text.strip().lower() == "auto":
        return None if text is None else "auto"
    if not text.strip().isdigit() or int(text) < 1:
        raise UserError(f"a batch size of 1 example or more is needed, or auto; got {text!r}; try auto")
    return int(text)
