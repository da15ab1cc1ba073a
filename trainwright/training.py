"""Training on the ranks that exist: `tw.train` in Python, and what each rank of `trainwright train` runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .artifacts import Plan, UserError

if TYPE_CHECKING:
    import os

    import torch
    from torch import Tensor, nn

    from .cli.saving import SavePolicy
    from .growing import GrowthOptions
    from .models.targets import Loaded
    from .optim.chosen import Chosen
    from .runtime import HeldOut, ParallelModule, TierOptions
    from .runtime.training.tracing import StepTrace
    from .scheduling import ScheduleOptions
    from .sync import Sync
    from .syncing import Dealt

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
    schedule: str = "constant",
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    norms: str | os.PathLike[str] | None = None,
    eval_data: Any = None,
    eval_every: int | None = None,
    grow_batch: int | None = None,
    grow_every: int = 10,
    grow_eta: float = 0.5,
    sync: str | None = None,
    sync_options: Mapping[str, Any] | None = None,
    replicas: int | None = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    keep: int = 2,
    resume: bool = False,
    on_nan: str = "stop",
    on_imbalance: str = "warn",
    timeout_s: float | None = None,
    metrics: str | os.PathLike[str] | None = None,
    on_step: Callable[[Event], None] | None = None,
    tier: TierOptions | None = None,
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
    schedule: of the learning rate, whose peak is `lr`: `"constant"`, `"linear"` (the one to begin with), `"cosine"`, `"wsd"`
    (constant, then linear in the last `decay_steps`, a fifth by default), `"refined"` by the gradient norms of an earlier run,
    whose metrics file `norms` is, or `"lanczos"` by the curvature, for SGD. warmup_steps: over which the rate rises first.
    eval_data: a global batch, or several, that are not trained on (default: the model's `eval_batch`); the mean of their losses
    is told after every `eval_every` steps and after the last.
    grow_batch: up to so many planned batches to a step, as the noise of the gradient asks for: every `grow_every` steps the
    gradient of each example is measured, and the noise is to be at most `grow_eta` of the gradient (for AdAdaGrad).
    sync: the name of a method by which replicas of the plan exchange (`trainwright sync` lists them), with sync_options, instead
    of summing gradients. replicas: how many there are, each on the plan's ranks; default: as many as the ranks make up. A step
    takes one batch a replica, in their order; all replicas hold the same parameters when the run has ended.
    seed: of dropout, of shuffling, and of weights made here.
    checkpoint: a directory; written after every `checkpoint_every` steps and after the last, the newest `keep` stay.
    resume: go on from the newest checkpoint.
    on_nan: `"stop"`, `"skip"` or `"raise"` when the loss or a gradient is not finite; the weights never see such a step.
    on_imbalance: `"warn"`, `"stop"`, `"rerun"` (in pieces, so that the peak holds) or `"drop"` (the rows beyond) when a rank's
    experts are sent more rows than the plan allows for (`expert_imbalance`).
    timeout_s: seconds that a rank may be at one thing before the run ends and says at which; None: no limit.
    metrics: a file that gets a line of JSON a step. on_step: called on every rank with that line as a dict.
    tier: the disks on which parameters, gradients and optimizer states rest (docs/tiers.md); they have every step whole, in
    place of checkpoints. Or the host's memory, which a plan that was made for it needs not be told.

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
    from .growing import GrowthOptions
    from .launch import emit, rank, world_size
    from .runtime.module import parallelize
    from .runtime.pipe import refuse_stages
    from .runtime.tiered.tier import resting
    from .scheduling import ScheduleOptions
    from .syncing import SyncOptions, check_replicas

    _check(steps, data, dataset, checkpoint, checkpoint_every, resume)
    with built_on(tier):
        loaded = _loaded(model, plan, data, dataset)
    loss_fn = loss_fn or loaded.loss_fn
    make, notes, take = _maker(plan, optimizer, optimizer_options, optimizer_form, loaded, loss_fn)
    for note in notes if rank() == 0 else ():
        emit({"kind": "note", "text": note})
    number = check_replicas(replicas, plan, None if sync is None else max(plan.num_ranks, world_size()), sync)
    if sync is not None:
        refuse_stages(plan, "replicas that exchange by a sync method")
    exchange = None if sync is None else SyncOptions(sync, sync_options or {})
    if exchange is not None:
        beside = () if grow_batch is None else ("grow_batch",)
        name = plan.optimizer if optimizer is None else optimizer if isinstance(optimizer, str) else None
        exchange.check(plan, name, take is not None, beside)
    extras = Extras(
        ScheduleOptions(schedule, warmup_steps, decay_steps, None if norms is None else str(norms)),
        None if eval_every is None and eval_data is None else held_out(loaded, eval_data, eval_every),
        None if grow_batch is None else GrowthOptions(grow_batch, grow_every, grow_eta),
    )
    extras.check(plan, steps, optimizer if isinstance(optimizer, str) else None, take)
    _check_beside_tier(resting(plan, tier), checkpoint, grow_batch, sync, take, schedule, on_nan)
    module = parallelize(loaded.model, plan, weights, loss_fn=loss_fn, seed=seed, replicas=number, tier=tier)
    stepping = make(module, lr)
    return run(
        module.train(),
        stepping,
        lambda first: batches(loaded, plan, first, seed),
        steps=steps,
        saving=SavePolicy(None if checkpoint is None else str(checkpoint), checkpoint_every, keep, resume=resume),
        take=take,
        extras=extras,
        sync=None if exchange is None else exchange.make(module, stepping),
        metrics=None if metrics is None else str(metrics),
        on_nan=on_nan,
        on_imbalance=on_imbalance,
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
    on_imbalance: str = "warn",
    timeout_s: float | None = None,
    trace: StepTrace | None = None,
    take: Any = None,
    extras: Extras | None = None,
    sync: Sync | None = None,
    on_step: Callable[[Event], None] = lambda event: None,
) -> Trained:
    """Train a planned module up to step `steps` with checkpoints and records: what Python and the command line share.

    batches_from(first_step): the global batches from the step on at which a resumed run goes on. sampler: something with
    `state_dict`, saved with the run. extras: schedule, held-out loss and growth. take: what runs a step, where gradients
    alone are not enough (`step_of`). sync: by which this replica of the plan exchanges with the others, in each step and at the
    end, after the last checkpoint: what the replicas have then agreed upon is saved beside theirs.
    """
    from .cli.records import Records
    from .cli.saving import Saving
    from .launch import emit, rank
    from .runtime.training.train import train_loop

    extras = extras or Extras()
    schedule, growth = extras.schedule_of(optimizer, module.plan, steps), extras.growth_of(module)
    dealt = None if sync is None else _dealt(sync, module, batches_from)
    if module.tier is None or not module.tier.policy.commits:
        if module.tier is not None:
            module.tier.attach(optimizer)
        checkpoints: Any = Saving(saving, module, optimizer, steps, sampler or growth or dealt, schedule, sync)
    else:
        from .runtime.tiered.saving import TierSaving

        checkpoints = TierSaving(module, optimizer, steps, schedule)
    first = checkpoints.first_step
    if dealt is not None and sync is not None:
        from .syncing import SyncStep

        take = SyncStep(sync, dealt)
    records = Records(metrics, tensorboard, first) if rank() == 0 else None
    if rank() == 0:
        emit({"kind": "begun", "step": first})

    def tell(event: Event) -> None:
        on_step(event)
        if records is not None:
            records.write(event)

    with checkpoints:
        losses = train_loop(
            module, optimizer, dealt or batches_from(first if growth is None else growth.num_batches),
            steps=steps, first_step=first, on_step=tell,
            after_step=checkpoints.after_step, on_nan=on_nan, on_imbalance=on_imbalance, timeout_s=timeout_s, trace=trace,
            take=take, schedule=schedule, growth=growth, held_out=extras.held_out,
            norms=gradient_norms if metrics is not None or tensorboard is not None else None,
        )  # fmt: skip
    if sync is not None:
        sync.finish()
        checkpoints.save_finished(first + len(losses) - 1)
    return Trained(module, tuple(losses), first)


def _dealt(sync: Sync, module: ParallelModule, batches_from: Callable[[int], Iterable[Any]]) -> Dealt:
    """Return the batches of this replica."""
    from .syncing import Dealt

    return Dealt(batches_from, getattr(sync.method, "num_chunks", sync.method.worker.size), module.replicas.index)


@dataclass(frozen=True)
class Extras:
    """What a run does beside its steps."""

    schedule: ScheduleOptions | None = None
    held_out: HeldOut | None = None
    growth: GrowthOptions | None = None

    def check(self, plan: Plan, steps: int, optimizer: str | None, take: Any = None) -> None:
        """Raise `UserError` for what cannot be done under a plan, before anything runs."""
        from .scheduling import check_schedule

        if self.schedule is not None:
            check_schedule(self.schedule, plan, steps, optimizer or plan.optimizer)
        self._check_stages(plan, take)
        if self.growth is not None and take is not None:
            raise UserError(
                "an optimizer that steps on gradients is needed for batches that grow; this one takes the loss itself; take "
                "adadagrad or adamw"
            )
        for batch in self.held_out.batches if self.held_out is not None else ():
            _check_fits(plan, batch)

    def _check_stages(self, plan: Plan, take: Any) -> None:
        """Refuse what looks at the whole model at once where a plan has pipeline stages."""
        from .runtime.pipe import refuse_stages

        if take is not None:
            refuse_stages(plan, "an optimizer that takes the loss itself")
        if self.growth is not None:
            refuse_stages(plan, "batches that grow")
        if self.schedule is not None and self.schedule.name == "lanczos":
            refuse_stages(plan, "the schedule lanczos")

    def schedule_of(self, optimizer: torch.optim.Optimizer, plan: Plan, steps: int) -> Any:
        """Return what the loop calls around each step; None for a constant rate."""
        from .scheduling import Schedule

        options = self.schedule
        if options is None or (options.name == "constant" and not options.warmup_steps):
            return None
        return Schedule(options, optimizer, steps, _name_of(optimizer, plan))

    def growth_of(self, module: ParallelModule) -> Any:
        """Return what says how many batches a step takes; None where it is always one."""
        from .artifacts.plan import names_of_batch
        from .growing import Growth

        if self.growth is None:
            return None
        shapes = {name: entry.shape for name, entry in module.plan.batch.items()}
        return Growth(self.growth, module, next(shapes[name][0] for name in names_of_batch(shapes)))


def held_out(loaded: Loaded, data: Any, every: int | None) -> HeldOut:
    """Return the held-out loss of a run, on `data` or on the model's own `eval_batch`; `UserError` where there is neither."""
    from .runtime.training.train import HeldOut

    if every is None:
        raise UserError("the number of steps between held-out losses is needed; got none; give eval_every=N")
    if not isinstance(every, int) or every < 1:
        raise UserError(f"a number of steps between held-out losses is needed, 1 or more; got {every!r}; try 100")
    if data is None:
        data = loaded.eval_batch
    if data is None:
        raise UserError(
            "data that is not trained on is needed for a held-out loss; got none; return an eval_batch with the model, or give "
            "eval_data"
        )
    found = (data,) if _is_batch(data) else tuple(data)
    if not found:
        raise UserError("at least one batch is needed for a held-out loss; got none; give some")
    return HeldOut(found, every)


def gradient_norms(gradients: list[Tensor], added: Callable[[float], float] = lambda own: own) -> dict[str, float]:
    """Return the ℓ2 and the ℓ1 norm of all gradients together, by the names that metrics give them; a collective call.

    added: adds a number up over pipeline stages, of which each has gradients of its own.
    """
    from .numerics.norms import total_norm
    from .scheduling import NORMS

    def norm(order: int) -> float:
        own = float(total_norm(gradients, order)) if gradients else 0.0
        return float(added(own**order) ** (1 / order))

    return {name: norm(order) for order, name in NORMS.items()}


def _name_of(optimizer: torch.optim.Optimizer, plan: Plan) -> str:
    """The name of an optimizer's record; the plan's for one without."""
    from .arguments import as_optimizer_name

    try:
        return as_optimizer_name(optimizer)
    except UserError:
        return plan.optimizer


def _check_fits(plan: Plan, batch: Any) -> None:
    """Raise `UserError` for a held-out batch that the plan cannot run."""
    from .capture.export import as_batch
    from .runtime.entries import check_within
    from .torch_internals.private import flatten_batch

    shapes = {name: tuple(leaf.shape) for name, leaf in flatten_batch(as_batch(batch))[0] if hasattr(leaf, "shape")}
    if shapes.keys() != plan.batch.keys():
        raise UserError(
            f"a held-out batch with the entries of the plan's, {', '.join(plan.batch)}, is needed; got {', '.join(shapes)}; "
            "make it like the batch"
        )
    check_within(plan, shapes)


def batches(loaded: Loaded, plan: Plan, first: int, seed: int) -> Iterator[Any]:
    """Return the global batches of a model from step `first` on: its data, its examples in shuffled epochs, or its batch."""
    from .launch import emit, rank
    from .runtime.training.examples import ExampleBatches

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


def _check_beside_tier(
    tier: TierOptions | None, checkpoint: Any, grow_batch: Any, sync: Any, take: Any, schedule: str, on_nan: str
) -> None:
    """Refuse what reads all gradients, or keeps steps elsewhere, where parameters rest on a tier."""
    if tier is None:
        return
    beside = {
        "checkpoint": checkpoint is not None and not tier.host, "grow_batch": grow_batch is not None, "sync": sync is not None,
        "an optimizer that takes the loss": take is not None, "the schedule lanczos": schedule == "lanczos",
        "on_nan='skip' beside commit_every": on_nan == "skip" and tier.policy().commit_every > 1,
        "on_nan='skip' beside updates during the backward": on_nan == "skip" and tier.host and tier.policy().update == "during",
    }  # fmt: skip
    has = "keeps no gradient" if tier.host else "has every step whole and keeps no gradient"
    for name, is_given in beside.items():
        if is_given:
            raise UserError(f"a run without {name} is needed with a tier, which {has}; leave it out")


def built_on(tier: TierOptions | None) -> AbstractContextManager[None]:
    """Let parameters of a model that is built lie in files on the disks on which they rest later; memory need not hold them."""
    from .tiers import check_folders, parameters_in_files

    return nullcontext() if tier is None or tier.host else parameters_in_files(check_folders(tier.folders)[0])


def _loaded(model: Any, plan: Plan, data: Any, dataset: Any) -> Loaded:
    """What `model` stands for, with the data of the call in place of its own."""
    from torch import nn

    from .cli.model import ModelOptions, as_planned
    from .models.targets import called

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
    from .optim.options import without_groups

    if name is None or optim.record(name).name == plan.optimizer:
        grouped, given = without_groups(optim.record(plan.optimizer), options)
        merged = {**plan.optimizer_options, **given}
        groups = plan.optimizer_groups if grouped else ()
        chosen = replace(optim.choose(plan.optimizer, merged, form or plan.optimizer_form), groups=groups)
    else:
        chosen = optim.choose(name, options, form, model, plan.cluster.device.kind)
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
        if own["optimizer_groups"] != plan.optimizer_groups:
            told.append("groups of its own, and all parameters alike run")
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
    wants: Any = WANTS.get(chosen.name, "loss")
    return ClosureStep(wants, chosen.differentiates_twice, lambda batch, output: loss_of(model, batch, loss_fn, output))


def _maker(
    plan: Plan, optimizer: Any, options: Any, form: str | None, loaded: Loaded, loss_fn: LossFn | None
) -> tuple[Maker, list[str], Any]:
    """What makes the run's optimizer of a module and a learning rate, what contradicts the plan, and what runs a step."""
    from .runtime.pipe import refuse_stages

    if optimizer is None or isinstance(optimizer, str):
        chosen, notes = optimizer_of(plan, optimizer, options, form, loaded.model)
        if chosen.record.reads == "model":
            refuse_stages(plan, f"{chosen.record.name}, whose update of a weight reads the whole model")
        return (lambda module, lr: made(chosen, module, lr)), notes, step_of(chosen, loaded.model, loss_fn)
    if options or form:
        raise UserError(
            "the name of an optimizer is needed for optimizer_options and optimizer_form; got a function; set them in it"
        )
    return (lambda module, lr: optimizer(module.parameters(), **({} if lr is None else {"lr": lr}))), [], None


def made(chosen: Chosen, module: ParallelModule, lr: float | None = None) -> torch.optim.Optimizer:
    """Return the optimizer over the parameters of a planned module."""
    return chosen.make(module.named_parameters(), lr)
