"""What the ranks run for `train` and `verify`; called by name in processes of their own, or directly under torchrun."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..artifacts import Plan
from .learning import extras_of
from .saving import SavePolicy
from .selecting import selected
from .syncing import sent_by_all
from .tiers import tier_of


def verify(model: dict[str, Any], plan: str, dtype: str, seed: int = 0) -> dict[str, Any]:
    """Compare the plan with one process on this rank of its ranks; the answer is a `Report`."""
    from ..verifying import verified

    parsed = Plan.parse(plan, where="the plan")

    def build() -> Any:
        loaded = _load(model)
        return loaded.model, loaded.batch, loaded.loss_fn

    return verified(build, parsed, dtype, seed).model_dump(mode="json")


def train(
    model: dict[str, Any],
    plan: str,
    steps: int,
    lr: float | None,
    seed: int,
    data: list[str],
    optimizer: dict[str, Any] | None = None,
    saving: dict[str, Any] | None = None,
    metrics: str | None = None,
    tensorboard: str | None = None,
    on_nan: str = "stop",
    on_imbalance: str = "warn",
    timeout_s: float | None = None,
    select: dict[str, Any] | None = None,
    trace: str | None = None,
    learning: dict[str, Any] | None = None,
    sync: dict[str, Any] | None = None,
    replicas: int = 1,
    tier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train the plan on this rank of its ranks; rank 0 emits an event a step and writes the records.

    optimizer: name, options and form, each None where the plan's stands; without, all are the plan's.
    saving: the fields of `SavePolicy`. trace: where to write a trace of some steps.
    learning: the options of `cli.learning`. sync: name and options of the method by which the replicas exchange.
    """
    from .. import training
    from ..launch import emit, rank
    from ..runtime.module import parallelize
    from ..runtime.training.tracing import StepTrace
    from ..syncing import SyncOptions

    parsed = Plan.parse(plan, where="the plan")
    resting = None if tier is None else tier_of(tier)
    with training.built_on(resting):
        loaded = _load(model)
    asked = optimizer or {}
    extras = None if learning is None else extras_of(learning, loaded, parsed)
    if extras is not None:
        extras.check(parsed, steps, asked.get("name"))
    module = parallelize(loaded.model, parsed, loss_fn=loaded.loss_fn, seed=seed, replicas=replicas, tier=resting)
    module.train()
    if rank() == 0:
        module.steps.notice = lambda text: emit({"kind": "note", "text": text})
        if module.tier is not None:
            module.tier.notice = module.steps.notice
    stepping, _ = training.optimizer_of(parsed, **asked, model=loaded.model)
    chosen = training.made(stepping, module, lr)
    subset = None if select is None else selected(module, loaded, select, seed)

    def on_step(event: dict[str, Any]) -> None:
        if subset is not None:
            event["selection_s"] = subset.seconds_of(event["step"])
        if rank() == 0:
            emit(event)

    exchange = None if sync is None else SyncOptions(**sync).make(module, chosen)
    tracing = StepTrace(module.communicator.activity) if trace is not None else None
    run = training.run(
        module, chosen, lambda first: subset or _batches(loaded, parsed, data, first, seed), steps=steps,
        saving=SavePolicy(**saving or {}), sampler=subset, metrics=metrics, tensorboard=tensorboard, on_nan=on_nan,
        on_imbalance=on_imbalance, timeout_s=timeout_s, trace=tracing, on_step=on_step, extras=extras, sync=exchange,
        take=training.step_of(stepping, loaded.model, loaded.loss_fn),
    )  # fmt: skip
    if tracing is not None and trace is not None:
        tracing.write(trace)
    found: dict[str, Any] = {"first_step": run.first_step, "losses": list(run.losses)}
    if exchange is not None:
        found["sync"] = sent_by_all(exchange)
    if subset is not None:
        found["selection"] = {"num_chosen": subset.num_chosen, "num_examples": subset.batches.num_examples}
    return found


def _load(model: dict[str, Any]) -> Any:
    from ..models.targets import load

    return load(model["spec"], device="cpu", **model["options"])


def _batches(loaded: Any, plan: Plan, data: list[str], first: int, seed: int) -> Iterable[Any]:
    from ..runtime.training.train import text_batches
    from ..training import batches

    if not data:
        return batches(loaded, plan, first, seed)
    config = getattr(loaded.model, "config", None)
    return text_batches(plan, data, first, getattr(config, "vocab_size", None))
