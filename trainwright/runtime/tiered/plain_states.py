"""Converts the part of an optimizer that stays in memory (counters, settings) to JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .residence import Parked
from .updates import StateForm


def as_notes(
    optimizer: Optimizer, parked: Mapping[str, Parked], forms: Mapping[str, Mapping[str, StateForm]]
) -> dict[str, Any]:
    """Return the optimizer's settings and counters, and the forms of the states on the disk, as JSON values."""
    states = {}
    for name, each in parked.items():
        own = forms.get(name, {})
        held = optimizer.state.get(each.param, {})
        states[name] = {key: _form(own[key]) if key in own else _plain(value) for key, value in held.items()}
    names = {each.param: name for name, each in parked.items()}
    groups = []
    for group in optimizer.param_groups:
        plain = {
            key: value for key, value in group.items() if key not in ("params", "param_names") and _is_plain(value)
        }
        groups.append({**plain, "params": [names[param] for param in group["params"] if param in names]})
    return {"class": type(optimizer).__name__, "states": states, "groups": groups}


def from_notes(
    notes: Mapping[str, Any], optimizer: Optimizer, parked: Mapping[str, Parked]
) -> dict[str, dict[str, StateForm]]:
    """Restore the optimizer's counters and settings from `as_notes`; return the forms of the states on the disk."""
    forms: dict[str, dict[str, StateForm]] = {}
    optimizer.state.clear()
    for name, held in notes["states"].items():
        restored: dict[str, Any] = {}
        for key, entry in held.items():
            if entry["kind"] == "disk":
                forms.setdefault(name, {})[key] = StateForm(getattr(torch, entry["dtype"]), torch.Size(entry["shape"]))
                restored[key] = None
            elif entry["kind"] == "number":
                restored[key] = torch.tensor(entry["value"], dtype=getattr(torch, entry["dtype"]))
            else:
                restored[key] = entry["value"]
        if held:
            optimizer.state[parked[name].param] = restored
    for group, held in zip(optimizer.param_groups, notes["groups"], strict=True):
        group.update(
            {
                key: tuple(value) if isinstance(group.get(key), tuple) else value
                for key, value in held.items()
                if key != "params"
            }
        )
    return forms


def _form(form: StateForm) -> dict[str, Any]:
    return {"kind": "disk", "dtype": str(form.dtype).removeprefix("torch."), "shape": list(form.shape)}


def _plain(value: Any) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {"kind": "number", "dtype": str(value.dtype).removeprefix("torch."), "value": value.tolist()}
    return {"kind": "value", "value": value}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, (bool, int, float, str))
