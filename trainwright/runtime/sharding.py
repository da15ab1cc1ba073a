"""Stores parameters at rest as `DTensor`s in the plan's layout, under the user's names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from ..program.layout import Layout, Slot, local_shape, slot_range, slots_of_dim
from ..program.program import Tensor as ProgramTensor
from ..rank.buckets import Plain
from ..torch_internals.private import dtensor_like, local_part
from .extents import extent_of


@dataclass(frozen=True)
class Storage:
    """The stored form of one tensor on a mesh: its shape, and torch's placements.

    A split along an inner factor of a dim (the heads of a fused QKV weight) is no `Shard` of the user's shape; the
    tensor is then stored with that dim taken apart into its factors.
    """

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    local_shape: tuple[int, ...]
    """The shape of the rank's part in the user's number of dims, as the step reads it."""


def storage_of(
    shape: Sequence[int], slots: Sequence[Slot], layout: Layout, mesh: Sequence[int], coords: Sequence[int]
) -> Storage:
    """Return the stored form of a tensor of global `shape` in `layout`, with its local shape on the rank at `coords`."""
    apart = {slots[at].dim for at in layout if at >= 0 and not _is_plain(slots, at, layout, mesh)}
    stored: list[int] = []
    place: dict[int, int] = {}
    for dim, size in enumerate(shape):
        own = slots_of_dim(slots, dim)
        if dim in apart:
            place.update({slot: len(stored) + k for k, slot in enumerate(own)})
            stored += [slots[slot].size for slot in own]
        else:
            place.update({slot: len(stored) for slot in own})
            stored.append(size)
    placements = tuple(Shard(place[at]) if at >= 0 else Replicate() for at in layout)
    return Storage(tuple(stored), placements, local_shape(shape, slots, layout, mesh, coords))


def _is_plain(slots: Sequence[Slot], at: int, layout: Layout, mesh: Sequence[int]) -> bool:
    """Tell whether splitting slot `at` is a `Shard` of its dim: it is the major factor, and divides evenly or is the only one."""
    peers = slots_of_dim(slots, slots[at].dim)
    if peers[0] != at or any(other in peers and other != at for other in layout):
        return False
    parts = math.prod(size for size, entry in zip(mesh, layout) if entry == at)
    return len(peers) == 1 or slots[at].size % parts == 0


def own_part(
    full: torch.Tensor, slots: Sequence[Slot], layout: Layout, mesh: Sequence[int], coords: Sequence[int]
) -> torch.Tensor:
    """Return a copy of the rank's part of `full`, in as many dims as `full` has."""
    return extent_of(full.shape, slots, layout, mesh, coords).cut(full)


def as_parameter(tensor: ProgramTensor, layout: Layout, local: torch.Tensor, device_mesh: DeviceMesh) -> nn.Parameter:
    """Wrap the rank's part of a parameter as a `DTensor` parameter."""
    coords = device_mesh.get_coordinate()
    assert coords is not None
    storage = storage_of(tensor.shape, tensor.slots, layout, tuple(device_mesh.shape), coords)
    data = as_dtensor(local, storage, device_mesh, tuple(device_mesh.shape), coords)
    return nn.Parameter(data, requires_grad=tensor.requires_grad)


def as_dtensor(
    local: torch.Tensor, storage: Storage, device_mesh: DeviceMesh, mesh: Sequence[int], coords: Sequence[int]
) -> DTensor:
    """Wrap the rank's part, given in the user's dims, as a `DTensor` of the stored shape."""
    shape = list(storage.shape)
    for axis, placement in enumerate(storage.placements):
        if isinstance(placement, Shard):
            start, stop = slot_range(shape[placement.dim], [(mesh[axis], coords[axis])])
            shape[placement.dim] = stop - start
    return DTensor.from_local(
        local.view(shape),
        device_mesh,
        storage.placements,
        run_check=False,
        shape=torch.Size(storage.shape),
        stride=_contiguous_stride(storage.shape),
    )


class AtRest(Plain):
    """Converts one run's parameters between `DTensor`s at rest and the local parts that a step reads.

    shapes: the shape of each parameter's local part, as the step reads it.
    """

    def __init__(self, shapes: Mapping[torch.Tensor, Sequence[int]]) -> None:
        self.shapes = shapes
        self.given: dict[int, StorageWeakRef] = {}
        """The memory of the gradients that this run has returned, by address."""

    def part(self, param: DTensor) -> torch.Tensor:
        """Return the rank's part of a parameter; its gradient becomes a `DTensor` in the parameter's layout."""
        if not param.requires_grad or not torch.is_grad_enabled():
            return local_part(param).detach().view(self.shapes[param])
        return _LocalPart.apply(param, self)  # type: ignore[no-any-return]

    def local(self, param: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of a parameter by one view, outside of autograd; a plain tensor is returned unchanged.

        `to_local` takes another view, in some releases of torch.
        """
        return local_part(param).view(self.shapes[param]) if isinstance(param, DTensor) else super().local(param)

    def gradient(self, local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the rank's part as a `DTensor` in the parameter's layout.

        `to_local` does the same, but spends most of its backward on deriving the gradient's layout anew each time.
        """
        if not isinstance(param, DTensor):
            return super().gradient(local, param)
        local = local.reshape(local_part(param).shape)
        if torch.is_grad_enabled():  # a gradient that is differentiated again
            mesh, places = param.device_mesh, param.placements
            return DTensor.from_local(local, mesh, places, run_check=False, shape=param.shape, stride=param.stride())
        local = local.contiguous()
        # Autograd gives operands of a sum one and the same gradient, and cannot see that through the wrapper: scaled in
        # place for one parameter (by clipping, say), it would be scaled for the other too.
        given = self.given.get(local.data_ptr())
        if given is not None and not given.expired():  # else another's memory, freed since
            local = local.clone()
        elif local.numel():
            self.given[local.data_ptr()] = StorageWeakRef(local.untyped_storage())
        return dtensor_like(local, param)  # type: ignore[no-any-return]


class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: DTensor, rest: AtRest) -> torch.Tensor:
        ctx.param, ctx.rest = param, rest
        return rest.local(param)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rest.gradient(grads[0], ctx.param), None


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(1, size)
    return tuple(reversed(strides))
