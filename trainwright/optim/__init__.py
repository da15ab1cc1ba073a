"""Optimizers by name, each with a record of what it costs."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

import torch

from ..artifacts import UserError
from . import (
    adabelief,
    adadagrad,
    adahessian,
    adam8bit,
    adan,
    clipped,
    clipped_adafactor,
    diffgrad,
    frugal_record,
    grad_norm_newton,
    lamb8bit,
    mfac,
    sgdsai,
    sign_methods,
    sophia,
    sso,
    torch_optimizers,
)
from .adabelief import AdaBelief
from .adadagrad import AdAdaGrad, AdAdaGradNorm
from .adahessian import AdaHessian
from .adam8bit import Adam8bit, AdamW8bit, SGD8bit
from .adan import Adan
from .base import Method, how_keywords
from .chosen import Chosen, check_runs, choose, class_for, of_plan
from .clipped import ClippedAdam, ClippedSGD
from .clipped_adafactor import ClippedAdafactor
from .diffgrad import DiffGrad
from .eight_bit import eight_bit_groups
from .frugal import FRUGAL
from .grad_norm_newton import GradNormSmoothNewton
from .lamb8bit import LAMB8bit
from .mezo import MeZO as MeZO  # not in __all__, whose optimizers plans can price
from .mfac import MFAC
from .mfac_inverse import MFACInverse, pruning_stages
from .mfac_pruning import Pruned, prune_model
from .one_trajectory import DirectionAt, compare_on_one_trajectory
from .record import ExtraPass, OptimizerRecord, StateTensor
from .sgdsai import SGDSaI
from .sharpness import directional_sharpness
from .sign_methods import Lion, NormalizedSGD, SignSGD
from .sophia import SophiaG, SophiaH, sampled_cross_entropy
from .sso import SSO

__all__ = [
    "FRUGAL",
    "MFAC",
    "SSO",
    "AdAdaGrad",
    "AdAdaGradNorm",
    "AdaBelief",
    "AdaHessian",
    "Adam8bit",
    "AdamW8bit",
    "Adan",
    "Chosen",
    "ClippedAdafactor",
    "ClippedAdam",
    "ClippedSGD",
    "DiffGrad",
    "DirectionAt",
    "ExtraPass",
    "GradNormSmoothNewton",
    "LAMB8bit",
    "Lion",
    "MFACInverse",
    "NormalizedSGD",
    "OptimizerRecord",
    "Pruned",
    "SGD8bit",
    "SGDSaI",
    "SignSGD",
    "SophiaG",
    "SophiaH",
    "StateTensor",
    "check_plannable",
    "check_runs",
    "choose",
    "compare_on_one_trajectory",
    "create",
    "directional_sharpness",
    "eight_bit_groups",
    "names",
    "of_plan",
    "prune_model",
    "pruning_stages",
    "record",
    "sampled_cross_entropy",
    "table",
]

_OWN = (
    adabelief.RECORD,
    adan.RECORD,
    diffgrad.RECORD,
    *adadagrad.RECORDS,
    *adam8bit.RECORDS,
    *clipped.RECORDS,
    clipped_adafactor.RECORD,
    *sign_methods.RECORDS,
    frugal_record.RECORD,
    lamb8bit.RECORD,
    sgdsai.RECORD,
    adahessian.RECORD,
    grad_norm_newton.RECORD,
    mfac.RECORD,
    *sophia.RECORDS,
    sso.RECORD,
)
_LEFT_OUT = {
    "lbfgs": "calls its closure as often as its line search wants, and keeps a history of the whole model",
    "mezo": "has no backward to plan: train with --optimizer mezo --stream host, without one",
    "sparseadam": "is for sparse gradients, which planned models have none of",
}
_RECORDS = {entry.name: entry for entry in (*torch_optimizers.records(), *_OWN)}


def create(name: str, params: Iterable[Any], lr: float | None = None, **options: Any) -> torch.optim.Optimizer:
    """Return the optimizer `name` over `params` (as any torch optimizer takes them), one parameter updated at a time.

    `lr=None` leaves the class's own default. Unless said, `foreach=False` and `fused=False`: the others
    are faster on a GPU, but hold temporaries of the whole model's size. Raises `UserError` for an unknown name or
    option, and for values that the optimizer refuses.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> create("SGD-Momentum", [weight], lr=0.1).defaults["momentum"]
    0.9
    """
    entry = record(name)
    accepted = _accepted(entry.cls)
    if unknown := [key for key in options if key not in accepted]:
        known = ", ".join(key for key in accepted if key not in ("params", "lr"))
        raise UserError(f"{entry.name} has no option {', '.join(unknown)}; its options are {known}; choose among those")
    one_by_one: dict[str, Any] = {key: False for key in ("foreach", "fused") if key in accepted}
    given = {} if lr is None else {"lr": lr}
    params = list(params)
    try:
        return class_for(entry, _tensors_in(params))(params, **{**one_by_one, **entry.defaults, **given, **options})  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise UserError(f"{entry.name} does not accept these settings: {error}; change them") from error


def record(name: str) -> OptimizerRecord:
    """Return the record of the optimizer `name`; case, hyphens and underscores do not matter.

    >>> record("Adam_W").name
    'adamw'
    """
    by_key = {_key(known): known for known in _RECORDS}
    if _key(name) in by_key:
        return _RECORDS[by_key[_key(name)]]
    if _key(name) in _LEFT_OUT:
        raise UserError(
            f"planning needs an optimizer whose cost is known; {name!r} {_LEFT_OUT[_key(name)]}; try adamw or sgd"
        )
    near = [by_key[key] for key in difflib.get_close_matches(_key(name), by_key, n=3)]
    advice = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(names())}"
    raise UserError(f"there is no optimizer {name!r}; {advice}")


def check_plannable(name: str, alone: bool = False) -> None:
    """Raise `UserError` where the optimizer `name` cannot train a planned model.

    alone: the plan keeps optimizer states off the device, so parameters have to be updated one by one.

    >>> check_plannable("adamw")
    """
    entry = record(name)
    if alone and not entry.updates_alone:
        raise UserError(
            f"an optimizer that updates each parameter by itself is needed where a plan keeps its states off the device; "
            f"{entry.name} does not; take adamw or sgd-momentum, or plan with --pin '*=state-keep'"
        )


def names() -> tuple[str, ...]:
    """Return the names of all optimizers."""
    return tuple(_RECORDS)


def table() -> list[dict[str, str]]:
    """Return a row an optimizer: name, bytes of state per parameter in fp32 and bf16, passes a step, what it reads, what it
    does, and its paper.
    """
    shape = (4096, 4096)
    num_params = shape[0] * shape[1]
    return [
        {
            "name": entry.name,
            "state B/param fp32": f"{entry.state_bytes(shape, 'fp32') / num_params:.3g}",
            "state B/param bf16": f"{entry.state_bytes(shape, 'bf16') / num_params:.3g}",
            "passes": f"{entry.num_passes:.3g}",
            "reads": entry.reads,
            "what it does": entry.summary,
            "paper": entry.paper,
        }
        for entry in _RECORDS.values()
    ]


def _tensors_in(params: list[Any]) -> list[Any]:
    """The parameters in groups, in pairs with their names, or as they are."""
    groups = [each["params"] if isinstance(each, dict) else [each] for each in params]
    flat = [each for group in groups for each in ([group] if isinstance(group, torch.Tensor) else group)]
    return [each[1] if isinstance(each, tuple) else each for each in flat]


def _accepted(cls: type[torch.optim.Optimizer]) -> tuple[str, ...]:
    """Return the names of a class's settings."""
    own = inspect.signature(cls).parameters
    shared = how_keywords() if issubclass(cls, Method) else ()
    return (*(name for name, kind in own.items() if kind.kind is not inspect.Parameter.VAR_KEYWORD), *shared)


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
