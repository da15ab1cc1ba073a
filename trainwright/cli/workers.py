"""What the ranks run for `train` and `verify`; called by name in processes of their own, or directly under torchrun."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from ..artifacts import Plan
from .records import Records
from .saving import SavePolicy, Saving
from .selecting import selected


def verify(model: dict[str, Any], plan: str, dtype: str, seed: int = 0) -> dict[str, Any]:
    """Compare the plan with one process on this rank of its ranks; the answer is a `Report`."""
    from .. import optim
    from ..runtime.verify import verify as compare

    parsed = Plan.parse(plan, where="the plan")

    def build() -> Any:
        loaded = _load(model)
        return loaded.model, loaded.batch, loaded.loss_fn

    report = compare(
        build, parsed, dtype=dtype, seed=seed, make_optimizer=lambda params: optim.create(parsed.optimizer, params)
    )
    return report.model_dump(mode="json")


def train(
    model: dict[str, Any],
    plan: str,
    steps: int,
    optimizer: str,
    lr: float | None,
    seed: int,
    data: list[str],
    saving: dict[str, Any] | None = None,
    metrics: str | None = None,
    tensorboard: str | None = None,
    on_nan: str = "stop",
    timeout_s: float | None = None,
    select: dict[str, Any] | None = None,
    trace: str | None = None,
) -> dict[str, Any]:
    """Train the plan on this rank of its ranks; rank 0 emits an event a step and writes the records.

    saving: the fields of `SavePolicy`. trace: where to write a trace of some steps.
    """
    from .. import optim
    from ..launch import emit, rank
    from ..runtime.module import parallelize
    from ..runtime.tracing import StepTrace
    from ..runtime.train import train_loop

    parsed = Plan.parse(plan, where="the plan")
    loaded = _load(model)
    module = parallelize(loaded.model, parsed, loss_fn=loaded.loss_fn, seed=seed)
    module.train()
    chosen = optim.create(optimizer, module.parameters(), lr=lr)
    subset = None if select is None else selected(module, loaded, select, seed)
    checkpoints = Saving(SavePolicy(**saving or {}), module, chosen, steps, subset)
    first = checkpoints.first_step
    records = Records(metrics, tensorboard, first) if rank() == 0 else None
    if rank() == 0 and first > 0:
        emit({"kind": "resumed", "step": first})

    def on_step(event: dict[str, Any]) -> None:
        if subset is not None:
            event["selection_s"] = subset.seconds_of(event["step"])
        if rank() == 0:
            emit(event)
        if records is not None:
            records.write(event)

    tracing = StepTrace(module.communicator.activity) if trace is not None else None
    batches = subset or _batches(loaded, parsed, data, first, seed)
    with checkpoints:
        losses = train_loop(
            module, chosen, batches, steps=steps, first_step=first, on_step=on_step,
            after_step=checkpoints.after_step, on_nan=on_nan, timeout_s=timeout_s, trace=tracing,
        )  # fmt: skip
    if tracing is not None and trace is not None:
        tracing.write(trace)
    found: dict[str, Any] = {"first_step": first, "losses": losses}
    if subset is not None:
        found["selection"] = {"num_chosen": subset.num_chosen, "num_examples": subset.batches.num_examples}
    return found


def _load(model: dict[str, Any]) -> Any:
    from ..capture.targets import load

    return load(model["spec"], device="cpu", **model["options"])


def _batches(loaded: Any, plan: Plan, data: list[str], first: int, seed: int) -> Iterator[Any]:
    from ..launch import emit, rank
    from ..runtime.examples import ExampleBatches
    from ..runtime.train import text_batches

    if data:
        config = getattr(loaded.model, "config", None)
        return text_batches(plan, data, first, getattr(config, "vocab_size", None))
    if loaded.data is not None:
        return itertools.islice(iter(loaded.data), first, None)
    if loaded.dataset is not None:
        return ExampleBatches(plan, loaded.dataset, seed=seed, first_step=first)
    if rank() == 0:
        emit({"kind": "note", "text": "no data was given: every step trains on the same batch"})
    return itertools.repeat(loaded.batch)
