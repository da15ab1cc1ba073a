"""What the ranks run for `train` and `verify`; called by name in processes of their own, or directly under torchrun."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..artifacts import Plan, UserError


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
    checkpoint: str | None,
    checkpoint_every: int | None,
    resume: bool,
    metrics: str | None,
) -> dict[str, Any]:
    """Train the plan on this rank of its ranks; rank 0 emits an event a step and writes the metrics."""
    from .. import optim
    from ..launch import emit, rank
    from ..runtime import checkpoint as checkpoints
    from ..runtime.module import parallelize
    from ..runtime.train import train_loop

    parsed = Plan.parse(plan, where="the plan")
    loaded = _load(model)
    module = parallelize(loaded.model, parsed, loss_fn=loaded.loss_fn, seed=seed)
    module.train()
    chosen = optim.create(optimizer, module.parameters(), lr=lr)
    first = 0
    if resume:
        assert checkpoint is not None
        first = checkpoints.load_latest(checkpoint, module, chosen) + 1
    stream = _Metrics(metrics, append=resume) if rank() == 0 and metrics else None

    def on_step(event: dict[str, Any]) -> None:
        if rank() == 0:
            emit(event)
        if stream is not None:
            stream.write(event)

    def after_step(step: int) -> None:
        due = checkpoint_every is not None and (step + 1) % checkpoint_every == 0
        if checkpoint is not None and (due or step + 1 == steps):
            checkpoints.save(checkpoint, step, module, chosen)

    batches = _batches(loaded, parsed, data, first)
    losses = train_loop(module, chosen, batches, steps=steps, first_step=first, on_step=on_step, after_step=after_step)
    return {"first_step": first, "losses": losses}


def _load(model: dict[str, Any]) -> Any:
    from ..capture.targets import load

    return load(model["spec"], device="cpu", **model["options"])


def _batches(loaded: Any, plan: Plan, data: list[str], first: int) -> Iterator[Any]:
    from ..launch import emit, rank
    from ..runtime.train import text_batches

    if data:
        config = getattr(loaded.model, "config", None)
        return text_batches(plan, data, first, getattr(config, "vocab_size", None))
    if loaded.data is not None:
        return itertools.islice(iter(loaded.data), first, None)
    if rank() == 0:
        emit({"kind": "note", "text": "no data was given: every step trains on the same batch"})
    return itertools.repeat(loaded.batch)


class _Metrics:
    """A line of JSON a step."""

    FIELDS = ("step", "loss", "step_s", "samples_per_s", "peak_bytes")

    def __init__(self, path: str, append: bool) -> None:
        try:
            self.file = Path(path).open("a" if append else "w", encoding="utf8")  # noqa: SIM115 - open for the run
        except OSError as error:
            raise UserError(f"a writable file is needed for --metrics; {path} is not ({error.strerror})") from None

    def write(self, event: dict[str, Any]) -> None:
        self.file.write(json.dumps({name: event[name] for name in self.FIELDS}) + "\n")
        self.file.flush()
