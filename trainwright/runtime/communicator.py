"""Runs collectives over real process groups, one for each axis of a `DeviceMesh`."""

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
from .groups import made_once
from .routed import Routed

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class MeshCommunicator:
    """The `Communicator` of this rank, on `torch.distributed`."""

    SETTLE_S = 3e-3

    def __init__(self, device_mesh: DeviceMesh, device: torch.device | None = None) -> None:
        self.device_mesh, self.device = device_mesh, device
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
        """The shared memory of each axis's ranks; None where they have none."""
        if device_mesh.device_type == "cpu":
            self._shared = {axis: shared_memory(group) for axis, group in enumerate(self.groups)}

    def count(self, key: str, numbers: Tensor, rows: Rows) -> list[int]:
        """Return `numbers` as a list, and note them as a call of the op `key` for `routed`."""
        found: list[int] = numbers.tolist()
        self.routed.note(key, found, rows)
        return found

    def limit(self) -> str:
        """Return the treatment of rows beyond the planned ones."""
        return self.routed.limit

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Make each collective wait for the backend's threads to drop their tensors, while the context lasts.

        Otherwise such a thread may free a tensor, which the allocator's records do not see.
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
        """Return the sum over the ranks of `axis` of this rank's entry of the leading dim."""
        return self.issue("reduce_scatter", axis, parts).wait()

    def all_reduce(self, axis: int, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` in place over the ranks of `axis` and return it."""
        return self._issue("all_reduce", axis, tensor, op).wait()

    def issue(self, kind: str, axis: int, tensor: Tensor) -> Collective:
        """Issue a collective, on which the backend works while this rank continues, and return its handle."""
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
        """Issue a collective in shared memory or to the backend; return its work, and the function that completes its result."""
        if op == "sum" and is_shared(kind, tensor):
            shared = self._shared.get(axis)
            if shared is not None and shared.takes(tensor):
                with self.activity.exchanging():
                    return shared.begin(kind, tensor, lambda given, result: self._sent(kind, axis, given, result))
        return self._send(kind, axis, tensor, result, op)

    def _sent(self, kind: str, axis: int, tensor: Tensor, result: Tensor) -> None:
        """Run a collective by the backend to its end."""
        work, finish = self._send(kind, axis, tensor, result, "sum")
        work.wait()
        if finish is not None:
            finish(tensor, result)

    def _send(self, kind: str, axis: int, tensor: Tensor, result: Tensor, op: str) -> tuple[Any, Finish | None]:
        """Issue a collective to the backend; return its work, and the function that completes its result, if one is needed."""
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
        """Issue a gather or reduce-scatter of two ranks as an exchange of halves.

        Gloo's own gather makes a copy, and its own reduction sends twice the bytes.
        """
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
        """Send consecutive runs of `flat` (lengths `send`) to the ranks of `axis`; return what they sent (lengths `receive`)."""
        received = flat.new_empty(sum(receive))
        self.activity.sends("all_to_all", flat.numel() * flat.element_size() if self.mesh[axis] > 1 else 0)
        work = dist.all_to_all_single(received, flat, receive, send, group=self.groups[axis], async_op=True)
        self.activity.issued("all_to_all", flat.numel() * flat.element_size(), work)
        return Collective(self, f"all_to_all over axis {self.names[axis]}", work, flat, received, None).wait()


class Collective:
    """A collective in flight; it holds its input until `wait` returns the result."""

    def __init__(self, communicator: MeshCommunicator, what: str, work: Any, given: Tensor, result: Tensor,
                 finish: Finish | None) -> None:  # fmt: skip
        self.communicator, self.what, self.work, self.finish = communicator, what, work, finish
        self.given: Tensor | None = given
        self.result = result

    def wait(self) -> Tensor:
        """Wait for the result and return it."""
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
"""The name of the mesh axis of replicas, outside the plan's axes, along which gradients are not summed."""


def make_mesh(mesh: dict[str, int], device_type: str, replicas: int = 1) -> DeviceMesh:
    """Return the device mesh of a plan: over all ranks, or, with several replicas, over those of this rank's replica."""
    if not dist.is_initialized():
        raise RuntimeError(
            "a process group is needed; run under torchrun, or inside trainwright.launch.process_group()"
        )
    return made_once((tuple(mesh.items()), device_type, replicas), lambda: _mesh(mesh, device_type, replicas))


def _mesh(mesh: dict[str, int], device_type: str, replicas: int) -> DeviceMesh:
    ranks = torch.arange(dist.get_world_size())
    if replicas == 1:
        return DeviceMesh(device_type, ranks.reshape(tuple(mesh.values())), mesh_dim_names=tuple(mesh))
    whole = DeviceMesh(device_type, ranks.reshape(replicas, *mesh.values()), mesh_dim_names=(REPLICAS, *mesh))
    return whole[tuple(mesh)]
