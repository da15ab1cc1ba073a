"""Training a planned model: one step, the loop around it, and the data of a causal language model."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..artifacts import Plan, Refusal, UserError
from ..capture.export import find_loss
from ..profiler.allocator import measure, storage_bytes
from .module import ParallelModule

OnStep = Callable[[dict[str, Any]], None]
NUM_MEASURED = 2
"""Steps whose allocations are followed: all later ones allocate the same."""


def train_step(module: ParallelModule, optimizer: torch.optim.Optimizer, part: Any) -> Tensor:
    """Run one step on the rank's part of a batch and return the loss of the whole batch."""
    optimizer.zero_grad(set_to_none=True)
    output = module(**part) if isinstance(part, dict) else module(*part)
    loss = find_loss(output)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train_loop(
    module: ParallelModule,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    *,
    steps: int,
    first_step: int = 0,
    on_step: OnStep = lambda event: None,
    after_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train for the steps `first_step` … `steps − 1` on global `batches` and return the losses; every rank calls this.

    `on_step` gets {step, steps, loss, step_s, samples_per_s, peak_bytes} on every rank; the peak is the largest rank's
    since the start, from the allocator's own records. `after_step(step)` runs when a step is done (a checkpoint, say).
    Raises `Refusal` when the loss is not finite: nothing is trained on from there.
    """
    source = iter(batches)
    losses: list[float] = []
    waiting: list[tuple[int, float, float]] = []

    def one_step() -> None:
        step = first_step + len(losses)
        part = module.plan.shard_batch(_next(source, step))
        started = time.perf_counter()
        loss = float(train_step(module, optimizer, part))
        waiting.append((step, loss, time.perf_counter() - started))
        losses.append(loss)
        if not math.isfinite(loss):
            raise Refusal(f"the loss is {loss} at step {step}; lower the learning rate, or train in a wider dtype")
        after_step(step)

    num_measured = min(NUM_MEASURED, max(0, steps - first_step))
    peak_bytes = _peak_of(module, optimizer, one_step, num_measured)
    while True:
        for step, loss, step_s in waiting:
            on_step(_event(module.plan, step, steps, loss, step_s, peak_bytes))
        waiting.clear()
        if first_step + len(losses) >= steps:
            return losses
        one_step()
        peak_bytes = max(peak_bytes, _gpu_peak(module))


def _next(source: Iterator[Any], step: int) -> Any:
    try:
        return next(source)
    except StopIteration:
        raise UserError(
            f"data for every step is needed; it ended before step {step}; give more, or fewer steps"
        ) from None


def _event(plan: Plan, step: int, steps: int, loss: float, step_s: float, peak_bytes: int) -> dict[str, Any]:
    num_samples = next((entry.shape[0] for entry in plan.batch.values() if entry.shape), 1)
    return {
        "kind": "step", "step": step, "steps": steps, "loss": loss, "step_s": step_s,
        "samples_per_s": num_samples / step_s, "peak_bytes": peak_bytes,
    }  # fmt: skip


def _peak_of(
    module: ParallelModule, optimizer: torch.optim.Optimizer, one_step: Callable[[], None], num_steps: int
) -> int:
    """Run the first steps under the allocator's records; return the largest rank's peak."""
    if module.device.type == "cuda":
        for _ in range(num_steps):
            one_step()
        return _gpu_peak(module)
    held = [*module.parameters(), *module.buffers(), *_states(optimizer)]
    static = storage_bytes(held)
    with module.communicator.settling():
        delta = measure(one_step, num_steps).peak_delta_bytes if num_steps else 0
    return _largest(static + delta)


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _gpu_peak(module: ParallelModule) -> int:
    return _largest(torch.cuda.max_memory_allocated()) if module.device.type == "cuda" else 0


def _largest(value: int) -> int:
    held = torch.tensor([value], dtype=torch.int64)
    if dist.get_world_size() > 1:
        dist.all_reduce(held, dist.ReduceOp.MAX)
    return int(held.item())


def text_batches(
    plan: Plan, paths: Sequence[str], first_step: int = 0, vocab_size: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield batches of consecutive bytes of the files, for a causal language model; the same on every rank.

    Each batch is `input_ids` and equal `labels` in the plan's shape; the text starts again at its end. `UserError` when a
    file cannot be read, when there is too little text, or when the model's batch or vocabulary does not fit bytes.
    """
    entry = plan.batch.get("input_ids")
    if entry is None or len(entry.shape) != 2:
        raise UserError(
            f"a causal language model is needed for --data; this batch has {', '.join(plan.batch)}; leave it out"
        )
    if vocab_size is not None and vocab_size < 256:
        raise UserError(
            f"a vocabulary of at least 256 is needed to read bytes; this model has {vocab_size}; enlarge it"
        )
    try:
        text = b"".join(Path(path).read_bytes() for path in paths)
    except OSError as error:
        raise UserError(
            f"readable files are needed for --data; {error.filename} cannot be read ({error.strerror})"
        ) from None
    size = entry.shape[0] * entry.shape[1]
    if len(text) < size:
        raise UserError(f"at least {size} bytes of text are needed for one batch; the files have {len(text)}; add more")
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    num_batches = len(text) // size
    step = first_step
    extra = [name for name in plan.batch if name not in ("input_ids", "labels")]
    while True:
        start = (step % num_batches) * size
        ids = tokens[start : start + size].long().reshape(entry.shape)
        batch = {
            "input_ids": ids,
            "labels": ids.clone(),
            **{name: _ones(plan, name) for name in extra},
            **plan.literals,
        }
        yield {name: value for name, value in batch.items() if name in plan.batch or name in plan.literals}
        step += 1


def _ones(plan: Plan, name: str) -> Tensor:
    entry = plan.batch[name]
    if name != "attention_mask":
        raise UserError(f"input_ids, labels and attention_mask are all that --data can fill; this batch wants {name}")
    return torch.ones(entry.shape, dtype=getattr(torch, entry.dtype))


class Timer:
    """Collects the seconds of `with` blocks."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def __enter__(self) -> Timer:
        self._started = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self._started)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)
