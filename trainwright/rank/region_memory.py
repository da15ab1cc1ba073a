"""Holds autograd's saved tensors while a plan runs: they are kept, rematerialised, or fetched from the offload store.

Autograd passes every tensor that it saves to a hook. A tensor that the plan recomputes is replaced by a reference to
its value. When the backward asks for the first one, the region's instructions are rerun once, without autograd, for all
of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..artifacts import UserError
from ..torch_internals.private import with_marks
from .instructions import Compute, Instruction
from .local import LocalProgram
from .offload import OffloadedStorage, OffloadRun
from .reruns import Rerun
from .run_state import BoundCall, RunState


class Reruns(Protocol):
    """The interface of an executor that a region's memory uses."""

    local: LocalProgram
    released: set[tuple[int, int]]

    def again(self, index: int) -> BoundCall:
        """Return the call by which the backward recomputes the outputs of instruction `index`."""


@dataclass(eq=False, slots=True)
class _Saved:
    """Stands in autograd for a saved tensor; it holds the tensor itself, or refers to where its contents come from."""

    tensor: Tensor | None
    memory: RegionMemory | OffloadedStorage | None = None
    place: tuple[int, int] = (-1, -1)
    """(value, -1), or (instruction, index among what it saves); (-1, -1) if the tensor is not rematerialised."""
    size: Any = None
    stride: Any = None
    offset: int = 0
    dtype: torch.dtype | None = None
    marks: tuple[bool, bool] = (False, False)
    """Whether it is read as a conjugate, and as a negative, of what its memory holds."""

    def release(self, source: RegionMemory | OffloadedStorage) -> None:
        """Give up the tensor, whose contents `source` will have, and remember how it lies in its storage."""
        tensor = self.tensor
        assert tensor is not None
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        self.dtype, self.marks = tensor.dtype, _marks(tensor)
        self.memory, self.tensor = source, None


class RegionMemory:
    """The memory of one region in one run: stand-ins for what is not kept, and rematerialised tensors in use."""

    def __init__(self, executor: Reruns, rerun: Rerun, state: RunState, offload: OffloadRun | None = None) -> None:
        self.executor, self.rerun, self.state, self.offload = executor, rerun, state, offload
        self.before: RegionMemory | None = None
        """The memory of the next region in the backward that gathers parameters again, if there is one."""
        self.sources: dict[int, _Saved] = {}
        self.registry: dict[int, tuple[StorageWeakRef, int]] = {}
        self.waiting: Counter[tuple[int, int]] = Counter()
        self.found: dict[tuple[int, int], Tensor] = {}
        self.pending: list[_Saved] = []
        self.instruction: Instruction | None = None
        self.is_rederived = False

    def begin(self, instruction: Instruction) -> None:
        self.instruction = instruction
        self.pending = []

    def pack(self, tensor: Tensor) -> _Saved:
        """Return a stand-in for a tensor that autograd saves; `end` decides whether it is kept, when the outputs are known."""
        saved = _Saved(tensor)
        self.pending.append(saved)
        return saved

    def end(self, env: dict[int, Any]) -> None:
        """Register the instruction's outputs that are not kept, and release the saved tensors that can be rematerialised."""
        instruction = self.instruction
        assert instruction is not None
        values = self.executor.local.values
        self._register_offloaded(instruction, env)
        for value in instruction.outputs:
            if value in self.rerun.sources:
                self.start_from(value, env[value])
            if values[value].recomputed:
                storage = StorageWeakRef(env[value].untyped_storage())
                self.registry[storage.cdata] = (storage, value)
        known = None
        for index, saved in enumerate(self.pending):
            assert saved.tensor is not None
            key = _storage(saved.tensor)
            entry = self.registry.get(key)
            if entry is not None and not entry[0].expired():
                self._release(saved, (entry[1], -1))
                continue
            if isinstance(instruction, Compute) and (instruction.internal_recomputed or instruction.internal_offloaded):
                if known is None:
                    known = {_storage(env[v]) for v in (*instruction.inputs, *instruction.outputs)}
                if key not in known:
                    self._release_internal(saved, instruction, index)
                    continue
            self._send_away(saved)
        self.pending = []

    def _register_offloaded(self, instruction: Instruction, env: dict[int, Any]) -> None:
        if self.offload is None:
            return
        chosen = [value for value in instruction.outputs if self.executor.local.values[value].offloaded]
        if chosen:
            # A view of what stands elsewhere frees nothing.
            given = {_storage(env[value]) for value in instruction.again.inputs}
            for value in chosen:
                if _storage(env[value]) not in given:
                    self.offload.register(env[value])

    def start_from(self, value: int, tensor: Tensor) -> None:
        """Keep a value from which the region's rerun starts."""
        saved = _Saved(tensor.detach())
        self._send_away(saved)
        self.sources[value] = saved

    def _release_internal(self, saved: _Saved, instruction: Compute, index: int) -> None:
        assert saved.tensor is not None
        if instruction.internal_recomputed:
            self._release(saved, (instruction.index, index))
        elif self.offload is not None:
            if self.offload.find(saved.tensor) is None:
                self.offload.register(saved.tensor)
            self._send_away(saved)

    def _send_away(self, saved: _Saved) -> None:
        """Release a saved tensor whose storage is offloaded; keep any other."""
        tensor = saved.tensor
        item = self.offload.find(tensor) if self.offload is not None and tensor is not None else None
        if self.offload is not None and item is not None and tensor is not None:
            self.offload.save(item, tensor)
            saved.release(item)

    def _release(self, saved: _Saved, place: tuple[int, int]) -> None:
        saved.release(self)
        saved.place = place
        self.waiting[place] += 1
        self.executor.released.add(place)

    def start_backward_at(self, env: dict[int, Any], values: Sequence[int]) -> None:
        """Rematerialise when the backward reaches the region, not when this rank first needs something.

        All ranks then communicate at the same point, even one whose own part is empty and needs nothing. And what reruns hold
        for a moment stands beside the region's incoming gradient, before that is gathered for several operands.
        """
        for value in values:
            if env[value].requires_grad:
                env[value] = _Start.apply(env[value], self)

    def rederive_first(self) -> None:
        """Rematerialise unless that was done; the gathers of the next region of the backward are issued before."""
        if self.is_rederived:
            return
        self.gather()
        if self.before is not None:
            self.before.gather()
        self._rederive()

    def gather(self) -> None:
        """Issue the gathers of the parameters that this region gathers again."""
        for bucket, starts in () if self.is_rederived else self.rerun.gathers.items():
            params = {index: unpack(self.sources[value]) for index, value in starts.items()}
            self.state.flights[bucket].gather(params)

    def fetch(self, place: tuple[int, int]) -> Tensor:
        """Return a rematerialised tensor; the last reader that waits for it releases it."""
        if place not in self.found:
            self._rederive()
        tensor = self.found[place]
        self.waiting[place] -= 1
        if self.waiting[place] == 0:
            del self.found[place]
        return tensor

    def _rederive(self) -> None:
        """Rerun the region's instructions, and keep the tensors that saved tensors refer to.

        Autograd holds this object until the whole graph is gone, so what the rerun starts from is released as it is read.
        """
        if self.is_rederived:
            raise UserError(
                "a forward before each backward is needed where the plan recomputes; got a second backward of one forward; "
                "run the forward again, or plan with more memory"
            )
        self.is_rederived = True
        env: dict[int, Any] = {}
        for index in self.rerun.instructions:
            instruction = self.executor.local.instructions[index].again
            for value in instruction.inputs:
                if value not in env and value in self.sources:
                    env[value] = unpack(self.sources[value])
            if index in self.rerun.internals:
                self._rerun_with_internals(instruction, env)
            else:
                with torch.no_grad():
                    self.executor.again(index)(env, self.state)
            for value in instruction.outputs:
                if self.waiting[(value, -1)] > 0:
                    self.found[(value, -1)] = env[value]
            for value in (*instruction.inputs, *instruction.outputs):
                if self.rerun.last_use.get(value, index) <= index:
                    env.pop(value, None)
                    self.sources.pop(value, None)
        self.sources.clear()

    def _rerun_with_internals(self, instruction: Instruction, env: dict[int, Any]) -> None:
        """Rerun one op under autograd, and keep the internals that it saves."""
        seen: list[Tensor] = []
        values = self.executor.local.values
        inner = dict(env)
        for value in instruction.inputs:
            if values[value].tensor.requires_grad:
                inner[value] = env[value].detach().requires_grad_()

        def note(tensor: Tensor) -> int:
            seen.append(tensor.detach())
            return len(seen) - 1

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda index: seen[index]):
            self.executor.again(instruction.index)(inner, self.state)
        for value in instruction.outputs:
            env[value] = inner[value].detach()
        for index, tensor in enumerate(seen):
            if self.waiting[(instruction.index, index)] > 0:
                self.found[(instruction.index, index)] = tensor


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: RegionMemory) -> Tensor:
        ctx.memory = memory
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.memory.rederive_first()
        return grads[0], None


def unpack(saved: _Saved) -> Tensor:
    """Return the tensor that `pack` took, as autograd saved it."""
    if saved.memory is None:
        assert saved.tensor is not None
        return saved.tensor
    tensor = saved.memory.fetch(saved.place)
    if saved.place[1] >= 0:
        return tensor
    if tensor.dtype is saved.dtype and _marks(tensor) == saved.marks:
        return torch.as_strided(tensor, saved.size, saved.stride, saved.offset)
    # A view as another type (`view_as_complex`), or one with another mark (`conj`), of the same memory.
    bare = torch.empty(0, dtype=saved.dtype, device=tensor.device)
    bare.set_(tensor.untyped_storage(), saved.offset, saved.size, saved.stride)
    return with_marks(bare, *saved.marks)


def _marks(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_conj(), tensor.is_neg()


def _storage(tensor: Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata
