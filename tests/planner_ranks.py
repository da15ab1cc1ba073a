"""Ranks as threads of one process: plans run on real tensors without process groups, so that many can be tried."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainwright.program.decisions import Decisions
from trainwright.program.layout import axes_of, local_shape, slot_range
from trainwright.program.program import Program
from trainwright.program.program import Tensor as ProgramTensor
from trainwright.rank.execute import Executor
from trainwright.rank.local import build_local
from trainwright.rank.run_state import RunState


class _Board:
    """Where the ranks lay out what they send; every collective is met by all ranks of the mesh."""

    def __init__(self, mesh: Sequence[int]) -> None:
        self.coords = list(itertools.product(*(range(size) for size in mesh)))
        self.slots: dict[tuple[int, ...], Any] = {}
        self.barrier = threading.Barrier(len(self.coords))

    def exchange(self, coords: tuple[int, ...], axis: int, value: Any) -> list[Any]:
        self.slots[coords] = value
        self.barrier.wait(timeout=60)
        peers = [
            other for other in self.coords if other[:axis] + other[axis + 1 :] == coords[:axis] + coords[axis + 1 :]
        ]
        found = [self.slots[other] for other in peers]
        self.barrier.wait(timeout=60)
        return found


class ThreadCommunicator:
    """A `Communicator` among the threads that share a board."""

    def __init__(self, mesh: Sequence[int], coords: tuple[int, ...], board: _Board) -> None:
        self.mesh, self.coords, self.board, self.device = tuple(mesh), coords, board, None

    def _peers(self, axis: int, value: Any) -> list[Any]:
        return self.board.exchange(self.coords, axis, value)

    def all_gather(self, axis: int, part: Tensor) -> Tensor:
        return torch.stack(self._peers(axis, part))

    def reduce_scatter(self, axis: int, parts: Tensor) -> Tensor:
        return torch.stack([other[self.coords[axis]] for other in self._peers(axis, parts)]).sum(0)

    def all_reduce(self, axis: int, tensor: Tensor, op: str = "sum") -> Tensor:
        stacked = torch.stack(self._peers(axis, tensor.clone()))
        return tensor.copy_(stacked.amax(0) if op == "max" else stacked.sum(0))

    def all_to_all(self, axis: int, flat: Tensor, send: list[int], receive: list[int]) -> Tensor:
        found = self._peers(axis, flat.split(send))
        return torch.cat([pieces[self.coords[axis]] for pieces in found])


def shard(
    tensor: ProgramTensor, whole: Tensor, layout: tuple[int, ...], mesh: Sequence[int], coords: Sequence[int]
) -> Tensor:
    """Return the rank's part of a whole tensor, cut factor by factor."""
    sizes = [slot.size for slot in tensor.slots]
    part = whole.reshape(sizes) if sizes else whole
    for index, size in enumerate(sizes):
        start, stop = slot_range(size, [(mesh[axis], coords[axis]) for axis in axes_of(layout, index)])
        part = part.narrow(index, start, stop - start)
    return part.reshape(local_shape(tensor.shape, tensor.slots, layout, mesh, coords)).clone()


def run_ranks(
    program: Program, decisions: Decisions, values: dict[ProgramTensor, Tensor]
) -> tuple[float, dict[str, list]]:
    """Run one step on every rank; return the loss and, by parameter, (coords, gradient shard) of each rank.

    Parameters travel one by one: ranks that are threads issue nothing early.
    """
    decisions = replace(decisions, overlap="none")
    board = _Board(decisions.mesh)
    losses: list[float] = []
    gradients: dict[str, list] = {tensor.key: [] for tensor in program.params}
    errors: list[BaseException] = []

    def rank(coords: tuple[int, ...]) -> None:
        try:
            loss, grads = _one_rank(program, decisions, values, ThreadCommunicator(decisions.mesh, coords, board))
            losses.append(loss)
            for key, gradient in grads.items():
                gradients[key].append((coords, gradient))
        except BaseException as error:
            errors.append(error)
            board.barrier.abort()

    threads = [threading.Thread(target=rank, args=(coords,)) for coords in board.coords]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)] or errors
    if real:
        raise real[0]
    assert len(losses) == math.prod(decisions.mesh)
    assert max(losses) - min(losses) < 1e-9 * max(1.0, abs(losses[0]))
    return losses[0], gradients


def _one_rank(program: Program, decisions: Decisions, values, communicator: ThreadCommunicator):
    local = build_local(program, decisions, communicator)
    sources = {}
    for tensor, index in local.sources.items():
        part = shard(tensor, values[tensor], local.values[index].layout, communicator.mesh, communicator.coords)
        sources[tensor] = part.requires_grad_(tensor.requires_grad)
    outputs = Executor(local).run(sources, RunState(dropout=False))
    loss = outputs[program.captured.loss_index]
    loss.backward()
    grads = {}
    for tensor in program.params:
        if tensor.requires_grad:
            found = sources[tensor].grad
            grads[tensor.key] = torch.zeros_like(sources[tensor]) if found is None else found
    return float(loss), grads


def whole_values(program: Program, model: torch.nn.Module, batch: dict[str, Any]) -> dict[ProgramTensor, Tensor]:
    """Return the real tensor of every source of a program."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers()), **batch}
    return {
        tensor: (tensor.value if tensor.role == "const" else named[tensor.key].detach())
        for tensor in program.tensors
        if tensor.role != "op"
    }
