"""Builds models that are too large for memory: modules without values, whose parameters are read from files block by block."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts import UserError


@contextmanager
def without_values() -> Iterator[None]:
    """Make modules built in the `with` block without parameter values: one number, expanded to the shape; buffers are real.

    While a module is built, its parameters are moved to the meta device, where initialising them costs nothing, so memory is
    that of the largest one.

    >>> with without_values():
    ...     layer = nn.Linear(3, 4)
    >>> layer.weight.shape, layer.weight.untyped_storage().nbytes()
    (torch.Size([4, 3]), 4)
    """
    own, made = nn.Module.register_parameter, []

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        made.append(self)
        own(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = own  # type: ignore[method-assign]
    stand_ins: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # both, so that no id is used again
    for module in made:
        for name, param in module.named_parameters(recurse=False):
            if param.is_meta:
                empty = torch.full((), math.nan, dtype=param.dtype).expand(param.shape)
                pair = (param, nn.Parameter(empty, requires_grad=param.requires_grad))
                setattr(module, name, stand_ins.setdefault(id(param), pair)[1])


def from_safetensors(path: str | os.PathLike[str]) -> Callable[[str, Any], Tensor]:
    """Return a function that reads a parameter by name from a safetensors file, or from all files of a folder.

    Raises `UserError` for a path without such files; the function raises it for a name or a shape that they do not have.
    """
    from safetensors import SafetensorError, safe_open

    place = Path(path)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place] if place.is_file() else []
    if not files:
        raise UserError(f"weights in safetensors files are needed; {path} has none; check the path")
    where: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                where.update(dict.fromkeys(opened.keys(), file))
        except SafetensorError as error:
            raise UserError(f"weights in safetensors files are needed; {file} cannot be read ({error})") from None

    def read(name: str, param: nn.Parameter) -> torch.Tensor:
        if name not in where:
            raise UserError(
                f"a value of {name} is needed; the files of {path} have none; give the weights of this model"
            )
        with safe_open(where[name], framework="pt") as opened:
            found: Tensor = opened.get_tensor(name)
        if found.shape != param.shape:
            raise UserError(
                f"{name} of shape {tuple(param.shape)} is needed; {path} has {tuple(found.shape)}; give the weights of this model"
            )
        return found

    return read
