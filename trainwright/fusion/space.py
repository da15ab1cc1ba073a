"""The space of a sweep: for each setting a value, some values, or a range; read from text, sampled by Optuna."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..artifacts import UserError

SAMPLERS = ("random", "tpe", "qmc")
PRUNERS = ("none", "asha", "hyperband", "median")


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included: whole ones where both are, on a log scale on demand."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and self.low <= 0):
            raise UserError(
                f"a range needs low < high, and low > 0 on a log scale; got {self.low}..{self.high}{':log' if self.log else ''}; "
                "write for example 1e-4..1e-1:log"
            )

    @property
    def whole(self) -> bool:
        """True where the numbers are whole."""
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclass(frozen=True)
class Choice:
    """One of some values."""

    values: tuple[Any, ...]


def parse_space(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return ranges, choices and values as `--set KEY=TEXT` writes them.

    >>> parse_space({"lr": "1e-4..1e-1:log", "width": "8,16", "depth": "2", "layers": "1..3"})
    {'lr': Range(low=0.0001, high=0.1, log=True), 'width': Choice(values=(8, 16)), 'depth': 2,
     'layers': Range(low=1, high=3, log=False)}
    """
    return {key: _parsed(key, text) for key, text in settings.items()}


def _parsed(key: str, text: str) -> Any:
    body, _, scale = text.partition(":")
    low, dots, high = body.partition("..")
    if dots:
        ends = (_literal(low), _literal(high))
        if scale not in ("", "log", "linear") or not all(type(end) in (int, float) for end in ends):
            raise UserError(
                f"a range of {key} is needed as LOW..HIGH or LOW..HIGH:log; got {text!r}; write for example 1e-4..1e-1:log"
            )
        return Range(*ends, log=scale == "log")
    if "," in text and not text.lstrip().startswith(("[", "{")):
        return Choice(tuple(_literal(each) for each in text.split(",")))
    return _literal(text)


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text.strip())


def study(sampler: str, pruner: str, seed: int, min_steps: int, steps: int, eta: int) -> Any:
    """Return an Optuna study that minimises, with the sampler and pruner of these names."""
    optuna = _optuna()
    if sampler not in SAMPLERS or pruner not in PRUNERS:
        raise UserError(
            f"a sampler is one of {', '.join(SAMPLERS)}, a pruner one of {', '.join(PRUNERS)}; got {sampler} and {pruner}; "
            "choose those"
        )
    samplers = {
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
        "tpe": lambda: optuna.samplers.TPESampler(seed=seed, constant_liar=True, n_startup_trials=8),
        "qmc": lambda: optuna.samplers.QMCSampler(seed=seed, scramble=True, warn_independent_sampling=False),
    }
    pruners = {
        "none": optuna.pruners.NopPruner,
        "asha": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=min_steps, reduction_factor=eta),
        "hyperband": lambda: optuna.pruners.HyperbandPruner(
            min_resource=min_steps, max_resource=steps, reduction_factor=eta
        ),
        "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=min_steps),
    }
    return optuna.create_study(sampler=samplers[sampler](), pruner=pruners[pruner]())


def distributions(space: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Optuna samples from: of the ranges and choices alone."""
    found = _optuna().distributions
    sampled: dict[str, Any] = {}
    for key, value in space.items():
        if isinstance(value, Choice):
            sampled[key] = found.CategoricalDistribution(value.values)
        elif isinstance(value, Range):
            kind = found.IntDistribution if value.whole else found.FloatDistribution
            sampled[key] = kind(value.low, value.high, log=value.log)
    return sampled


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError("Optuna is needed for a sweep; it is not installed; pip install 'trainwright[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
