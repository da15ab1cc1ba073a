"""`sweep`: trials of a search, trained as fused models.

ask      a wave of trials: as many as fit           Optuna's sampler
build    a model each; those of one shape together  `fusible`
train    each set as one fused model; what the pruner stops leaves the array, which is smaller from then on
tell     the values, from which the next wave is drawn
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts import UserError, check_range
from ..models.targets import Loaded, called
from ..torch_internals.private import flatten
from .alike import fusible
from .model import FusedModel, fuse
from .optimizer import optimizer as fused_optimizer
from .space import Range, distributions, study  # noqa: F401  # Range: of the example

Build = Callable[..., Any]
Progress = Callable[[list["Trial"]], None]


@dataclass
class Trial:
    """One run of a sweep: its settings, and how it ended."""

    number: int
    settings: dict[str, Any]
    state: str = "waiting"
    """`waiting`, `running`, `done`, `pruned` or `diverged`."""
    steps: int = 0
    loss: float = math.nan
    """The loss of the evaluation batch where there is one, else the mean of the training loss since the last report."""
    group: int = 0
    """Which fused model it was part of."""

    def row(self) -> dict[str, Any]:
        """Return the trial as a row of a table."""
        return {
            "trial": self.number,
            **self.settings,
            "steps": self.steps,
            "loss": self.loss,
            "state": self.state,
            "array": self.group,
        }


@dataclass(frozen=True)
class SweepOptions:
    """The settings of a sweep's run.

    trials: how many. steps: of training, each. optimizer: by name. sampler: `random`, `tpe` or `qmc`; pruner: `none`, `asha`,
    `hyperband` or `median`, asked every `min_steps` steps, which keep one trial in `eta`. at_once: how many models one fused
    model holds at most; all by default. clip: the largest gradient norm of a model. seed: of the sampler; trial i's model and
    random stream have seed + i, unless `seed` is searched.
    """

    trials: int = 16
    steps: int = 100
    optimizer: str = "adamw"
    sampler: str = "random"
    pruner: str = "none"
    min_steps: int = 10
    eta: int = 3
    at_once: int | None = None
    clip: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one = ("of at least 1", lambda value: value >= 1)
        check_range(
            "a sweep", trials=(self.trials, *at_least_one), steps=(self.steps, *at_least_one),
            min_steps=(self.min_steps, *at_least_one), eta=(self.eta, "of at least 2", lambda value: value >= 2),
            at_once=(self.at_once, "of at least 1", lambda value: value is None or value >= 1),
        )  # fmt: skip


@dataclass
class Sweep:
    """The result of `sweep`: all trials, and the trained model of the best."""

    trials: list[Trial]
    best: Trial
    model: nn.Module = field(repr=False)
    num_arrays: int = 0

    def rows(self) -> list[dict[str, Any]]:
        """Return a row a trial, the best first."""
        return [trial.row() for trial in sorted(self.trials, key=_rank)]


def sweep(
    build: Build, space: Mapping[str, Any], options: SweepOptions | None = None, *, progress: Progress | None = None
) -> Sweep:  # fmt: skip
    """Search settings by training many models at once; trials of one shape train as one fused model.

    build: called with the settings that it has parameters for; returns what MODEL functions return: `(model, batch)`,
    `(model, batch, loss_fn)` or a dict with `model`, `batch`, `loss_fn`, `data` (batches) or `dataset` (examples), and
    `eval_batch`; trials of a set see the same batches, those of the first. space: by setting a `Range`, a `Choice`, or a
    value; what `build` has no parameter for is the optimizer's. progress: called with all trials after each report.

    Trials of other shapes (a searched width) form fused models of their own, one after the other. Raises `UserError` for a
    setting that neither takes, and where every trial diverged.

    >>> import importlib.util
    >>> def build(width=4):
    ...     torch.manual_seed(0)
    ...     return nn.Linear(3, 1), (torch.ones(8, 3), torch.ones(8, 1)), nn.MSELoss()
    >>> options = SweepOptions(trials=4, steps=5, optimizer="sgd")
    >>> found = sweep(build, {"lr": Range(1e-4, 0.3, log=True)}, options) if importlib.util.find_spec("optuna") else None
    >>> found is None or len(found.rows()) == 4
    True
    """
    chosen = options or SweepOptions()
    return _Run(build, dict(space), chosen, progress or (lambda _: None)).run()


def _rank(trial: Trial) -> tuple[int, float]:
    """The best first: those that are done by their loss, then the pruned, the longest first, then the diverged."""
    order = {"done": 0, "pruned": 1}.get(trial.state, 2)
    return order, trial.loss if order == 0 else -trial.steps


class _Run:
    def __init__(
        self, build: Build, space: dict[str, Any], options: SweepOptions, progress: Callable[[list[Trial]], None]
    ) -> None:
        self.build, self.space, self.options, self.progress = build, space, options, progress
        self.trials: list[Trial] = []
        self.best: tuple[Trial, nn.Module] | None = None
        self.num_arrays = 0
        self.study = study(options.sampler, options.pruner, options.seed, options.min_steps, options.steps, options.eta)
        self._asked: dict[int, Any] = {}

    def run(self) -> Sweep:
        while len(self.trials) < self.options.trials:
            self._wave(min(self.options.at_once or self.options.trials, self.options.trials - len(self.trials)))
        if self.best is None:
            raise UserError(
                "a trial whose loss is finite is needed; all diverged; search smaller learning rates, or give clip"
            )
        best, model = self.best
        return Sweep(self.trials, best, model, self.num_arrays)

    def _wave(self, size: int) -> None:
        wave = [self._asked_for() for _ in range(size)]
        built = [self._built(trial) for trial in wave]
        for numbers in fusible([each.model for each in built]):
            self.num_arrays += 1
            for at in numbers:
                wave[at].group, wave[at].state = self.num_arrays, "running"
            _Array(self, [wave[at] for at in numbers], [built[at] for at in numbers]).train()

    def _asked_for(self) -> Trial:
        asked = self.study.ask(distributions(self.space))
        fixed = {key: value for key, value in self.space.items() if key not in asked.params}
        trial = Trial(len(self.trials), {**fixed, **asked.params})
        self._asked[trial.number] = asked
        self.trials.append(trial)
        return trial

    def _built(self, trial: Trial) -> Loaded:
        own = {key: value for key, value in trial.settings.items() if key in parameters_of(self.build)}
        torch.manual_seed(self.seed_of(trial))
        made = self.build(**own)
        return made if isinstance(made, Loaded) else called(lambda: made)

    def seed_of(self, trial: Trial) -> int:
        return int(trial.settings.get("seed", self.options.seed + trial.number))

    def optimizer_settings(self, trials: Sequence[Trial]) -> dict[str, list[Any]]:
        own = {*parameters_of(self.build), "seed"}
        names = [key for key in trials[0].settings if key not in own]
        return {key: [_as_value(trial.settings[key]) for trial in trials] for key in names}

    def report(self, trial: Trial, loss: float, steps: int) -> bool:
        """Note a trial's loss; return whether it goes on."""
        trial.loss, trial.steps = loss, steps
        if not math.isfinite(loss):
            return self.end(trial, "diverged")
        self._asked[trial.number].report(loss, steps)
        if steps >= self.options.steps:
            return self.end(trial, "done")
        return not self._asked[trial.number].should_prune() or self.end(trial, "pruned")

    def end(self, trial: Trial, state: str) -> bool:
        from optuna.trial import TrialState

        trial.state = state
        states = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "diverged": TrialState.FAIL}
        values = {"values": trial.loss} if state == "done" else {}
        self.study.tell(self._asked[trial.number], state=states[state], **values)
        return False


class _Array:
    """Trials of one shape, as one fused model that shrinks as they end."""

    def __init__(self, run: _Run, trials: list[Trial], built: list[Loaded]) -> None:
        self.run, self.trials, self.loaded = run, trials, built[0]
        self.fused: FusedModel = fuse([each.model for each in built], seeds=[run.seed_of(trial) for trial in trials])
        own = run.optimizer_settings(trials)
        self.optimizer = fused_optimizer(run.options.optimizer, self.fused, clip=run.options.clip, on_nan="stop", **own)

    def train(self) -> None:
        options, batches = self.run.options, _batches(self.loaded, self.run.options.seed)
        for begin in range(0, options.steps, options.min_steps):
            steps = min(options.min_steps, options.steps - begin)
            mean = sum((self._step(next(batches)) for _ in range(steps)), torch.zeros(())) / steps
            self._report(mean, begin + steps)
            if not self.trials:
                return

    def _step(self, batch: Any) -> Tensor:
        self.optimizer.zero_grad()
        losses = self.fused.loss(batch, self.loaded.loss_fn)
        losses.sum().backward()
        self.optimizer.step()
        return losses.detach()

    def _report(self, training: Tensor, step: int) -> None:
        losses = training if self.loaded.eval_batch is None else self._evaluated()
        runs = [math.isfinite(loss) and runs for loss, runs in zip(losses.tolist(), self.optimizer.running)]
        go_on = []
        for at, (trial, loss) in enumerate(zip(self.trials, losses.tolist())):
            on = self.run.report(trial, loss if runs[at] else math.nan, step)
            if trial.state == "done" and (self.run.best is None or trial.loss < self.run.best[0].loss):
                self.run.best = trial, self.fused.one(at)
            if on:
                go_on.append(at)
        self.run.progress(self.run.trials)
        if 0 < len(go_on) < len(self.trials):
            fewer = self.fused.keep(go_on)
            self.optimizer, self.fused = self.optimizer.keep(go_on, fewer), fewer
        self.trials = [self.trials[at] for at in go_on]

    @torch.no_grad()
    def _evaluated(self) -> Tensor:
        was_training = self.fused.training
        try:
            return self.fused.eval().loss(self.loaded.eval_batch, self.loaded.loss_fn)
        finally:
            self.fused.train(was_training)


def _batches(loaded: Loaded, seed: int) -> Iterator[Any]:
    """Yield the batches of the data, or of the shuffled dataset, again and again; without either, the one batch."""
    while True:
        yielded = False
        for batch in _epoch(loaded, seed):
            yield batch
            yielded = True
        if not yielded:
            raise UserError(
                "batches are needed to train on; data gave none, or none any more; return a list, not a generator"
            )
        seed += 1


def _epoch(loaded: Loaded, seed: int) -> Iterable[Any]:
    if loaded.data is not None:
        return loaded.data
    if loaded.dataset is None:
        return [loaded.batch]
    size = next(leaf.shape[0] for leaf in flatten(loaded.batch)[0] if isinstance(leaf, Tensor))
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.DataLoader(loaded.dataset, size, shuffle=True, drop_last=True, generator=generator)


def parameters_of(build: Build) -> Mapping[str, Any]:
    """Return the parameters of a function that builds a model."""
    import inspect

    return inspect.signature(build).parameters


def _as_value(value: Any) -> Any:
    """Return JSON's lists as the tuples that optimizers take."""
    return tuple(value) if isinstance(value, list) else value


def peak_of(models: Sequence[Loaded], optimizer: str, profile: Callable[..., Any]) -> int:
    """Return the peak of a step of these models fused, in bytes: without the batch, with the gradients that the update copies.

    profile: `trainwright.profile`; nothing is run.
    """
    fused, loaded = fuse([each.model for each in models]), models[0]
    found = profile(_Summed(fused, loaded), loaded.batch, optimizer=optimizer)
    return max(found.peak_bytes, found.param_bytes + found.optimizer_bytes + 2 * found.grad_bytes)


def how_many_fit(build: Callable[[], Loaded], optimizer: str, budget_bytes: int, profile: Callable[..., Any]) -> int:
    """Return how many models that `build` makes fit a budget as one fused model; `UserError` where not even one does.

    One and two models are profiled: each further one costs what the second did.
    """
    one = peak_of([build()], optimizer, profile)
    each = peak_of([build(), build()], optimizer, profile) - one
    if one > budget_bytes:
        raise UserError(
            f"memory for at least one model is needed; one takes {one} bytes, and there are {budget_bytes}; give more, or "
            "a smaller batch"
        )
    return 1 + (budget_bytes - one) // max(1, each)


class _Summed(nn.Module):
    def __init__(self, fused: FusedModel, loaded: Loaded) -> None:
        super().__init__()
        self.fused, self._loss_fn = fused, loaded.loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.fused.loss(kwargs or args, self._loss_fn).sum()


__all__ = ["Sweep", "SweepOptions", "Trial", "how_many_fit", "parameters_of", "peak_of", "sweep"]
