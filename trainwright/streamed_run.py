"""A run of MeZO whose blocks are streamed: what each rank of `trainwright train MODEL --optimizer mezo --stream …` does."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from .artifacts import Refusal, StreamPlan, UserError

if TYPE_CHECKING:
    from torch import nn

    from .models.targets import Loaded
    from .streaming import Streamed

_PART_EVERY_S = 10.0


@dataclass(frozen=True)
class StreamedRun:
    """What is asked of a run.

    model: spec and options, as for `load_model`. places: `("host",)`, or folders. storage: the type at rest. weights: a
    safetensors file or folder that the values are read from, so that the model never is in memory as a whole. options: of
    `MeZO`, by text. memory_bytes: the budget of the device; None: none.
    """

    model: Mapping[str, Any]
    places: Sequence[str]
    steps: int = 100
    storage: str | None = None
    blocks: Sequence[str] | None = None
    weights: str | None = None
    options: Mapping[str, Any] | None = None
    lr: float | None = None
    schedule: Mapping[str, Any] | None = None
    memory_bytes: int | None = None
    data: Sequence[str] = ()
    eval_every: int | None = None
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    keep: int = 2
    resume: bool = False
    on_nan: str = "stop"
    metrics: str | None = None
    tensorboard: str | None = None
    seed: int = 0
    plan: str | None = None
    """A `StreamPlan` in JSON, which `blocks` and `storage` are of."""


def work(asked: dict[str, Any]) -> dict[str, Any]:
    """Train on this rank; rank 0 emits an event a step, and one now and then within a step."""
    import torch
    import torch.distributed as dist

    from .launch import emit, rank
    from .optim.mezo import MeZO
    from .optim.record import as_dtype
    from .scheduling import ScheduleOptions
    from .streaming import ByteExchange, DiskStore, HostStore, Streamed, check_plan
    from .streaming.saving import load, save

    run = StreamedRun(**asked)
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    loaded, source = _loaded(run)
    model, is_first = loaded.model.train(), rank() == 0
    if run.plan is not None:
        check_plan(StreamPlan.parse(run.plan, where="the plan"), model)
    storage = None if run.storage is None else as_dtype(run.storage)
    options = _options(run)
    factors = ScheduleOptions(**(run.schedule or {})).factors(run.steps, "mezo")
    loss_of = loss_for(loaded)
    predicted = _predicted(run, loaded, loss_of, storage, is_first)
    optimizer = MeZO(_groups(model, options), **options)
    base = [group["lr"] for group in optimizer.param_groups]
    store: Any = (
        HostStore() if tuple(run.places) == ("host",) else DiskStore(_own_places(run.places, rank(), num_ranks))
    )
    teller = _Teller(emit) if is_first else None
    # dropout and the like differ between ranks, whose batches do
    torch.manual_seed(run.seed + rank())
    exchange = ByteExchange() if num_ranks > 1 else None
    losses: list[float] = []
    try:
        streamed = Streamed(
            model,
            optimizer,
            store,
            storage=storage,
            blocks=run.blocks,
            exchange=exchange,
            source=source,
            on_part=teller,
        )
        first = load(streamed, run.checkpoint) if run.resume and run.checkpoint else 0
        if exchange is not None and run.resume:
            torch.manual_seed(run.seed + rank() + num_ranks * first)
        if is_first:
            emit({"kind": "begun", "step": first})
        records = _records(run, first) if is_first else None
        mine = itertools.islice(_batches(run, loaded, first * num_ranks), rank(), None, num_ranks)
        for step, batch in zip(range(first, run.steps), mine):
            for group, lr in zip(optimizer.param_groups, base):
                group["lr"] = lr * factors[step]
            if teller is not None:
                teller.step = step
            begun, moved = time.perf_counter(), (streamed.resting.num_read, streamed.resting.num_written)
            loss = streamed.step(functools.partial(loss_of, model, batch))
            step_s = time.perf_counter() - begun
            if num_ranks > 1:
                total = torch.tensor([loss], dtype=torch.float64)
                dist.all_reduce(total)
                loss = float(total) / num_ranks
            losses.append(loss)
            event = _event(step, loss, step_s, batch, optimizer.param_groups[0]["lr"], num_ranks)
            event["read_bytes"] = streamed.resting.num_read - moved[0]
            event["written_bytes"] = streamed.resting.num_written - moved[1]
            if run.eval_every and ((step + 1) % run.eval_every == 0 or step + 1 == run.steps):
                event["eval_loss"] = _held_out(streamed, loaded, loss_of)
            if is_first:
                emit(event)
            if records is not None:
                records.write(event)
            stops = not math.isfinite(loss) and run.on_nan != "skip"
            due = run.checkpoint_every and (step + 1) % run.checkpoint_every == 0
            if run.checkpoint and is_first and (due or stops or step + 1 == run.steps):
                save(streamed, run.checkpoint, step + 1, run.keep)
            if stops:
                raise Refusal(
                    f"a loss that is a number is needed; that of step {step + 1} is {loss}; the weights are those before; take a "
                    "smaller --lr, or --on-nan skip"
                )
        streamed.flush()
        streamed.resting.close()
    finally:
        if isinstance(store, DiskStore):
            store.close()
    return {
        "first_step": first,
        "losses": losses,
        "predicted_peak_bytes": predicted,
        "num_blocks": len(streamed.blocks),
    }


class _Teller:
    """Tells now and then which part a long step is at."""

    def __init__(self, emit: Callable[[dict[str, Any]], None]) -> None:
        self.step, self._emit, self._told_s = 0, emit, time.monotonic()

    def __call__(self, index: int, number: int) -> None:
        if time.monotonic() - self._told_s >= _PART_EVERY_S:
            self._told_s = time.monotonic()
            self._emit({"kind": "part", "step": self.step, "part": index, "num_parts": number})


def _loaded(run: StreamedRun) -> tuple[Loaded, Any]:
    """Build the model; with weights in files its parameters have no values."""
    from .models.targets import load

    def build() -> Loaded:
        return load(run.model["spec"], device="cpu", **run.model["options"])

    if run.weights is None:
        return build(), None
    from .streaming import from_safetensors, without_values

    with without_values():
        loaded = build()
    return loaded, from_safetensors(run.weights)


def _options(run: StreamedRun) -> dict[str, Any]:
    from .optim.mezo import RECORD
    from .optim.options import checked_options

    options = dict(checked_options(RECORD, run.options))
    if run.lr is not None:
        options["lr"] = run.lr
    options.setdefault("seed", run.seed)
    return options


def _groups(model: nn.Module, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return matrices, and biases and norms, which do not decay."""
    decay = options.get("weight_decay", 0.0)
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise UserError("parameters to train are needed; all are frozen; set requires_grad on some")
    kinds = [([p for p in params if p.dim() > 1], decay), ([p for p in params if p.dim() <= 1], 0.0)]
    return [{"params": own, "weight_decay": of_kind} for own, of_kind in kinds if own]


def _own_places(places: Sequence[str], rank: int, num_ranks: int) -> list[str]:
    """Return the folders of a rank: those given, or one of its own in each."""
    from pathlib import Path

    if num_ranks == 1:
        return list(places)
    own = [Path(place) / f"rank-{rank}" for place in places]
    for place in own:
        place.mkdir()
    return [str(place) for place in own]


def _predicted(run: StreamedRun, loaded: Loaded, loss: Any, storage: Any, is_first: bool) -> int | None:
    """Say what a step will take of the device, and refuse what does not fit."""
    from .launch import emit
    from .streaming import check_fits, predicted_peak

    model, exact = loaded.model, bool(_options(run).get("exact", False))
    try:
        predicted: int | None = predicted_peak(
            model, loaded.batch, loss, storage=storage, blocks=run.blocks, exact=exact
        )
    except UserError:
        raise
    except Exception as error:  # a model's own code, on tensors without values
        predicted = None
        if is_first:
            emit(
                {"kind": "note", "text": f"the peak of a step is not predicted: {type(error).__name__} without values"}
            )
    check_fits(model, run.memory_bytes, predicted, storage=storage, blocks=run.blocks)
    if is_first:
        emit({"kind": "predicted", "peak_bytes": predicted})
    return predicted


def loss_for(loaded: Loaded) -> Callable[[Any, Any], Any]:
    """Return the loss as a function of the model and a batch."""
    from .capture.call import call_model, loss_of
    from .capture.export import as_batch

    def loss(model: Any, batch: Any) -> Any:
        given = as_batch(batch)
        return loss_of(model, given, loaded.loss_fn, call_model(model, given, loaded.loss_fn))

    return loss


def _batches(run: StreamedRun, loaded: Loaded, first: int) -> Iterator[Any]:
    """Return batches from the `first` on: of the files, the model's data, its examples in shuffled epochs, or its batch."""
    from .capture.export import as_batch
    from .launch import emit, rank
    from .runtime.training.train import text_batches

    if run.data:
        leaves = as_batch(loaded.batch)
        named = leaves if isinstance(leaves, dict) else {}
        tensors = {name: value for name, value in named.items() if hasattr(value, "shape")}
        shapes = {
            name: SimpleNamespace(shape=tuple(value.shape), dtype=str(value.dtype).removeprefix("torch."))
            for name, value in tensors.items()
        }
        literals = {name: value for name, value in named.items() if name not in tensors}
        config = getattr(loaded.model, "config", None)
        like: Any = SimpleNamespace(batch=shapes, literals=literals)
        return text_batches(like, list(run.data), first, getattr(config, "vocab_size", None))
    if loaded.data is not None:
        return itertools.islice(iter(loaded.data), first, None)
    if loaded.dataset is not None:
        return itertools.islice(_of_examples(loaded, run.seed), first, None)
    if rank() == 0:
        emit({"kind": "note", "text": "no data was given: every step trains on the same batch"})
    return itertools.repeat(loaded.batch)


def _of_examples(loaded: Loaded, seed: int) -> Iterator[Any]:
    import torch
    from torch.utils.data import default_collate

    from .models.batches import shared_size
    from .numerics.seeds import seeded

    size = shared_size(loaded.batch) or 1
    for epoch in itertools.count():
        order = torch.randperm(len(loaded.dataset), generator=seeded(seed, epoch)).tolist()
        for start in range(0, len(order) - size + 1, size):
            batch = default_collate([loaded.dataset[index] for index in order[start : start + size]])
            yield tuple(batch) if isinstance(batch, list) else batch


def _event(step: int, loss: float, step_s: float, batch: Any, lr: float, num_ranks: int) -> dict[str, Any]:
    from .models.batches import num_tokens, shared_size

    size = (shared_size(batch) or 1) * num_ranks
    length = num_tokens(batch)
    rates = {"samples_per_s": size / step_s, "tokens_per_s": size * length / step_s if length else None}
    return {"kind": "step", "step": step, "loss": loss, "step_s": step_s, "peak_bytes": None, "lr": lr, **rates}


def _held_out(streamed: Streamed, loaded: Loaded, loss_of: Callable[[Any, Any], Any]) -> float:
    if loaded.eval_batch is None:
        raise UserError("an eval_batch of MODEL is needed for --eval-every; it has none; return one, or leave it out")
    streamed.model.eval()
    try:
        return streamed.evaluate(lambda: loss_of(streamed.model, loaded.eval_batch))
    finally:
        streamed.model.train()


def _records(run: StreamedRun, first: int) -> Any:
    from .cli.records import Records

    return Records(run.metrics, run.tensorboard, first)
