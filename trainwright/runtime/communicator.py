"""Collectives over real process groups, one per axis of a `DeviceMesh`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .activity import Activity

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# Renamed in torch 2.13; the old names warn there and the new ones do not exist before.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class MeshCommunicator:
    """The `Communicator` of this rank."""

    SETTLE_S = 3e-4

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.device_mesh = device_mesh
        self.mesh = tuple(device_mesh.shape)
        found = device_mesh.get_coordinate()
        assert found is not None, "this rank is not part of the mesh"
        self.coords = tuple(found)
        self.groups = [device_mesh.get_group(axis) for axis in range(len(self.mesh))]
        self.names = device_mesh.mesh_dim_names or tuple(str(axis) for axis in range(len(self.mesh)))
        self.activity = Activity()
        self._settles = False

    def _exchange(self, kind: str, axis: int, tensor: Tensor) -> AbstractContextManager[None]:
        num_bytes = tensor.numel() * tensor.element_size() if self.mesh[axis] > 1 else 0
        return self.activity.collective(kind, self.names[axis], num_bytes)

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Let the backend's threads drop their tensors before this one goes on.

        Else a tensor may be freed on such a thread, where the allocator's records do not see it.
        """
        self._settles = True
        try:
            yield
        finally:
            self._settles = False

    def _settle(self) -> None:
        if self._settles:
            time.sleep(self.SETTLE_S)

    def all_gather(self, axis: int, part: Tensor) -> Tensor:
        """Return the parts of all ranks of `axis`, stacked in front."""
        gathered = part.new_empty((self.mesh[axis], *part.shape))
        if part.numel():
            with self._exchange("all_gather", axis, gathered):
                all_gather_flat(gathered.view(-1), part.view(-1), group=self.groups[axis])
            self._settle()
        return gathered

    def reduce_scatter(self, axis: int, parts: Tensor) -> Tensor:
        """Return the sum over the ranks of `axis` of the own entry of the leading dim.

        Gloo's own reduce-scatter is an all-reduce of a copy; done in place here, it takes no copy.
        """
        if not parts.is_cuda:
            return self._all_reduce("reduce_scatter", axis, parts)[self.coords[axis]].clone()
        own = parts.new_empty(parts.shape[1:])
        if parts.numel():
            with self._exchange("reduce_scatter", axis, parts):
                reduce_scatter_flat(own.view(-1), parts.view(-1), group=self.groups[axis])
            self._settle()
        return own

    def all_reduce(self, axis: int, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` in place over the ranks of `axis`."""
        return self._all_reduce("all_reduce", axis, tensor, op)

    def _all_reduce(self, kind: str, axis: int, tensor: Tensor, op: str = "sum") -> Tensor:
        if tensor.numel() and self.mesh[axis] > 1:
            with self._exchange(kind, axis, tensor):
                dist.all_reduce(tensor, OPS[op], group=self.groups[axis])
            self._settle()
        return tensor

    def all_to_all(self, axis: int, flat: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Exchange runs of `flat` along `axis`."""
        received = flat.new_empty(sum(receive))
        with self._exchange("all_to_all", axis, flat):
            dist.all_to_all_single(received, flat, receive, send, group=self.groups[axis])
        self._settle()
        return received


def make_mesh(mesh: dict[str, int], device_type: str) -> DeviceMesh:
    """Return the device mesh of a plan over the ranks that exist."""
    if not dist.is_initialized():
        raise RuntimeError(
            "a process group is needed; run under torchrun, or inside trainwright.launch.process_group()"
        )
    ranks = torch.arange(dist.get_world_size()).reshape(tuple(mesh.values()))
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(mesh))
