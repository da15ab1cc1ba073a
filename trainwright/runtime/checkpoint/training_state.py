"""Collects and restores the state of a training run: weights, optimizer state and settings, random number generators.

    tensors               → pieces under the user's names and shapes    `pieces_of`, `restore_tensors`
    optimizer settings    → plain values, the same for all ranks        `optimizer_settings`, `restore_groups`
    random generators     → plain values, each rank's own               `random_states`, `restore_random_states`

An optimizer's tensor is of one of three kinds. *split*: one entry for each entry of the parameter, in the parameter's
layout; any plan can read it. *whole*: a number. *own*: anything else (the scales of 8-bit states, a low-rank basis); only a
plan with the same layout can read it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ...artifacts import UserError
from ..extents import whole_extent
from ..module import ParallelModule
from ..storage import Piece, StoredTensors
from ..tiered.in_host import values_of

SPLIT, WHOLE, OWN, VALUE = "split", "whole", "own", "value"
Copy = Callable[[Tensor], Tensor]


def pieces_of(module: ParallelModule, optimizer: torch.optim.Optimizer, copy: Copy) -> dict[str, Piece]:
    """Return every tensor that this rank saves, named `model.NAME` or `optimizer.NAME.KEY`; `copy` takes each to the CPU."""
    pieces = {}
    for name, weight in module.named_parameters():
        pieces[f"model.{name}"] = _like_parameter(module, name, _resting(module, name, weight), copy)
    for name, buffer in saved_buffers(module).items():
        pieces[f"model.{name}"] = Piece(whole_extent(buffer.shape), copy(buffer))
    for name, key, param, value in _states(module, optimizer):
        kind = _kind(param, value)
        if kind == SPLIT:
            pieces[f"optimizer.{name}.{key}"] = _like_parameter(module, name, value, copy)
        elif kind != VALUE:
            local = value.to_local() if isinstance(value, DTensor) else value
            place = _own_place(module, name, key) if kind == OWN else f"optimizer.{name}.{key}"
            pieces[place] = Piece(whole_extent(local.shape), copy(local))
    return pieces


def restore_tensors(
    module: ParallelModule,
    optimizer: torch.optim.Optimizer,
    stored: StoredTensors,
    settings: Mapping[str, Any],
    same_layout: bool,
) -> None:
    """Load the tensors of a checkpoint into module and optimizer, each rank its own part; `settings` are the checkpoint's.

    Raises `UserError` when the checkpoint is another model's, or when this layout cannot read its optimizer's state.
    """
    held = _of_all_stages(module, [name for name, _ in module.named_parameters()] + list(saved_buffers(module)))
    there = {name for name in stored.names if name.startswith("model.")}
    if odd_ones := {f"model.{name}" for name in held} ^ there:
        odd = sorted(odd_ones)[0]
        has = "has" if odd in there else "lacks"
        raise UserError(
            f"a checkpoint of this model is needed; {stored.folder} {has} {odd.removeprefix('model.')}; "
            "give the model and the options that it was trained with"
        )
    with torch.no_grad():
        for name, param in module.named_parameters():
            local = _local(_resting(module, name, param))
            local.copy_(stored.read(f"model.{name}", module.extents[name]).view(local.shape))
        for name, buffer in saved_buffers(module).items():
            buffer.copy_(stored.read(f"model.{name}", whole_extent(buffer.shape)))
    optimizer.state.clear()
    offload = module.offloaded_states
    if offload is not None:
        offload.forget(optimizer)
    params = dict(module.named_parameters())
    for name, states in settings["state"].items():
        if name not in params:
            continue  # another stage's
        restored = {}
        for key, entry in states.items():
            kept = Kept(**entry)
            if kept.kind == OWN and not same_layout:
                raise UserError(
                    f"resuming under another plan needs an optimizer whose state can be sharded differently; {key} of "
                    f"{type(optimizer).__name__} fits only the layout that wrote it; resume with that plan and number of "
                    "ranks, or continue from the weights alone"
                )
            restored[key] = _restored(module, name, key, params[name], kept, stored)
        optimizer.state[params[name]] = restored
        if offload is not None:
            offload.send_off(optimizer, params[name])


@dataclass(frozen=True)
class Kept:
    """Describes one entry of an optimizer's state for one parameter: its kind, and what its tensors do not tell."""

    kind: str
    on_host: bool = False
    value: Any = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    places: tuple[int, ...] | None = None
    """For a `DTensor` of kind *own*: the dim that each mesh axis splits, −1 for none."""


def optimizer_settings(module: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's groups (settings and parameter names) and descriptions of its state, as plain values.

    With pipeline stages it is a collective call and returns those of all stages.
    """
    names = _names(module)
    groups = []
    for group in optimizer.param_groups:
        plain = {key: _plain(value, key) for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({**plain, "params": [_name_of(names, param) for param in group["params"]]})
    state: dict[str, dict[str, Any]] = {}
    for name, key, param, value in _states(module, optimizer, read=False):
        state.setdefault(name, {})[key] = vars(_kept(param, key, value))
    found = {"class": type(optimizer).__name__, "groups": groups, "state": state}
    return found if module.pipe is None else _merged_settings(module.pipe.gathered(found))


def _merged_settings(stages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the settings of all stages as those of one optimizer; those of a tied parameter are its first stage's."""
    whole, *others = stages
    for other in others:
        if len(other["groups"]) != len(whole["groups"]):
            raise UserError(
                f"an optimizer with the same groups of parameters on every stage is needed for a checkpoint; one has "
                f"{len(whole['groups'])}, another {len(other['groups'])}; make it from the same rule on all ranks"
            )
        for group, further in zip(whole["groups"], other["groups"]):
            group["params"] = list(dict.fromkeys([*group["params"], *further["params"]]))
        whole["state"] = {**other["state"], **whole["state"]}
    return whole


def _of_all_stages(module: ParallelModule, names: Sequence[str]) -> set[str]:
    """Return the union of all stages' names; a collective call."""
    every = [names] if module.pipe is None else module.pipe.gathered(list(names))
    return {name for own in every for name in own}


def restore_groups(module: ParallelModule, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Set the optimizer's groups to the settings of a checkpoint.

    Raises `UserError` when the checkpoint is another optimizer's, or has other groups of parameters.
    """
    names = _names(module)
    own = [[_name_of(names, param) for param in group["params"]] for group in optimizer.param_groups]
    every = [own] if module.pipe is None else module.pipe.gathered(own)
    found = [
        {name for group in groups for name in group} for groups in zip(*every)
    ]  # of which stage and in which order: no matter
    if saved["class"] != type(optimizer).__name__ or found != [set(group["params"]) for group in saved["groups"]]:
        raise UserError(
            f"resuming needs the optimizer that wrote the checkpoint, {saved['class']} with {len(saved['groups'])} groups; got "
            f"{type(optimizer).__name__} with {len(found)}; use the same optimizer with the same groups of parameters"
        )
    for group, settings in zip(optimizer.param_groups, saved["groups"]):
        for key, value in settings.items():
            if key == "params":
                continue
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the persistent buffers, which a model's `state_dict` includes, under their first names."""
    persistent = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def random_states() -> dict[str, Any]:
    """Return the states of this rank's random number generators as plain values: torch's, Python's, numpy's if in use."""
    found: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy"] = (name, keys.tolist(), *rest)
    return found


def restore_random_states(saved: Mapping[str, Any]) -> None:
    """Set the random number generators to states that `random_states` returned."""
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    if "numpy" in saved:
        import numpy

        numpy.random.set_state(saved["numpy"])


def _states(
    module: ParallelModule, optimizer: torch.optim.Optimizer, read: bool = True
) -> Iterator[tuple[str, str, Tensor, Any]]:
    """Yield (parameter's name, key, parameter, value) for every entry of the optimizer's state.

    Offloaded states are read back, one parameter's at a time; without `read` their contents are undefined.
    """
    names, offload = _names(module), module.offloaded_states
    for param, own in optimizer.state.items():
        state = own if offload is None else offload.whole(optimizer, param, read)
        for key, value in state.items():
            yield _name_of(names, param), key, param, value


def _names(module: ParallelModule) -> dict[Tensor, str]:
    return {param: name for name, param in module.named_parameters()}


def _name_of(names: Mapping[Tensor, str], param: Any) -> str:
    if param not in names:
        raise UserError(
            "an optimizer of the module's own parameters is needed for a checkpoint; it holds one that the module has "
            "not; make the optimizer from module.parameters()"
        )
    return names[param]


def _kind(param: Tensor, value: Any) -> str:
    if not isinstance(value, Tensor):
        return VALUE
    if isinstance(value, DTensor):
        alike = isinstance(param, DTensor) and value.shape == param.shape and value.placements == param.placements
        return SPLIT if alike else OWN
    if value.dim() == 0:
        return WHOLE
    return OWN if isinstance(param, DTensor) or value.shape != param.shape else SPLIT


def _kept(param: Tensor, key: str, value: Any) -> Kept:
    kind = _kind(param, value)
    if kind == VALUE:
        return Kept(kind, value=_plain(value, key))
    on_host = param.device.type != value.device.type
    if kind != OWN or not isinstance(value, DTensor):
        return Kept(kind, on_host)
    places = tuple(_place(placement, key) for placement in value.placements)
    return Kept(kind, on_host, None, tuple(value.shape), tuple(value.stride()), places)


def _place(placement: Placement, key: str) -> int:
    if isinstance(placement, Replicate):
        return -1
    if isinstance(placement, Shard):
        return placement.dim
    raise UserError(
        f"a state that is sharded or replicated is needed for a checkpoint; {key} is {placement}; reduce it"
    )


def _like_parameter(module: ParallelModule, name: str, tensor: Tensor, copy: Copy) -> Piece:
    extent = module.extents[name]
    return Piece(extent, copy(_local(tensor)).view(extent.local_shape))


def _resting(module: ParallelModule, name: str, param: Tensor) -> Tensor:
    """Return the parameter, or what the host's memory has of it."""
    away = values_of(module.tier, name)
    return param if away is None else away


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _restored(module: ParallelModule, name: str, key: str, param: Tensor, kept: Kept, stored: StoredTensors) -> Any:
    if kept.kind == VALUE:
        return kept.value
    place = _own_place(module, name, key) if kept.kind == OWN else f"optimizer.{name}.{key}"
    if place not in stored:
        raise UserError(f"{place} is needed; {stored.folder} lacks it; the checkpoint is damaged")
    extent = module.extents[name] if kept.kind == SPLIT else whole_extent(stored.shape(place))
    value = stored.read(place, extent)
    device = torch.device("cpu") if kept.on_host else module.device
    value = value.to(device)
    if kept.kind == SPLIT and isinstance(param, DTensor):
        local = value.view(param.to_local().shape)
        return DTensor.from_local(local, param.device_mesh, param.placements, run_check=False, shape=param.shape,
                                  stride=param.stride())  # fmt: skip
    if kept.places is not None:
        placements = [Shard(dim) if dim >= 0 else Replicate() for dim in kept.places]
        return DTensor.from_local(value, module.device_mesh, placements, run_check=False, shape=torch.Size(kept.shape),
                                  stride=kept.stride)  # fmt: skip
    return value


def _own_place(module: ParallelModule, name: str, key: str) -> str:
    return f"optimizer.{name}.{key}.rank{module.replicas.rank}"


def _plain(value: Any, key: str) -> Any:
    """Return a setting as a plain value; raise `UserError` for one that cannot be saved without pickling code."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return type(value)(_plain(each, key) for each in value)
    if isinstance(value, dict):
        return {each: _plain(inner, key) for each, inner in value.items()}
    raise UserError(
        f"a checkpoint can store only numbers, texts and tensors of an optimizer; {key} is {value!r}; leave it out"
    )
