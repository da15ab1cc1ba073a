"""Where the values come from: the model's own, its own initialisation module by module, or a file read shard by shard."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ..artifacts import UserError
from ..capture.randomness import derived_seed

Reader = Callable[[str], Tensor]


def reader(model: nn.Module, weights: str | os.PathLike[str] | None, aliases: dict[str, str], seed: int) -> Reader:
    """Return a function from a parameter's or buffer's name to its whole value; few are alive at a time.

    Raises `UserError` when the file lacks a name or has another shape.
    """
    if weights is not None:
        return _file_reader(model, Path(weights), aliases, _Initialiser(model, seed))
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    if any(tensor.is_meta for tensor in tensors.values()):
        return _Initialiser(model, seed).read
    return lambda name: tensors[name].detach()


class _Initialiser:
    """Initialises one module of a meta model at a time, from a seed of its own: the same for any sharding."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self.seed = model, seed
        self.held: tuple[str, dict[str, Tensor]] = ("", {})

    def read(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        if self.held[0] != path or not self.held[1]:
            self.held = (path, self._initialise(path))
        return self.held[1][leaf]

    def _initialise(self, path: str) -> dict[str, Tensor]:
        module = self.model.get_submodule(path)
        own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        with _materialised(module, own) as real, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(derived_seed(self.seed, path))
            self._reset(module, path, real)
        return real

    def _reset(self, module: nn.Module, path: str, real: dict[str, Tensor]) -> None:
        for tensor in real.values():
            if not tensor.is_floating_point():
                tensor.zero_()
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
        owner = _initialising_ancestor(self.model, path)
        if owner is not None:
            owner._init_weights(module)  # type: ignore[operator]  # Hugging Face's own rule for one module
        elif not callable(reset) and real:
            raise UserError(
                f"values for {path or 'the model'} are needed; {type(module).__name__} on the meta device has no "
                "reset_parameters(); build the model on the CPU, give it reset_parameters, or pass weights="
            )


def _initialising_ancestor(model: nn.Module, path: str) -> nn.Module | None:
    parts = path.split(".") if path else []
    for count in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:count]))
        if hasattr(module, "_init_weights") and hasattr(module, "config"):
            return module
    return None


@contextmanager
def _materialised(module: nn.Module, own: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Give the module real tensors of its own for a moment."""
    real: dict[str, Tensor] = {}
    for name, tensor in own.items():
        empty = torch.zeros(tensor.shape, dtype=tensor.dtype)
        real[name] = nn.Parameter(empty, requires_grad=False) if name in module._parameters else empty
    saved = {name: module._parameters.get(name, module._buffers.get(name)) for name in own}
    try:
        for name, tensor in real.items():
            (module._parameters if name in module._parameters else module._buffers)[name] = tensor  # type: ignore[assignment]
        yield real
    finally:
        for name, original in saved.items():
            (module._parameters if name in module._parameters else module._buffers)[name] = original  # type: ignore[assignment]


def _file_reader(model: nn.Module, path: Path, aliases: dict[str, str], initialiser: _Initialiser) -> Reader:
    from safetensors import safe_open

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise UserError(f"weights in safetensors files are needed; {path} has none; check the path")
    try:
        handles = [safe_open(str(file), framework="pt") for file in files]
        where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 - a handle is no dict
    except Exception as error:
        raise UserError(f"weights in safetensors files are needed; {path} cannot be read ({error})") from None
    names: dict[str, list[str]] = {}
    for alias, first in aliases.items():
        names.setdefault(first, []).append(alias)
    shapes = {name: tensor.shape for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    buffers = dict(model.named_buffers())

    def read(name: str) -> Tensor:
        stored = next((n for n in (name, *names.get(name, [])) if n in where), None)
        if stored is None and name in buffers:  # one that is not saved with a model, such as rotary frequencies
            return initialiser.read(name) if buffers[name].is_meta else buffers[name]
        if stored is None:
            raise UserError(
                f"weights for every parameter are needed; {path} lacks {name}; use this model's own weights"
            )
        value = where[stored].get_tensor(stored)
        if value.shape != shapes[name]:
            raise UserError(f"{name} of shape {list(shapes[name])} is needed; {path} has {list(value.shape)}")
        return value

    return read
