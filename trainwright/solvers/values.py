"""`Packing`: what a user gives (a tensor, a NumPy array, a mapping of them) as one flat vector, and back in the same kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..artifacts import UserError


@dataclass(frozen=True)
class Packing:
    """The kind, names and shapes of a value; one vector of its dtype on its device holds all its numbers.

    >>> packing, vector = Packing.of({"w": torch.ones(2, 2), "b": torch.zeros(2)})
    >>> vector.shape, packing.unpack(2 * vector)["w"][0]
    (torch.Size([6]), tensor([2., 2.]))
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    is_mapping: bool
    is_numpy: bool

    @classmethod
    def of(cls, value: Any, name: str = "x0") -> tuple[Packing, Tensor]:
        """Return the packing of `value` and its vector (a copy). What is not floating-point becomes float64."""
        entries = dict(value) if isinstance(value, Mapping) else {"": value}
        is_numpy = not any(isinstance(entry, Tensor) for entry in entries.values())
        tensors = [_tensor(entry, name) for entry in entries.values()]
        if not tensors:
            raise UserError(
                f"{name} with at least one tensor is needed; got an empty mapping; give the variables by name"
            )
        if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
            raise UserError(
                f"{name} of one dtype on one device is needed; got {[(t.dtype, str(t.device)) for t in tensors]}; convert"
            )
        vector = torch.cat([tensor.reshape(-1) for tensor in tensors]).clone()
        if not len(vector):
            raise UserError(f"{name} with at least one number is needed; got an empty one; give the variables")
        if not torch.isfinite(vector).all():
            raise UserError(f"a finite {name} is needed; got NaN or infinity in it; start elsewhere")
        shapes = tuple(tensor.shape for tensor in tensors)
        return cls(tuple(entries), shapes, isinstance(value, Mapping), is_numpy), vector

    def unpack(self, vector: Tensor) -> Any:
        """Return the vector in the kind of the value that was packed; tensors are views of it (autograd goes through)."""
        pieces = vector.split([shape.numel() for shape in self.shapes])
        entries = {name: piece.view(shape) for name, piece, shape in zip(self.names, pieces, self.shapes)}
        if self.is_numpy:
            entries = {name: entry.detach().cpu().numpy() for name, entry in entries.items()}
        return entries if self.is_mapping else entries[""]

    def pack(self, value: Any, like: Tensor, name: str) -> Tensor:
        """Return `value`, of the packed shapes, as a vector of `like`'s dtype and device; `name` is for the error."""
        try:
            entries = [value[key] for key in self.names] if self.is_mapping else [value]
        except (KeyError, TypeError, IndexError) as error:
            raise UserError(f"{name} as a mapping with {list(self.names)} is needed; got {_kind(value)}") from error
        try:
            tensors = [torch.as_tensor(entry, dtype=like.dtype, device=like.device) for entry in entries]
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{name} as numbers is needed; got {_kind(value)}; return a tensor or an array") from error
        if tuple(tensor.shape for tensor in tensors) != self.shapes:
            found = [tuple(tensor.shape) for tensor in tensors]
            wanted = [tuple(shape) for shape in self.shapes]
            raise UserError(f"{name} of shape {wanted} is needed; got {found}; return one number per variable")
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _tensor(entry: Any, name: str) -> Tensor:
    try:
        tensor = entry.detach() if isinstance(entry, Tensor) else torch.as_tensor(np.asarray(entry))
    except TypeError as error:
        raise UserError(f"{name} of numbers is needed; got {_kind(entry)}; give a tensor or an array") from error
    if tensor.is_complex():
        raise UserError(f"a real {name} is needed; got {tensor.dtype}; stack real and imaginary parts")
    return tensor if tensor.is_floating_point() else tensor.to(torch.float64)


def _kind(value: Any) -> str:
    return type(value).__name__
