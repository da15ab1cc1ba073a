"""Collectives over real process groups, one per axis of a `DeviceMesh`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..launch.flat import all_gather_flat, reduce_scatter_flat
from ..launch.shared_memory import Finish, SharedMemory, is_shared, shared_memory
from ..ops.local import Rows
from .activity import Activity
from .routed import Routed

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class MeshCommunicator:
    """The `Communicator` of this rank."""

    SETTLE_S = 3e-3

    def __init__(self, device_mesh: DeviceMesh) -> None:
        self.device_mesh = device_mesh
        self.mesh = tuple(device_mesh.shape)
        found = device_mesh.get_coordinate()
        assert found is not None, "this rank is not part of the mesh"
        self.coords = tuple(found)
        self.groups = [device_mesh.get_group(axis) for axis in range(len(self.mesh))]
        self.names = device_mesh.mesh_dim_names or tuple(str(axis) for axis in range(len(self.mesh)))
        self.activity = Activity()
        self.routed = Routed()
        self._settles = False
        self._shared: dict[int, SharedMemory | None] = {}
        """The memory that the ranks of an axis share, by axis; None where they share none."""
        if device_mesh.device_type == "cpu":
            self._shared = {axis: shared_memory(group) for axis, group in enumerate(self.groups)}

    def count(self, key: str, numbers: Tensor, rows: Rows) -> list[int]:
        """Return the numbers, and note the fullest of what this rank counts of the op `key`."""
        found: list[int] = numbers.tolist()
        self.routed.note(key, found, rows)
        return found

    def limit(self) -> str:
        """Return what becomes of rows beyond those that were planned."""
        return self.routed.limit

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
        return self.issue("all_gather", axis, part).wait()

    def reduce_scatter(self, axis: int, parts: Tensor) -> Tensor:
        """Return the sum over the ranks of `axis` of the own entry of the leading dim."""
        return self.issue("reduce_scatter", axis, parts).wait()

    def all_reduce(self, axis: int, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` in place over the ranks of `axis`."""
        return self._issue("all_reduce", axis, tensor, op).wait()

    def issue(self, kind: str, axis: int, tensor: Tensor) -> Collective:
        """Begin a collective, whose backend works on it while this rank goes on."""
        return self._issue(kind, axis, tensor)

    def _issue(self, kind: str, axis: int, tensor: Tensor, op: str = "sum") -> Collective:
        result, finish, work = tensor, None, None
        if kind == "all_gather":
            result = tensor.new_empty((self.mesh[axis], *tensor.shape))
        elif kind == "reduce_scatter":
            result = tensor.new_empty(tensor.shape[1:])
        moved = result if kind == "all_gather" else tensor
        if moved.numel() and self.mesh[axis] > 1:
            self.activity.sends(kind, moved.numel() * moved.element_size())
            work, finish = self._begin(kind, axis, tensor, result, op)
            self.activity.issued(kind, moved.numel() * moved.element_size(), work)
        elif kind != "all_reduce":
            result.copy_(tensor.view(result.shape))
        return Collective(self, f"{kind} over axis {self.names[axis]}", work, tensor, result, finish)

    def _begin(self, kind: str, axis: int, tensor: Tensor, result: Tensor, op: str) -> tuple[Any, Finish | None]:
        """Begin a collective by memory or by the backend; return the work, and what is left to do when that is done."""
        if op == "sum" and is_shared(kind, tensor):
            shared = self._shared.get(axis)
            if shared is not None and shared.takes(tensor):
                with self.activity.exchanging():
                    return shared.begin(kind, tensor, lambda given, result: self._sent(kind, axis, given, result))
        return self._send(kind, axis, tensor, result, op)

    def _sent(self, kind: str, axis: int, tensor: Tensor, result: Tensor) -> None:
        """Carry out a collective by the backend, from its beginning to its end."""
        work, finish = self._send(kind, axis, tensor, result, "sum")
        work.wait()
        if finish is not None:
            finish(tensor, result)

    def _send(self, kind: str, axis: int, tensor: Tensor, result: Tensor, op: str) -> tuple[Any, Finish | None]:
        """Hand a collective to the backend."""
        group, own = self.groups[axis], self.coords[axis]
        if kind == "all_reduce":
            return dist.all_reduce(tensor, OPS[op], group=group, async_op=True), None
        if self.mesh[axis] == 2 and not tensor.is_cuda:
            return self._swap(kind, axis, tensor, result)
        if kind == "all_gather":
            return all_gather_flat(result.view(-1), tensor.view(-1), group=group, async_op=True), None
        if tensor.is_cuda:
            return reduce_scatter_flat(result.view(-1), tensor.view(-1), group=group, async_op=True), None
        # Gloo's own reduce-scatter is an all-reduce of a copy; done in place here, it takes no copy.
        work = dist.all_reduce(tensor, group=group, async_op=True)
        return work, lambda given, result: result.copy_(given[own])

    def _swap(self, kind: str, axis: int, tensor: Tensor, result: Tensor) -> tuple[Any, Finish | None]:
        """Begin what two ranks do by an exchange of halves: gloo's own gather copies, its own sum sends twice as much."""
        own, sizes = self.coords[axis], [0, 0]
        sent, received = (tensor, result[1 - own]) if kind == "all_gather" else (tensor[1 - own], result)
        sizes[1 - own] = sent.numel()
        group, sent = self.groups[axis], sent.view(-1)
        work = dist.all_to_all_single(received.view(-1), sent, sizes, sizes, group=group, async_op=True)
        if kind == "reduce_scatter":
            return work, lambda given, result: result.add_(given[own])
        result[own].copy_(tensor)
        return work, None

    def all_to_all(self, axis: int, flat: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Exchange runs of `flat` along `axis`."""
        received = flat.new_empty(sum(receive))
        self.activity.sends("all_to_all", flat.numel() * flat.element_size() if self.mesh[axis] > 1 else 0)
        work = dist.all_to_all_single(received, flat, receive, send, group=self.groups[axis], async_op=True)
        self.activity.issued("all_to_all", flat.numel() * flat.element_size(), work)
        return Collective(self, f"all_to_all over axis {self.names[axis]}", work, flat, received, None).wait()


class Collective:
    """One collective in flight, which holds its input until `wait` returns the result."""

    def __init__(self, communicator: MeshCommunicator, what: str, work: Any, given: Tensor, result: Tensor,
                 finish: Finish | None) -> None:  # fmt: skip
        self.communicator, self.what, self.work, self.finish = communicator, what, work, finish
        self.given: Tensor | None = given
        self.result = result

    def wait(self) -> Tensor:
        """Return the result once it is there."""
        if self.work is not None:
            with self.communicator.activity.awaiting(self.what):
                self.work.wait()
                if self.finish is not None and self.given is not None:
                    self.finish(self.given, self.result)
            self.work = self.finish = None
            self.communicator._settle()
        self.given = None
        return self.result


REPLICAS = "replicas"
"""The axis outside a plan's own, along which nothing is summed."""


def make_mesh(mesh: dict[str, int], device_type: str, replicas: int = 1) -> DeviceMesh:
    """Return the device mesh of a plan over the ranks that exist, or over those of this rank's replica."""
    if not dist.is_initialized():
        raise RuntimeError(
            "a process group is needed; run under torchrun, or inside trainwright.launch.process_group()"
        )
    ranks = torch.arange(dist.get_world_size())
    if replicas == 1:
        return DeviceMesh(device_type, ranks.reshape(tuple(mesh.values())), mesh_dim_names=tuple(mesh))
    whole = DeviceMesh(device_type, ranks.reshape(replicas, *mesh.values()), mesh_dim_names=(REPLICAS, *mesh))
    return whole[tuple(mesh)]
