"""Optimizers by name, each with a record of what it costs."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

import torch

from ..artifacts import UserError
from . import torch_optimizers
from .record import ExtraPass, OptimizerRecord, StateTensor

__all__ = ["ExtraPass", "OptimizerRecord", "StateTensor", "create", "names", "record", "table"]

_RECORDS = {entry.name: entry for entry in torch_optimizers.records()}


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
    accepted = inspect.signature(entry.cls).parameters
    if unknown := [key for key in options if key not in accepted]:
        known = ", ".join(key for key in accepted if key not in ("params", "lr"))
        raise UserError(f"an option of {entry.name} is needed; got {', '.join(unknown)}; it knows {known}")
    one_by_one = {key: False for key in ("foreach", "fused") if key in accepted}
    given = {} if lr is None else {"lr": lr}
    try:
        return entry.cls(params, **{**one_by_one, **entry.defaults, **given, **options})
    except (TypeError, ValueError) as error:
        raise UserError(f"settings that {entry.name} takes are needed; it says: {error}; change them") from error


def record(name: str) -> OptimizerRecord:
    """Return the record of the optimizer `name`; case, hyphens and underscores do not matter.

    >>> record("Adam_W").name
    'adamw'
    """
    by_key = {_key(known): known for known in _RECORDS}
    if _key(name) in by_key:
        return _RECORDS[by_key[_key(name)]]
    near = [by_key[key] for key in difflib.get_close_matches(_key(name), by_key, n=3)]
    advice = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(names())}"
    raise UserError(f"the name of an optimizer is needed; got {name!r}; {advice}")


def names() -> tuple[str, ...]:
    """Return the names of all optimizers."""
    return tuple(_RECORDS)


def table() -> list[dict[str, str]]:
    """Return a row an optimizer: name, bytes of state per parameter in fp32 and bf16, what it reads, what it does."""
    shape = (4096, 4096)
    num_params = shape[0] * shape[1]
    return [
        {
            "name": entry.name,
            "state B/param fp32": f"{entry.state_bytes(shape, 'fp32') / num_params:.3g}",
            "state B/param bf16": f"{entry.state_bytes(shape, 'bf16') / num_params:.3g}",
            "reads": entry.reads,
            "what it does": entry.summary,
            "paper": entry.paper,
        }
        for entry in _RECORDS.values()
    ]


def _key(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
