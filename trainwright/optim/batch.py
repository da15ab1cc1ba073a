"""`Batch`: the tensors that one update takes, in the dtype that it works in, and where its results go back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..numerics.hvp import placed_like

Lists = dict[str, list[Tensor]]
_NARROW = (torch.bfloat16, torch.float16)


@dataclass
class Batch:
    """Lists of one length: parameters, gradients, and a list a state."""

    step: Any
    """Counted from 1, one for all: a number, or a tensor where it may not be read."""
    params: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    states: Lists = field(default_factory=dict)
    owners: list[Tensor] = field(default_factory=list)
    """The parameters themselves: of `DTensor`s, `params` holds the shards."""
    as_they_are: bool = False
    """The update takes bf16 and fp16 and turns gradients around by itself (`compiled.taking_any`)."""

    def add(self, param: Tensor, state: dict[str, Tensor], names: tuple[str, ...], group: dict[str, Any]) -> None:
        """Add a parameter with its gradient (negated where the group maximises) and those states."""
        assert param.grad is not None
        own, grad = real(plain(param)), real(plain(placed_like(param.grad, param)))
        if not self.as_they_are:
            own = own.to(working_dtype(own.dtype))
            grad = turned(grad, own.dtype, group["maximize"])
        self.owners.append(param)
        self.params.append(own)
        self.grads.append(grad)
        for name in names:
            self.states.setdefault(name, []).append(real(plain(state[name])))

    def write_back(self) -> None:
        """Round what was updated in a copy into the parameters."""
        for owner, updated in zip(self.owners, self.params, strict=True):
            if owner.dtype in _NARROW and not self.as_they_are:
                plain(owner).copy_(updated)


def turned(grad: Tensor, dtype: torch.dtype, maximize: bool) -> Tensor:
    """Return a gradient in `dtype`, negated to climb: itself or a copy, never changed."""
    if grad.dtype == dtype:
        return grad.neg() if maximize else grad
    grad = grad.to(dtype)
    return grad.neg_() if maximize else grad


def plain(tensor: Tensor) -> Tensor:
    """Return the shard that this rank holds of a `DTensor`, sharing its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as pairs of reals, sharing its memory; any other as it is."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a parameter is updated and its state kept: fp32 at least.

    >>> working_dtype(torch.bfloat16), working_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float32 if dtype in _NARROW else dtype
