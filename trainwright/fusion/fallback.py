"""Functions without a rule run under `torch.func.vmap`, or once a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..artifacts import UserError
from ..torch_internals.private import flatten, unflatten
from .array import Fused, is_fused, num_models
from .streams import drawing

_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")
Around = Callable[[int], AbstractContextManager[None]]
_not_mapped: set[Any] = set()
"""Functions that vmap has refused."""


def without_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function without a rule gives: by vmap where that takes it, else once a model."""
    _check_not_written(func, args)
    leaves, tree = flatten((args, kwargs))
    if func not in _not_mapped:
        try:
            return _mapped(func, leaves, tree)
        except (RuntimeError, ValueError, NotImplementedError, TypeError, IndexError):
            found = each_alone(func, leaves, tree)  # raises what a single model would
            _not_mapped.add(func)
            return found
    return each_alone(func, leaves, tree)


def _check_not_written(func: Any, args: tuple[Any, ...]) -> None:
    """Raise `UserError` where a tensor that all models share would be written by what differs between them."""
    name = getattr(func, "__name__", "")
    writes = name in ("__setitem__", "set_") or (name.endswith("_") and not name.startswith("__")) or name in _IN_PLACE
    if writes and args and not is_fused(args[0]):
        raise UserError(
            f"a tensor of each model is needed to write the models' values into; {name} has one that all share, made in the "
            "forward; make it of one that differs: torch.zeros_like(x), x.new_zeros(…), or out of place: out = out + x"
        )


def _mapped(func: Any, leaves: list[Any], tree: Any) -> Any:
    places = [at for at, leaf in enumerate(leaves) if is_fused(leaf)]
    out_trees: list[Any] = []

    def once(*raws: Tensor) -> list[Any]:
        given = list(leaves)
        for at, raw in zip(places, raws):
            given[at] = raw
        args, kwargs = unflatten(given, tree)
        found, out = flatten(func(*args, **kwargs))
        out_trees.append((out, found))
        return [each for each in found if isinstance(each, Tensor)]

    raws = torch.func.vmap(once, randomness="error")(*(leaves[at].raw for at in places))
    out, found = out_trees[-1]
    results = iter(raws)
    return unflatten([Fused(next(results)) if isinstance(each, Tensor) else each for each in found], out)


def each_alone(
    func: Callable[..., Any], leaves: list[Any], tree: Any, num: int | None = None, around: Around = drawing
) -> Any:
    """Return what `func` gives of each model's own arguments, one after the other, each with its stream; tensors stacked.

    num: of models, where the arguments do not tell. around(model): the context of one model's call.
    """
    outputs = []
    for model in range(num_models(*leaves) if num is None else num):
        args, kwargs = unflatten([leaf.raw[model] if is_fused(leaf) else leaf for leaf in leaves], tree)
        with around(model):
            outputs.append(flatten(func(*args, **kwargs)))
    return stacked([found for found, _ in outputs], outputs[0][1])


def stacked(outputs: list[list[Any]], tree: Any) -> Any:
    """Return one output whose tensors are fused, of those of all models."""
    joined = [Fused(torch.stack(each)) if isinstance(each[0], Tensor) else each[0] for each in map(list, zip(*outputs))]
    return unflatten(joined, tree)
