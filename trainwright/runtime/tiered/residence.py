"""Decides which parameters are in memory: prefetches them before their use and releases them after it.

A parameter on the tier has an empty storage: the tensor, its views and what autograd has saved of it stay the same objects,
and have their contents again when the storage is filled. So a step runs the same ops as without a tier, on the same bits.

    forward     reads in the order of first use; releases after the last use, except the last ones, which the backward reads first
    backward    reads in reverse order, when autograd unpacks what it saved, or a region is rematerialised
    update      keeps a parameter until its new values are on the disk (`updates`)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...artifacts import UserError
from ...rank.buckets import Plain
from ...rank.execute import Executor
from ...rank.params_read import params_read
from ...tiers import Copy, MemoryStore, TierStore
from ...tiers.schedule import MOST_FROZEN


@dataclass(eq=False)
class Parked:
    """A rank's part of one parameter, whose storage is empty while its values are only on the disk."""

    name: str
    param: nn.Parameter
    local: Tensor
    num_bytes: int
    place: int = -1
    """Its index in the order of first use; -1 if no step has read it."""
    is_trained: bool = False
    """True if the optimizer updates it."""
    is_kept: bool = False
    """True if its values stay in memory for good."""
    keeps_states: bool = False
    """True if its optimizer states do."""
    is_updating: bool = False
    """True from the arrival of its gradient until the end of the step: reading it then would give another step's values."""
    coming: Copy | None = None
    is_here: bool = True

    @property
    def key(self) -> str:
        """Return the parameter's key in the store."""
        return f"param.{self.name}"

    def fill(self) -> None:
        """Allocate memory for the values."""
        self.local.untyped_storage().resize_(self.num_bytes)

    def arrived(self) -> None:
        """Wait until the values are in memory; any thread may call this."""
        coming = self.coming
        if coming is not None:
            coming.wait()
            self.coming, self.is_here = None, True

    def empty(self) -> None:
        """Free the values' memory."""
        self.local.untyped_storage().resize_(0)
        self.is_here = False

    # As an offloaded storage of `rank.offload`

    def fetch(self, place: Any = None) -> Tensor:
        """Return the values as a one-dimensional tensor, to unpack what autograd has saved of them."""
        self.residence.need([self], backward=True)
        return self.local.detach().view(-1)

    residence: Residence = field(init=False, repr=False)


class Residence:
    """Manages the parameters that may be on the disk, and the window of memory for those that are read.

    Half of the window is for parameters, the other half for updates.
    """

    def __init__(self, store: TierStore | MemoryStore, window_bytes: int) -> None:
        self.store, self.window_bytes = store, window_bytes
        self.order: list[Parked] = []
        """The parameters in the order of first use."""
        self.here_bytes = self.peak_bytes = 0
        """The bytes in memory of parameters that are not kept, now and at the peak."""
        self.waited_s = 0.0
        self._of_storage: dict[int, Parked] = {}
        self._frozen: list[Parked] = []

    def add(self, parked: Parked) -> None:
        """Register a parameter whose values are in memory."""
        parked.residence = self
        self._of_storage[_storage(parked.local)] = parked
        self._count(parked.num_bytes)

    def find(self, tensor: Tensor) -> Parked | None:
        """Return the registered parameter whose storage `tensor` shares; None if there is none."""
        return self._of_storage.get(_storage(tensor))

    def __iter__(self) -> Iterator[Parked]:
        return iter(self._of_storage.values())

    def need(self, wanted: Iterable[Parked], backward: bool = False) -> None:
        """Wait until the parameters are in memory, and prefetch those that the forward or backward reads next."""
        for parked in wanted:
            if backward and not parked.is_trained:
                self._hold(parked)
            if not parked.is_here:
                if parked.is_updating:
                    raise UserError(
                        f"one forward and one backward between two steps of the optimizer are needed with a tier; "
                        f"{parked.name} was read again after its gradient came; call step() first"
                    )
                self.send_for(parked)
                began = time.perf_counter()
                parked.arrived()
                self.waited_s += time.perf_counter() - began
            self._read_ahead(parked, backward)

    def _hold(self, parked: Parked) -> None:
        """Keep a frozen parameter among the last few that the backward has read, since no update tells when to release it."""
        if parked in self._frozen:
            self._frozen.remove(parked)
        self._frozen.append(parked)
        while len(self._frozen) > MOST_FROZEN:
            self.let_go(self._frozen.pop(0))

    def end_backward(self) -> None:
        """Release the frozen parameters that the backward has read."""
        while self._frozen:
            self.let_go(self._frozen.pop())

    def _read_ahead(self, last: Parked, backward: bool) -> None:
        """Prefetch the parameters that follow `last` as long as they fit into half of the window; the rest is for updates."""
        if last.place < 0:
            return
        ahead = self.order[: last.place][::-1] if backward else self.order[last.place + 1 :]
        bound = self.window_bytes // 2
        for parked in ahead:
            if parked.is_here or parked.coming is not None or parked.is_updating:
                continue
            if self.here_bytes + parked.num_bytes > bound:
                return
            self.send_for(parked)

    def send_for(self, parked: Parked) -> None:
        """Issue the read of a parameter, unless it is in memory or in flight."""
        if not parked.is_here and parked.coming is None:
            parked.fill()
            self._count(parked.num_bytes)
            parked.coming = self.store.read(parked.key, parked.local.detach())

    def let_go(self, parked: Parked) -> None:
        """Release the memory of a parameter whose values are on the disk."""
        if parked.is_kept or not (parked.is_here or parked.coming is not None):
            return
        parked.arrived()
        parked.empty()
        self._count(-parked.num_bytes)

    def keep(self, parked: Parked) -> None:
        """Keep a parameter that is in memory there for good."""
        parked.is_kept = True
        self._count(-parked.num_bytes)

    def wanted_first(self, parked: Parked, by_backward: bool) -> bool:
        """Tell whether the next pass reads `parked` so early that it stays: all it reads until then fits a quarter of the window.

        by_backward: whether the next pass is the backward; else it is the next forward.
        """
        if parked.place < 0:
            return False
        before = self.order[parked.place :] if by_backward else self.order[: parked.place + 1]
        return sum(each.num_bytes for each in before if not each.is_kept) <= self.window_bytes // 4

    def _count(self, num_bytes: int) -> None:
        self.here_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.here_bytes)


class Reads:
    """Knows the parameters that each instruction of a program reads; implements `rank.offload.Elsewhere` for its executor."""

    def __init__(
        self, residence: Residence, executor: Executor, names: Mapping[int, Parked], direct: Container[int]
    ) -> None:
        instructions = executor.local.instructions
        self.direct = direct
        self.residence, self.frees = residence, executor.frees
        self.by_instruction = [
            list(dict.fromkeys(names[value] for value in read if value in names))
            for read in params_read(executor.local)
        ]
        self.inputs, self.outputs = [each.inputs for each in instructions], [each.outputs for each in instructions]
        self.counts = Counter(parked for each in self.by_instruction for parked in each)

    def begin(self) -> Uses:
        """Return the object that follows one forward."""
        return Uses(self)

    def need(self, index: int) -> None:
        """Wait for the parameters that instruction `index` reads, when the backward reruns it."""
        self.residence.need(self.by_instruction[index], backward=True)

    def find(self, tensor: Tensor) -> Parked | None:
        """Return the registered parameter whose storage `tensor` shares; None if there is none."""
        return self.residence.find(tensor)


class Uses:
    """Follows one forward: tracks which values share a parameter's storage, and releases it after the last read of them."""

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self.to_come = reads.counts.copy()
        self.opened: set[int] = set()
        self.aliases: dict[int, Parked] = {}
        self.standing: Counter[Parked] = Counter()

    def open(self, values: Iterable[int], env: dict[int, Any], rest: Plain) -> None:
        """Replace those of `values` that are parameters at rest by the rank's local part."""
        for value in values:
            if value in self.reads.direct and value in env and value not in self.opened:
                self.opened.add(value)
                env[value] = rest.part(env[value])

    def before(self, index: int, env: dict[int, Any], rest: Plain) -> None:
        """Wait for the parameters that instruction `index` reads, and replace them by their local parts."""
        self.reads.residence.need(self.reads.by_instruction[index])
        self.open(self.reads.inputs[index], env, rest)

    def after(self, index: int, env: dict[int, Any]) -> None:
        """Note the values that instruction `index` made, and release the parameters that nothing reads any more."""
        residence, own = self.reads.residence, self.reads.by_instruction[index]
        for value in self.reads.outputs[index]:
            tensor = env.get(value)
            parked = residence.find(tensor) if isinstance(tensor, Tensor) else None
            if parked is not None:
                self.aliases[value] = parked
                self.standing[parked] += 1
        touched = dict.fromkeys(own)
        for parked in own:
            self.to_come[parked] -= 1
        for value in self.reads.frees[index]:
            if (freed := self.aliases.pop(value, None)) is not None:
                self.standing[freed] -= 1
                touched[freed] = None
        for parked in touched:
            if self.to_come[parked] == 0 and self.standing[parked] == 0 and not self._stays(parked):
                residence.let_go(parked)

    def _stays(self, parked: Parked) -> bool:
        return torch.is_grad_enabled() and self.reads.residence.wanted_first(parked, by_backward=True)


def _storage(tensor: Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata
