"""Trains a planned model: runs one step, the loop around it, and batches of text for a causal language model."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...artifacts import Plan, UserError
from ...capture.export import find_loss
from ...profiler.kernels.allocator import measure, peak_on_gpu, states_of, storage_bytes
from ..batch import Shapes, planned_shapes, rows_in, shapes_of
from ..entries import check_entries
from ..module import ParallelModule
from .imbalance import ImbalanceGate
from .nonfinite import FiniteGate
from .tracing import StepTrace
from .watchdog import Watchdog

OnStep = Callable[[dict[str, Any]], None]
MayUpdate = Callable[[Tensor], bool]
Norms = Callable[..., dict[str, float]]
"""Computes norms from gradients and, with pipeline stages, from a function that sums a number over the stages."""
NUM_MEASURED = 2
"""The number of steps whose allocations are recorded; all later ones allocate the same."""


def train_step(module: ParallelModule, optimizer: torch.optim.Optimizer, part: Any, may_update: MayUpdate | None = None
               ) -> Tensor:  # fmt: skip
    """Run one step on the rank's part of a batch and return the loss of the whole batch.

    `may_update(loss)` is called once the gradients are complete; the update is skipped if it returns False.
    """
    activity = module.communicator.activity
    loss = loss_with_gradients(module, optimizer, part)
    with activity.doing("the optimizer's step"):
        if may_update is None or may_update(loss):
            began, exchanged_s = time.perf_counter(), activity.comm_s
            optimizer.step()
            activity.update_s += time.perf_counter() - began - (activity.comm_s - exchanged_s)
        elif module.tier is not None:
            module.tier.take_back()
    return loss.detach()


def loss_with_gradients(module: ParallelModule, optimizer: torch.optim.Optimizer, part: Any) -> Tensor:
    """Run forward and backward on the rank's part of a batch; return the loss of the whole batch."""
    activity = module.communicator.activity
    optimizer.zero_grad(set_to_none=True)
    with module.late_loss():
        with activity.doing("the forward"):
            output = module(**part) if isinstance(part, dict) else module(*part)
            loss = find_loss(output)
        with activity.doing("the backward"):
            loss.backward()
    return loss


def train_loop(
    module: ParallelModule,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    *,
    steps: int,
    first_step: int = 0,
    on_step: OnStep = lambda event: None,
    after_step: Callable[[int], None] = lambda step: None,
    on_nan: str = "stop",
    on_imbalance: str = "warn",
    timeout_s: float | None = None,
    trace: StepTrace | None = None,
    take: Any = None,
    schedule: Any = None,
    norms: Norms | None = None,
    held_out: HeldOut | None = None,
    growth: Any = None,
) -> list[float]:
    """Train for the steps `first_step` … `steps − 1` on global `batches` and return the losses; every rank calls this.

    `on_step` gets {step, steps, loss, step_s, samples_per_s, tokens_per_s, peak_bytes, comm_s, update_s, comm_bytes, planned,
    skipped, lr, and the results of `norms` and `held_out`} on every rank (`planned`: whether the batch had the planned shape);
    the peak is the largest rank's since the start, from the allocator's own records. `after_step(step)` runs at the end of a
    step (to save a checkpoint, say). on_nan: `stop`, `skip` or `raise`, see `FiniteGate`; such a step never changes the weights.
    on_imbalance: `warn`, `stop`, `rerun` or `drop`, see `ImbalanceGate`, whose factor is `expert_imbalance` in the event.
    timeout_s: the most seconds of one activity of a rank (an op, a batch, a checkpoint); the run then ends with the name of the
    rank and the op. None: no limit but the process group's. trace: records some of the steps. take: runs one step instead of
    `train_step`, such as a `ClosureStep`; the result of its `told()`, if it has one, is added to the event. schedule: its
    `before(module, part)` and `after()` are called around each step. norms: computes norms of the gradients for the event.
    held_out: a loss on other data, measured from time to time. growth: the number of batches in a step (`num`); its
    `after(step, batches)` is called after each step.

    Raises `Refusal` when the loss is not finite, unless such steps are skipped, and `UserError` when the data ends early.
    """
    source, gate, activity = iter(batches), FiniteGate(on_nan), module.communicator.activity
    routing = ImbalanceGate(on_imbalance)
    losses: list[float] = []
    with Watchdog(activity, timeout_s) if timeout_s is not None else nullcontext():
        peak_bytes = 0
        for step in range(first_step, steps):
            activity.step = step
            with activity.doing("the data"):
                taken = [_next(source, step) for _ in range(1 if growth is None else growth.num)]
                parts = [module.plan.shard_batch(batch, rows="all") for batch in taken]
                part, batch = parts[0], taken[0]
            comm_s, num_bytes, skipped = activity.comm_s, activity.num_bytes.copy(), gate.num_skipped
            update_s = activity.update_s
            told: dict[str, float] = {"lr": 0.0}
            if schedule is not None:
                with activity.doing("the schedule"):
                    schedule.before(module, part)
            told["lr"] = float(optimizer.param_groups[0]["lr"])
            taking = take or (_by_gradients if len(parts) == 1 else partial(_adding_up, parts))
            may_update = partial(_may_update, module, (gate, routing), step, norms, told)
            run = _Step(partial(taking, module, optimizer, part, may_update, batch), module, optimizer)
            tracing = trace.step(step - first_step) if trace is not None else nullcontext()
            module.communicator.routed.clear()
            with tracing, module.communicator.routed.limited(routing.limit):
                peak_bytes = max(peak_bytes, _peak_of(run, step - first_step < NUM_MEASURED))
            losses.append(run.loss)
            shapes = shapes_of(module.plan, check_entries(module.plan, part))
            event = _event(module.plan, shapes, step, steps, run.loss, run.step_s, peak_bytes)
            event["comm_s"], event["update_s"] = activity.comm_s - comm_s, activity.update_s - update_s
            event["comm_bytes"] = dict(activity.num_bytes - num_bytes)
            event["planned"] = shapes == planned_shapes(module.plan)
            event["skipped"] = gate.num_skipped > skipped
            event.update(routing.told)
            if module.tier is not None:
                event.update(module.tier.told())
            event.update(told)
            if hasattr(take, "told"):
                event.update(take.told())
            if growth is not None:
                event["num_batches"] = len(taken)
                for rate in ("samples_per_s", "tokens_per_s"):
                    event[rate] = event[rate] and event[rate] * len(taken)
                with activity.doing("the noise of the gradients"):
                    growth.after(step, taken)
            if schedule is not None:
                schedule.after()
            if held_out is not None and held_out.is_due(step, steps):
                with activity.doing("the held-out loss"):
                    event["eval_loss"] = held_out.loss(module)
            on_step(event)
            with activity.doing("what follows the step"):
                after_step(step)
    return losses


def _may_update(
    module: ParallelModule,
    gates: tuple[FiniteGate, ImbalanceGate],
    step: int,
    norms: Norms | None,
    told: dict[str, float],
    loss: Tensor,
) -> bool:
    """Add the norms of the gradients to `told`, and return whether the update may be made."""
    if norms is not None and module.tier is None:  # which has taken the gradients
        pipe = module.pipe
        grads = {name: param.grad for name, param in module.named_parameters() if param.grad is not None}
        if pipe is not None:
            told.update(norms([grad for name, grad in grads.items() if pipe.owns(name)], pipe.added))
        elif grads:
            told.update(norms(list(grads.values())))
    finite, routing = gates
    return finite.lets_pass(module, step, loss) and routing.lets_pass(module, step)


@dataclass(frozen=True)
class HeldOut:
    """Measures the loss on batches that are not trained on, after every `every` steps and after the last one.

    batches: global ones, the same on every rank. The result is the mean of their losses, in evaluation mode.
    """

    batches: Sequence[Any]
    every: int

    def is_due(self, step: int, steps: int) -> bool:
        """Tell whether the loss is due after `step`."""
        return (step + 1) % self.every == 0 or step + 1 == steps

    def loss(self, module: ParallelModule) -> float:
        """Return the mean loss of the batches; a collective call."""
        was_training = module.training
        module.eval()
        try:
            with torch.no_grad():
                return math.fsum(self._loss(module, batch) for batch in self.batches) / len(self.batches)
        finally:
            module.train(was_training)

    def _loss(self, module: ParallelModule, batch: Any) -> float:
        part = module.plan.shard_batch(batch, rows="all")
        return float(find_loss(module(**part) if isinstance(part, dict) else module(*part)))


def _by_gradients(module: ParallelModule, optimizer: torch.optim.Optimizer, part: Any, may_update: MayUpdate, batch: Any
                  ) -> Tensor:  # fmt: skip
    return train_step(module, optimizer, part, may_update)


def _adding_up(
    parts: Sequence[Any],
    module: ParallelModule,
    optimizer: torch.optim.Optimizer,
    part: Any,
    may_update: MayUpdate,
    batch: Any,
) -> Tensor:
    """Run one step on several batches, whose gradients are accumulated to that of their mean loss."""
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=module.device)
    for own in parts:
        loss = find_loss(module(**own) if isinstance(own, dict) else module(*own)) / len(parts)
        loss.backward()
        total = total + loss.detach()
    with module.communicator.activity.doing("the optimizer's step"):
        if may_update(total):
            optimizer.step()
    return total


class _Step:
    """A callable that runs one step, so that it can be measured, and then holds its loss and seconds."""

    def __init__(self, take: Callable[[], Tensor], module: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
        self.take, self.module, self.optimizer = take, module, optimizer
        self.loss = self.step_s = math.nan

    def __call__(self) -> None:
        started = time.perf_counter()
        self.loss = float(self.take())
        self.step_s = time.perf_counter() - started


def _next(source: Iterator[Any], step: int) -> Any:
    try:
        return next(source)
    except StopIteration:
        raise UserError(
            f"data for every step is needed; it ended before step {step}; give more, or fewer steps"
        ) from None


def _event(
    plan: Plan, shapes: Shapes, step: int, steps: int, loss: float, step_s: float, peak_bytes: int
) -> dict[str, Any]:
    ids = shapes.get("input_ids")
    return {
        "kind": "step", "step": step, "steps": steps, "loss": loss, "step_s": step_s,
        "samples_per_s": rows_in(plan, shapes) / step_s, "tokens_per_s": math.prod(ids) / step_s if ids else None,
        "peak_bytes": peak_bytes,
    }  # fmt: skip


def _peak_of(run: _Step, watched: bool) -> int:
    """Run a step and return the largest rank's peak; 0 on a CPU if the step is not `watched`."""
    module, optimizer = run.module, run.optimizer
    if module.device.type == "cuda":
        return _largest(module, peak_on_gpu(run, module, optimizer))
    if not watched:
        run()
        return 0
    static = storage_bytes([*module.parameters(), *module.buffers(), *states_of(optimizer)])
    with module.communicator.settling():
        delta = measure(run, num_steps=1).peak_delta_bytes
    return _largest(module, static + delta)


def _largest(module: ParallelModule, value: int) -> int:
    held = torch.tensor([value], dtype=torch.int64)
    if module.replicas.size > 1:
        with module.communicator.activity.waiting("the exchange of peaks"):
            dist.all_reduce(held, dist.ReduceOp.MAX, group=module.replicas.inside)
    return int(held.item())


def text_batches(
    plan: Plan, paths: Sequence[str], first_step: int = 0, vocab_size: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield batches of consecutive bytes of the files, for a causal language model; the same on every rank.

    Each batch is `input_ids` and equal `labels` in the plan's shape; the text repeats from its start. Raises `UserError` when a
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
