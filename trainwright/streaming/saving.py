"""Saves and loads streamed runs: one safetensors file a part, and one JSON file that completes a step.

step-12/  0000-h.0.safetensors …   the parameters at rest, and the buffers
          state.json               the optimizer's settings, the number of steps, torch's generators, the names in each file
The folder is written under a temporary name and renamed when it is complete; older ones are deleted then.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..artifacts import UserError
from ..optim.mezo import random_states, set_random_states
from .streamed import Streamed

_STATE = "state.json"
_SETTINGS = ("lr", "weight_decay", "epsilon", "seed", "num_steps", "exact")


def save(streamed: Streamed, folder: str | os.PathLike[str], step: int, keep: int = 2) -> Path:
    """Save the run after `step` steps in `folder`, with all updates applied; keep the newest `keep` saves. Return the path."""
    from safetensors.torch import save_file

    streamed.flush()
    place = Path(folder) / f"step-{step}"
    beside = place.with_name(f".{place.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    files: dict[str, list[str]] = {}
    for number, (name, tensors) in enumerate(streamed.tensors()):
        file = f"{number:04d}{'-' if name else ''}{name}.safetensors"
        save_file({each: tensor.contiguous() for each, tensor in tensors.items()}, beside / file)
        files[file] = list(tensors)
    buffers = {name: buffer.detach().clone() for name, buffer in streamed.model.named_buffers()}
    if buffers:
        save_file(buffers, beside / "buffers.safetensors")
    groups = [{key: group[key] for key in _SETTINGS} for group in streamed.optimizer.param_groups]
    random = [state.tolist() for state in random_states()]
    text = json.dumps({"step": step, "groups": groups, "files": files, "random": random})
    (beside / _STATE).write_text(text, encoding="utf8")
    for file_path in beside.iterdir():
        with file_path.open("rb") as written:
            os.fsync(written.fileno())
    shutil.rmtree(place, ignore_errors=True)
    beside.rename(place)
    for _, old in saved_steps(folder)[:-keep]:
        shutil.rmtree(old)
    return place


def saved_steps(folder: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    """Return the steps that are completely saved in `folder`, in order, with their paths."""
    found = [
        (int(path.name.removeprefix("step-")), path)
        for path in Path(folder).glob("step-*")
        if path.name.removeprefix("step-").isdigit() and (path / _STATE).is_file()
    ]
    return sorted(found)


def load(streamed: Streamed, folder: str | os.PathLike[str]) -> int:
    """Load the newest saved step of `folder` into the run and return its number of steps.

    Raises `UserError` if there is none, or if it is another model's.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file

    saved = saved_steps(folder)
    if not saved:
        raise UserError(
            f"a step to go on from is needed in {folder}; there is none; leave --resume out, or check the directory"
        )
    step, place = saved[-1]
    state: dict[str, Any] = json.loads((place / _STATE).read_text(encoding="utf8"))
    where = {name: file for file, names in state["files"].items() for name in names}
    expected = {name: tuple(param.shape) for name, param in streamed.model.named_parameters()}
    if where.keys() != expected.keys() or len(state["groups"]) != len(streamed.optimizer.param_groups):
        odd = sorted(where.keys() ^ expected.keys())
        raise UserError(
            f"a step of this model is needed; {place} differs in {odd[0] if odd else 'its parameter groups'}; "
            "give the model that was trained, or another directory"
        )

    def value(name: str) -> Tensor:
        with safe_open(place / where[name], framework="pt") as file:
            found: Tensor = file.get_tensor(name)
        if tuple(found.shape) != expected[name]:
            raise UserError(
                f"{name} of shape {expected[name]} is needed; {place} has {tuple(found.shape)}; give the model that was trained"
            )
        return found

    streamed.load(value)
    if (place / "buffers.safetensors").is_file():
        for name, buffer in load_file(place / "buffers.safetensors").items():
            streamed.model.get_buffer(name).copy_(buffer)
    for group, settings in zip(streamed.optimizer.param_groups, state["groups"]):
        group.update(settings)
    set_random_states([torch.tensor(each, dtype=torch.uint8) for each in state["random"]])
    return step
