"""Training on the ranks that exist: `tw.train` in Python, and what each rank of `trainwright train` runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .artifacts import Plan, UserError

if TYPE_CHECKING:
    import os

    import torch
    from torch import Tensor, nn

    from .capture.targets import Loaded
    from .cli.saving import SavePolicy
    from .optim.chosen import Chosen
    from .runtime import ParallelModule
    from .runtime.tracing import StepTrace

    LossFn = Callable[[Any, Any], Tensor]
    Event = dict[str, Any]

MODEL_FORMS = (
    "an nn.Module, zoo:NAME, FILE.py:function, package.module:function or a function that returns (model, batch)"
)


@dataclass(frozen=True, eq=False)
class Trained:
    """A run that has ended: this rank's module, the losses of its steps, and the step that it began with."""

    model: ParallelModule
    losses: tuple[float, ...]
    first_step: int


def train(
    model: nn.Module | str | Callable[[], Any],
    plan: Plan,
    data: Any = None,
    *,
    dataset: Any = None,
    steps: int = 100,
    loss_fn: LossFn | None = None,
    weights: str | os.PathLike[str] | None = None,
    optimizer: str | Callable[..., torch.optim.Optimizer] | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    optimizer_form: str | None = None,
    lr: float | None = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 2,
    resume: bool = False,
    on_nan: str = "stop",
    timeout_s: float | None = None,
    metrics: str | os.PathLike[str] | None = None,
    on_step: Callable[[Event], None] | None = None,
) -> Trained:
    """Train `model` as `plan` says, on the ranks that exist; every rank calls this. A plan for one device needs no others.

    It is what `trainwright train` runs on each of its ranks. For a loop of your own (a learning-rate schedule, clipping,
    accumulation) take `parallelize`, which changes three lines of it.

    model: an `nn.Module`; or what the command line takes (`"zoo:gpt2"`, `"train.py:build"`), built as it was planned; or a
    function that returns `(model, batch)`, `(model, batch, loss_fn)` or a dict with those and `data` or `dataset`.
    data: an iterable of global batches, the same on every rank; or one batch, for every step. dataset: examples by index
    instead, in shuffled epochs. Neither: what `model` brings along, in the end its batch.
    steps: in all, those of a run that is resumed included.
    loss_fn: the one that the plan was made with, if any. weights: files of which each rank reads its part; see `parallelize`.
    optimizer: a name (`"adamw"`; default: the plan's, with the plan's options, groups and form), or a function or class, called
    with the parameters and, where it is given, `lr`.
    optimizer_options, optimizer_form: as for `plan`; what is given stands in place of the plan's, whose prediction is then of
    something else: a note says so.
    seed: of dropout, of shuffling, and of weights made here.
    checkpoint: a directory; written after every `checkpoint_every` steps and after the last, the newest `keep` stay.
    resume: go on from the newest checkpoint.
    on_nan: `"stop"`, `"skip"` or `"raise"` when the loss or a gradient is not finite; the weights never see such a step.
    timeout_s: seconds that a rank may be at one thing before the run ends and says at which; None: no limit.
    metrics: a file that gets a line of JSON a step. on_step: called on every rank with that line as a dict.

    Raises `UserError` when the plan is not this model's or the ranks are not the plan's, and `Refusal` when the loss is not
    finite.

    >>> import torch
    >>> import trainwright as tw
    >>> model, x = torch.nn.Linear(3, 1), torch.ones(2, 3)
    >>> loss_fn = lambda output, batch: output.square().mean()
    >>> plan = tw.plan(model, (x,), loss_fn=loss_fn, hardware="cpu:1", optimizer="sgd")
    >>> run = tw.train(model, plan, (x,), loss_fn=loss_fn, steps=3, lr=0.1)
    >>> len(run.losses), run.losses[2] < run.losses[0]
    (3, True)
    """
    from .cli.saving import SavePolicy
    from .launch import emit, rank
    from .runtime.module import parallelize

    _check(steps, data, dataset, checkpoint, checkpoint_every, resume)
    loaded = _loaded(model, plan, data, dataset)
    loss_fn = loss_fn or loaded.loss_fn
    make, notes, take = _maker(plan, optimizer, optimizer_options, optimizer_form, loaded, loss_fn)
    for note in notes if rank() == 0 else ():
        emit({"kind": "note", "text": note})
    module = parallelize(loaded.model, plan, weights, loss_fn=loss_fn, seed=seed)
    return run(
        module.train(),
        make(module, lr),
        lambda first: batches(loaded, plan, first, seed),
        steps=steps,
        saving=SavePolicy(None if checkpoint is None else str(checkpoint), checkpoint_every, keep, resume=resume),
        take=take,
        metrics=None if metrics is None else str(metrics),
        on_nan=on_nan,
        timeout_s=timeout_s,
        on_step=on_step or (lambda event: None),
    )


def run(
    module: ParallelModule,
    optimizer: torch.optim.Optimizer,
    batches_from: Callable[[int], Iterable[Any]],
    *,
    steps: int,
    saving: SavePolicy,
    sampler: Any = None,
    metrics: str | None = None,
    tensorboard: str | None = None,
    on_nan: str = "stop",
    timeout_s: float | None = None,
    trace: StepTrace | None = None,
    take: Any = None,
    on_step: Callable[[Event], None] = lambda event: None,
) -> Trained:
    """Train a planned module up to step `steps` with checkpoints and records: what Python and the command line share.

    batches_from(first_step): the global batches from the step on at which a resumed run goes on. sampler: something with
    `state_dict`, saved with the run. take: what runs a step, where gradients alone are not enough (`step_of`).
    """
    from .cli.records import Records
    from .cli.saving import Saving
    from .launch import emit, rank
    from .runtime.train import train_loop

    checkpoints = Saving(saving, module, optimizer, steps, sampler)
    first = checkpoints.first_step
    records = Records(metrics, tensorboard, first) if rank() == 0 else None
    if rank() == 0 and first > 0:
        emit({"kind": "resumed", "step": first})

    def tell(event: Event) -> None:
        on_step(event)
        if records is not None:
            records.write(event)

    with checkpoints:
        losses = train_loop(
            module, optimizer, batches_from(first), steps=steps, first_step=first, on_step=tell,
            after_step=checkpoints.after_step, on_nan=on_nan, timeout_s=timeout_s, trace=trace,
            take=take,
        )  # fmt: skip
    return Trained(module, tuple(losses), first)


def batches(loaded: Loaded, plan: Plan, first: int, seed: int) -> Iterator[Any]:
    """Return the global batches of a model from step `first` on: its data, its examples in shuffled epochs, or its batch."""
    from .launch import emit, rank
    from .runtime.examples import ExampleBatches

    if loaded.data is not None:
        return itertools.islice(iter(loaded.data), first, None)
    if loaded.dataset is not None:
        return iter(ExampleBatches(plan, loaded.dataset, seed=seed, first_step=first))
    if rank() == 0:
        emit({"kind": "note", "text": "no data was given: every step trains on the same batch"})
    return itertools.repeat(loaded.batch)


def _check(steps: int, data: Any, dataset: Any, checkpoint: Any, every: int | None, resume: bool) -> None:
    if not isinstance(steps, int) or steps < 1:
        raise UserError(f"a number of steps is needed, 1 or more; got {steps!r}; try steps=100")
    if checkpoint is None and (every is not None or resume):
        given = "resume" if resume else "checkpoint_every"
        raise UserError(f"{given} needs the directory of the checkpoints; got none; add checkpoint=DIR")
    if data is not None and dataset is not None:
        raise UserError("one source of batches is needed; got data and dataset; leave one of them out")


def _loaded(model: Any, plan: Plan, data: Any, dataset: Any) -> Loaded:
    """What `model` stands for, with the data of the call in place of its own."""
    from torch import nn

    from .capture.targets import called
    from .cli.model import ModelOptions, as_planned

    if isinstance(model, nn.Module):
        if data is None and dataset is None:
            raise UserError(
                "data to train on is needed beside a model; got none; give data=BATCHES or dataset=EXAMPLES"
            )
        loaded = called(lambda: (model, {}))
    elif isinstance(model, str):
        loaded = as_planned(plan, ModelOptions(model)).load(device="cpu")
    elif callable(model):
        loaded = called(model)
    else:
        raise UserError(f"a model is needed as {MODEL_FORMS}; got {type(model).__name__}")
    if data is None and dataset is None:
        return loaded
    return replace(loaded, dataset=dataset, data=itertools.repeat(data) if _is_batch(data) else data)


def _is_batch(data: Any) -> bool:
    """Whether `data` is one batch: a dict, a tensor, or a tuple that begins with one."""
    import torch

    return isinstance(data, Mapping | torch.Tensor) or (isinstance(data, tuple) and isinstance(data[0], torch.Tensor))


def optimizer_of(
    plan: Plan,
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
    form: str | None = None,
    model: nn.Module | None = None,
) -> tuple[Chosen, list[str]]:
    """Return the optimizer that a run takes, the plan's where nothing else is said, and what is not as the plan priced it.

    model: whose parameters are grouped anew for an optimizer other than the plan's. Raises `UserError` for what cannot run.
    """
    from . import optim

    if name is None or optim.record(name).name == plan.optimizer:
        merged = {**plan.optimizer_options, **(options or {})}
        chosen = replace(
            optim.choose(plan.optimizer, merged, form or plan.optimizer_form), groups=plan.optimizer_groups
        )
    else:
        chosen = optim.choose(name, options, form, model)
    optim.check_runs(chosen, plan)
    return chosen, _contradictions(plan, chosen)


def _contradictions(plan: Plan, chosen: Chosen) -> list[str]:
    own = chosen.fields()
    if own["optimizer"] != plan.optimizer:
        what = f"the plan was priced for {plan.optimizer}, and {own['optimizer']} runs"
    else:
        names = sorted({*own["optimizer_options"], *plan.optimizer_options})
        told = [
            f"{_said(plan.optimizer_options, name)}, and {_said(own['optimizer_options'], name)} runs"
            for name in names
            if own["optimizer_options"].get(name) != plan.optimizer_options.get(name)
        ]
        if own["optimizer_form"] != plan.optimizer_form:
            told.append(f"the form {plan.optimizer_form}, and {own['optimizer_form']} runs")
        what = f"the plan was priced for {plan.optimizer} with {'; '.join(told)}" if told else ""
    return [f"{what}: its step and its peak are predicted for another update; plan with what is to run"] if what else []


def _said(options: Mapping[str, Any], name: str) -> str:
    return f"{name}={options[name]}" if name in options else f"{name} as by default"


Maker = Callable[..., Any]


def step_of(chosen: Chosen, model: nn.Module, loss_fn: LossFn | None) -> Any:
    """Return what runs one step of an optimizer that takes the loss with its graph; None for one that takes gradients."""
    from .capture.call import loss_of
    from .optim.chosen import WANTS
    from .runtime.closures import ClosureStep

    if not chosen.needs_loss:
        return None
    twice = any(extra.kind == "hessian_vector" for extra in chosen.extra_passes)
    wants: Any = WANTS.get(chosen.name, "loss")
    return ClosureStep(wants, twice, lambda batch, output: loss_of(model, batch, loss_fn, output))


def _maker(
    plan: Plan, optimizer: Any, options: Any, form: str | None, loaded: Loaded, loss_fn: LossFn | None
) -> tuple[Maker, list[str], Any]:
    """What makes the run's optimizer of a module and a learning rate, what contradicts the plan, and what runs a step."""
    if optimizer is None or isinstance(optimizer, str):
        chosen, notes = optimizer_of(plan, optimizer, options, form, loaded.model)
        return (lambda module, lr: made(chosen, module, lr)), notes, step_of(chosen, loaded.model, loss_fn)
    if options or form:
        raise UserError(
            "the name of an optimizer is needed for optimizer_options and optimizer_form; got a function; set them in it"
        )
    return (lambda module, lr: optimizer(module.parameters(), **({} if lr is None else {"lr": lr}))), [], None


def made(chosen: Chosen, module: ParallelModule, lr: float | None = None) -> torch.optim.Optimizer:
    """Return the optimizer over the parameters of a planned module."""
    return chosen.make(module.named_parameters(), lr, module.user_shapes)
