"""Which parameters are in memory, and when: read ahead of their use, let go after it.

A parameter that is away is an empty storage: the tensor, its views and what autograd has saved of it stay the same objects,
and have their contents again when the storage is filled. So a step runs the ops that it runs without a tier, on the same bits.

    forward     in the order of first use; gone after the last use, but for the last ones, which the backward wants first
    backward    in the reverse order, when autograd unpacks what it saved, or a region is run again
    update      stays until the new values are on the disk (`updates`)
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
from ...tiers import TierStore, Transfer

MOST_FROZEN = 4
"""Parameters without an update that stay in the backward: an op reads no more of them."""


@dataclass(eq=False)
class Parked:
    """One parameter of a rank: its part, whose storage is empty while the parameter is away."""

    name: str
    param: nn.Parameter
    local: Tensor
    num_bytes: int
    place: int = -1
    """Its number in the order of first use; -1: no step has read it."""
    is_trained: bool = False
    """True for one that the optimizer updates."""
    is_kept: bool = False
    """True for one that stays in memory."""
    is_updating: bool = False
    """True from the arrival of its gradient until the step is over: what is read of it then would be of another step."""
    coming: Transfer | None = None
    is_here: bool = True

    @property
    def key(self) -> str:
        """Return its name in the store."""
        return f"param.{self.name}"

    def fill(self) -> None:
        """Take memory for the contents."""
        self.local.untyped_storage().resize_(self.num_bytes)

    def arrived(self) -> None:
        """Return when the contents are here; from any thread."""
        coming = self.coming
        if coming is not None:
            coming.wait()
            self.coming, self.is_here = None, True

    def empty(self) -> None:
        """Give the memory back."""
        self.local.untyped_storage().resize_(0)
        self.is_here = False

    # As an offloaded storage of `rank.offload`

    def fetch(self, place: Any = None) -> Tensor:
        """Return the contents, one-dimensional, for what autograd has saved of them."""
        self.residence.need([self], backward=True)
        return self.local.detach().view(-1)

    residence: Residence = field(init=False, repr=False)


class Residence:
    """Parameters by their storage, and the window that what is in memory of them may take."""

    def __init__(self, store: TierStore, window_bytes: int) -> None:
        self.store, self.window_bytes = store, window_bytes
        self.order: list[Parked] = []
        """In the order of first use."""
        self.here_bytes = self.peak_bytes = 0
        """Of parameters that are not kept."""
        self.waited_s = 0.0
        self._of_storage: dict[int, Parked] = {}
        self._frozen: list[Parked] = []

    def add(self, parked: Parked) -> None:
        """Take on a parameter whose values are here."""
        parked.residence = self
        self._of_storage[_storage(parked.local)] = parked
        self._count(parked.num_bytes)

    def find(self, tensor: Tensor) -> Parked | None:
        """Return the parameter that `tensor` is a part of, if it is one that may be away."""
        return self._of_storage.get(_storage(tensor))

    def __iter__(self) -> Iterator[Parked]:
        return iter(self._of_storage.values())

    def need(self, wanted: Iterable[Parked], backward: bool = False) -> None:
        """Return when the parameters are here; read on in the order that is to come."""
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
        """Let a frozen parameter stay while the backward is at it: no update tells when it is done with."""
        if parked in self._frozen:
            self._frozen.remove(parked)
        self._frozen.append(parked)
        while len(self._frozen) > MOST_FROZEN:
            self.let_go(self._frozen.pop(0))

    def end_backward(self) -> None:
        """Let go of the frozen parameters that the backward has read."""
        while self._frozen:
            self.let_go(self._frozen.pop())

    def _read_ahead(self, last: Parked, backward: bool) -> None:
        """Begin to read the next ones after `last` while they fit into half of the window; the rest is the updates'."""
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
        """Begin to bring a parameter in, unless it is here or on its way."""
        if not parked.is_here and parked.coming is None:
            parked.fill()
            self._count(parked.num_bytes)
            parked.coming = self.store.read(parked.key, parked.local.detach())

    def let_go(self, parked: Parked) -> None:
        """Empty a parameter whose values are on the disk."""
        if parked.is_kept or not (parked.is_here or parked.coming is not None):
            return
        parked.arrived()
        parked.empty()
        self._count(-parked.num_bytes)

    def keep(self, parked: Parked) -> None:
        """Let a parameter that is here stay for good."""
        parked.is_kept = True
        self._count(-parked.num_bytes)

    def wanted_first(self, parked: Parked, by_backward: bool) -> bool:
        """Tell whether what comes next wants `parked` so soon that it stays: among the ends of the order that fit a quarter."""
        if parked.place < 0:
            return False
        before = self.order[parked.place :] if by_backward else self.order[: parked.place + 1]
        return sum(each.num_bytes for each in before if not each.is_kept) <= self.window_bytes // 4

    def _count(self, num_bytes: int) -> None:
        self.here_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.here_bytes)


class Reads:
    """The parameters that each instruction of a program reads: what the program's executor asks (`rank.offload.Elsewhere`)."""

    def __init__(
        self, residence: Residence, executor: Executor, names: Mapping[int, Parked], direct: Container[int]
    ) -> None:
        instructions = executor.local.instructions
        self.direct = direct
        self.residence, self.frees = residence, executor.frees
        self.by_instruction = [
            list(dict.fromkeys(names[v] for v in each.inputs if v in names)) for each in instructions
        ]
        self.inputs, self.outputs = [each.inputs for each in instructions], [each.outputs for each in instructions]
        self.counts = Counter(parked for each in self.by_instruction for parked in each)

    def begin(self) -> Uses:
        """Follow one forward."""
        return Uses(self)

    def need(self, index: int) -> None:
        """See that what instruction `index` reads is here, where the backward runs it again."""
        self.residence.need(self.by_instruction[index], backward=True)

    def find(self, tensor: Tensor) -> Parked | None:
        """Return the parameter that `tensor` is a part of."""
        return self.residence.find(tensor)


class Uses:
    """Follows one forward: which values stand on a parameter's storage, and after which instruction none does any more."""

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self.to_come = reads.counts.copy()
        self.opened: set[int] = set()
        self.aliases: dict[int, Parked] = {}
        self.standing: Counter[Parked] = Counter()

    def open(self, values: Iterable[int], env: dict[int, Any], rest: Plain) -> None:
        """Put the rank's part in place of those of `values` that are parameters at rest."""
        for value in values:
            if value in self.reads.direct and value in env and value not in self.opened:
                self.opened.add(value)
                env[value] = rest.part(env[value])

    def before(self, index: int, env: dict[int, Any], rest: Plain) -> None:
        """See that what instruction `index` reads is here and open."""
        self.reads.residence.need(self.reads.by_instruction[index])
        self.open(self.reads.inputs[index], env, rest)

    def after(self, index: int, env: dict[int, Any]) -> None:
        """Note the new values of instruction `index`, and let go of what nothing reads any more."""
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
