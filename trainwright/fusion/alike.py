"""Which models can become one: equal classes, shapes, ties and settings, weights and dropout rates apart."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts import UserError

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def check_alike(models: Sequence[nn.Module]) -> None:
    """Raise `UserError` with the first difference between the models, or where there is none, or one of them twice."""
    if not models or not all(isinstance(model, nn.Module) for model in models):
        raise UserError(
            f"fuse needs a list of at least one nn.Module; got {[type(each).__name__ for each in models]}; give models"
        )
    if len({id(model) for model in models}) < len(models):
        raise UserError(
            "fuse needs models with weights of their own; one is there twice; copy it: copy.deepcopy(model)"
        )
    first = structure(models[0])
    for number, model in enumerate(models[1:], 1):
        own = structure(model)
        for key in [*first, *(key for key in own if key not in first)]:
            if first.get(key, _Missing) != own.get(key, _Missing):
                raise UserError(
                    f"models of one shape are needed to fuse; {key} is {_said(first, key)} in model 0 and {_said(own, key)} in "
                    f"model {number}; fuse those that are alike: trainwright.fusion.fusible(models) groups them"
                )


def fusible(models: Sequence[nn.Module]) -> list[list[int]]:
    """Return the numbers of the models in sets that `fuse` takes, in the order of their first.

    >>> fusible([nn.Linear(2, 1), nn.Linear(3, 1), nn.Linear(2, 1)])
    [[0, 2], [1]]
    """
    sets: dict[Hashable, list[int]] = {}
    for number, model in enumerate(models):
        sets.setdefault(tuple(structure(model).items()), []).append(number)
    return list(sets.values())


class _Missing:
    """Stands for what one model has and the other has not."""


def structure(model: nn.Module) -> dict[str, Hashable]:
    """Return what has to be equal: of every module its class and settings, of every tensor what it is."""
    found: dict[str, Any] = {}
    seen: dict[int, str] = {}
    for path, module in model.named_modules():
        name = path or "the model"
        found[f"the class of {name}"] = type(module)
        for key, value in _settings_of(module).items():
            found[f"{path}.{key}" if path else key] = value
        for kind, own in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in own.items():
                place = f"{path}.{key}" if path else key
                found[f"the {kind} {place}"] = (
                    None if tensor is None else _what(tensor, seen.setdefault(id(tensor), place))
                )
    return found


def _what(tensor: Tensor, first_place: str) -> Hashable:
    return tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, first_place


def _settings_of(module: nn.Module) -> dict[str, Hashable]:
    """Return the attributes that read as plain data, `training` among them."""
    found = {}
    for key, value in vars(module).items():
        of_dropout = key == "p" and isinstance(module, _DROPOUTS)
        if not key.startswith("_") and not of_dropout and _is_plain(value):
            found[key] = value
    return found


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)


def _said(found: dict[str, Hashable], key: str) -> str:
    value = found.get(key, _Missing)
    if value is _Missing:
        return "missing"
    if isinstance(value, type):
        return value.__name__
    return (
        str(value[0]) if key.startswith(("the parameter", "the buffer")) and isinstance(value, tuple) else repr(value)
    )


def per_model_settings(models: Sequence[nn.Module]) -> dict[str, list[Any]]:
    """Return the dropout rates that differ, by module and attribute: a value a model."""
    found = {}
    for path, module in models[0].named_modules():
        if isinstance(module, _DROPOUTS):
            rates = [model.get_submodule(path).p for model in models]
            if len(set(rates)) > 1:
                found[f"{path}.p"] = rates
    return found


def tensors_of(models: Sequence[nn.Module]) -> dict[str, list[Tensor]]:
    """Return every parameter and buffer by name, tied ones under each of their names: a tensor a model."""
    all_of = [
        {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
        for model in models
    ]
    return {name: [own[name] for own in all_of] for name in all_of[0]}
