"""Reads initial weights: the model's own values, its initialisation run module by module, or parts of files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..artifacts import UserError
from ..rank.randomness import derived_seed
from .adapters import base_name, is_adapters, reset_adapter
from .extents import Extent
from .storage import INDEX_FILE, StoredTensors

Reader = Callable[[str, Extent], Tensor]


def reader(model: nn.Module, weights: str | os.PathLike[str] | None, aliases: dict[str, str], seed: int) -> Reader:
    """Return a function that reads an extent of a parameter or buffer by its name, with few whole tensors alive at a time.

    weights: a safetensors file, a folder of them, or a distributed checkpoint, from which only the extent is read; None: the
    model's own values or initialisation. The function raises `UserError` if the file lacks a name or has another shape.
    """
    if weights is not None:
        return _file_reader(model, Path(weights), aliases, _Initialiser(model, seed))
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    initialiser = _Initialiser(model, seed)

    def read(name: str, extent: Extent) -> Tensor:
        return initialiser.read(name, extent) if tensors[name].is_meta else extent.cut(tensors[name].detach())

    return read


def load_full_state_dict(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy whole tensors, in the user's names and shapes, into a parallel module: each rank takes its part.

    The counterpart of `full_state_dict`: the parameters stay the same objects, so optimizers and captures stay valid. Names
    that are not in `values` keep their values. Every rank calls it with the same values; nothing is communicated.
    Raises `UserError` for a name or a shape that is not the model's.

    >>> import trainwright as tw
    >>> net, batch = nn.Linear(2, 1), (torch.ones(4, 2),)
    >>> plan = tw.plan(net, batch, loss_fn=lambda output: output.mean(), hardware="cpu:1")
    >>> module = tw.parallelize(net, plan, loss_fn=lambda output: output.mean())
    >>> load_full_state_dict(module, {"bias": torch.tensor([3.0])})
    >>> tw.full_state_dict(module)["bias"]
    tensor([3.])
    """
    targets, extents = dict(model.named_parameters()) | dict(model.named_buffers()), getattr(model, "extents", {})
    with torch.no_grad():
        for name, whole in values.items():
            if name not in targets:
                raise UserError(f"names of this model are needed; it has no {name}; take those of full_state_dict")
            extent, target = extents.get(name), targets[name]
            local = target.to_local() if isinstance(target, DTensor) else target
            shape = extent.shape if extent is not None else tuple(local.shape)
            if tuple(whole.shape) != shape:
                raise UserError(
                    f"{name} of the shape {list(shape)} is needed; got {list(whole.shape)}; take full_state_dict's"
                )
            local.copy_((extent.cut(whole) if extent is not None else whole).view(local.shape))


class _Initialiser:
    """Initialises one module of a meta model at a time, from a seed of the module's own, so that no sharding changes its values."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self.seed = model, seed
        self.held: tuple[str, dict[str, Tensor]] = ("", {})

    def read(self, name: str, extent: Extent) -> Tensor:
        path, _, leaf = name.rpartition(".")
        if self.held[0] != path or not self.held[1]:
            self.held = (path, self._initialise(path))
        return extent.cut(self.held[1][leaf].detach())

    def _initialise(self, path: str) -> dict[str, Tensor]:
        module = self.model.get_submodule(path)
        own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        with _materialised(module, own) as real, torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(derived_seed(self.seed, path))
            if not reset_adapter(self.model, path):
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
    """Replace the module's meta tensors by real ones while the context lasts, and yield these by name."""
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
    stored = _open(path)
    names: dict[str, list[str]] = {}
    for alias, first in aliases.items():
        names.setdefault(first, []).append(alias)
    buffers, params = dict(model.named_buffers()), dict(model.named_parameters())

    def read(name: str, extent: Extent) -> Tensor:
        own = (name, *names.get(name, []))
        found = next((each for each in (*own, *map(base_name, own)) if each in stored), None)
        if found is not None:
            return stored.read(found, extent)
        if is_adapters(model, name):
            return extent.cut(params[name].detach()) if not params[name].is_meta else initialiser.read(name, extent)
        if name in buffers:  # one that is not saved with a model, such as rotary frequencies
            return initialiser.read(name, extent) if buffers[name].is_meta else extent.cut(buffers[name])
        raise UserError(f"weights for every parameter are needed; {path} lacks {name}; use this model's own weights")

    return read


class _Stored(Protocol):
    """Protocol of files from which parts of tensors are read by name."""

    def __contains__(self, name: object) -> bool: ...

    def read(self, name: str, extent: Extent) -> Tensor: ...


def _open(path: Path) -> _Stored:
    checkpoint = checkpoint_folder(path)
    return _Prefixed(StoredTensors(checkpoint)) if checkpoint is not None else _SafetensorsFiles(path)


def checkpoint_folder(path: Path) -> Path | None:
    """Return `path` if it is a distributed checkpoint, else the newest complete one in it; `None` if there is none."""
    if (path / INDEX_FILE).is_file():
        return path
    inside = sorted(path.glob(f"step-*/{INDEX_FILE}"))
    return inside[-1].parent if inside else None


class _Prefixed:
    """Reads a checkpoint whose weights may have a common prefix, as one that also holds an optimizer's state has."""

    PREFIXES = ("", "model.", "app.model.")

    def __init__(self, stored: StoredTensors) -> None:
        self._stored = stored

    def __contains__(self, name: object) -> bool:
        return self._place(str(name)) is not None

    def read(self, name: str, extent: Extent) -> Tensor:
        place = self._place(name)
        assert place is not None, "asked for before"
        return self._stored.read(place, extent)

    def _place(self, name: str) -> str | None:
        return next((prefix + name for prefix in self.PREFIXES if prefix + name in self._stored), None)


class _SafetensorsFiles:
    """Reads parts of tensors from a safetensors file, or all of a folder, by slices of the memory-mapped file."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        self._path = path
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise UserError(
                f"weights in safetensors files or a distributed checkpoint are needed; {path} has none; check the path"
            )
        try:
            handles = [safe_open(str(file), framework="pt") for file in files]
            self._where = {name: handle for handle in handles for name in handle.keys()}  # noqa: SIM118 - a handle is no dict
        except Exception as error:
            raise UserError(f"weights in safetensors files are needed; {path} cannot be read ({error})") from None

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def read(self, name: str, extent: Extent) -> Tensor:
        stored = self._where[name].get_slice(name)
        if tuple(stored.get_shape()) != extent.shape:
            raise UserError(
                f"{name} of shape {list(extent.shape)} is needed; {self._path} has {list(stored.get_shape())}; "
                "use this model's own weights"
            )
        if not extent.shape:
            return self._where[name].get_tensor(name)
        part = torch.empty(extent.local_shape, dtype=stored[:0].dtype)
        for box in extent.boxes:
            box.of_part(part).copy_(box.of_whole(stored))
        return part
