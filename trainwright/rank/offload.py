"""Offloads saved tensors from the device between the forward and the backward.

    forward    a storage that the plan offloads is handed to the store when autograd first saves it; the device's copy
               goes as soon as the forward is done with it and it no longer counts as in flight
    backward   the storage comes back when it is first asked for, or ahead of that, the last to leave first

At most `in_flight_bytes` have left and still stand on the device, and at most as many stand there before they are asked
for. What is let go, and what is fetched ahead, follows from the program alone, never from how fast the store is: so a
simulation holds at each point what a run holds, and a store that is too slow makes the step wait, not grow.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .buckets import Plain

MIN_BYTES = 64
"""Storages below this stay on the device: scalars and empty parts."""


class OffloadStore(Protocol):
    """Holds offloaded bytes. The store defines its tickets; the space is free again when the ticket dies."""

    def write(self, data: Tensor) -> Any:
        """Begin to copy the one-dimensional `data`, which stays as it is until `written`, and return a ticket."""

    def written(self, ticket: Any) -> None:
        """Wait until the copy is made."""

    def read(self, ticket: Any, into: Tensor) -> None:
        """Begin to copy the contents back into `into`."""

    def arrived(self, ticket: Any) -> None:
        """Wait until the contents have arrived."""


class Uses(Protocol):
    """Follows one forward of a program whose parameters rest elsewhere."""

    def open(self, values: Iterable[int], env: dict[int, Any], rest: Plain) -> None:
        """Put the rank's part in place of those of `values` that are parameters at rest.

        Its part of the graph begins here: so its gradient comes when the backward is done with the region, not after all else.
        """

    def before(self, index: int, env: dict[int, Any], rest: Plain) -> None:
        """See that what instruction `index` reads is here and open."""

    def after(self, index: int, env: dict[int, Any]) -> None:
        """Note what instruction `index` made; what nothing reads any more may go."""


class Elsewhere(Protocol):
    """The parameters of a program that rest off the device and come for what reads them."""

    def begin(self) -> Uses:
        """Follow one forward."""

    def need(self, index: int) -> None:
        """See that what instruction `index` reads is here, where the backward runs it again."""

    def find(self, tensor: Tensor) -> Any:
        """Return what `fetch`es the storage that `tensor` is a part of, one-dimensional; None for what stays here."""


class CountingStore:
    """Moves nothing and counts what would be moved: the store of simulations."""

    def __init__(self, moved: Callable[[int], int] = int) -> None:
        """`moved` tells the bytes that a transfer of so many bytes moves."""
        self._moved = moved
        self.num_bytes = self.num_transfers = 0
        """Both count one direction alone: each storage that leaves comes back."""

    def write(self, data: Tensor) -> Any:
        self.num_bytes += self._moved(data.numel() * data.element_size())
        self.num_transfers += 1

    def written(self, ticket: Any) -> None:
        pass

    def read(self, ticket: Any, into: Tensor) -> None:
        pass

    def arrived(self, ticket: Any) -> None:
        pass


@dataclass(eq=False)
class OffloadedStorage:
    """One offloaded storage; the saved tensors that lie in it hold a reference to it."""

    run: OffloadRun
    num_elements: int
    dtype: torch.dtype
    device: torch.device
    num_bytes: int
    ticket: Any = None
    has_left: bool = False
    last_save: int = 0
    waiting: int = 0
    """The number of saved tensors that still need the contents."""
    buffer: Tensor | None = None
    was_asked: bool = False

    def fetch(self, place: Any = None) -> Tensor:
        """Return the contents, one-dimensional; the last reader that waits for them releases them."""
        return self.run.fetch(self)


class OffloadRun:
    """Tracks the storages that one forward offloads, until its backward has fetched them."""

    def __init__(self, store: OffloadStore | None, in_flight_bytes: int, elsewhere: Elsewhere | None = None) -> None:
        self._store, self.in_flight_bytes, self.elsewhere = store, in_flight_bytes, elsewhere
        self._known: dict[int, tuple[StorageWeakRef, OffloadedStorage]] = {}
        self._left: list[weakref.ref[OffloadedStorage]] = []
        self._leaving: deque[tuple[OffloadedStorage, Tensor]] = deque()
        self._leaving_bytes = 0
        self._num_saves = 0
        self._to_come: deque[weakref.ref[OffloadedStorage]] | None = None
        self._ahead_bytes = 0

    @property
    def store(self) -> OffloadStore:
        """Return what takes the storages that leave; parameters that rest elsewhere need none."""
        assert self._store is not None
        return self._store

    # Forward

    def register(self, tensor: Tensor) -> OffloadedStorage:
        """Register the storage of `tensor` to be offloaded when autograd saves it."""
        storage = StorageWeakRef(tensor.untyped_storage())
        num_bytes = tensor.untyped_storage().nbytes()
        item = OffloadedStorage(self, num_bytes // tensor.element_size(), tensor.dtype, tensor.device, num_bytes)
        self._known[storage.cdata] = (storage, item)
        return item

    def find(self, tensor: Tensor) -> Any:
        """Return the entry of the storage of `tensor` if it is offloaded or rests elsewhere; tiny storages stay."""
        if self.elsewhere is not None and (item := self.elsewhere.find(tensor)) is not None:
            return item
        storage, item = self._known.get(StorageWeakRef(tensor.untyped_storage()).cdata, (None, None))
        if storage is None or item is None or storage.expired() or item.dtype != tensor.dtype:
            return None
        return item if item.num_bytes >= MIN_BYTES else None

    def save(self, item: Any, tensor: Tensor) -> None:
        """Count one more saved tensor that lies in `item`; the first one starts the copy off the device."""
        if not isinstance(item, OffloadedStorage):
            return  # it comes when it is fetched, from where it rests
        self._num_saves += 1
        item.last_save = self._num_saves
        item.waiting += 1
        if item.has_left:
            return
        item.has_left = True
        whole = tensor.detach().as_strided((item.num_elements,), (1,), 0)
        item.ticket = self.store.write(whole)
        self._left.append(weakref.ref(item))
        self._leaving.append((item, whole))
        self._leaving_bytes += item.num_bytes
        while self._leaving_bytes > self.in_flight_bytes:
            self._finish_oldest()

    def settle(self) -> None:
        """Wait for all copies in flight, and release the device's memory."""
        while self._leaving:
            self._finish_oldest()

    def end_forward(self) -> None:
        """Settle, and drop the registry: from here on saved tensors refer to the run, and the run refers to none of them."""
        self.settle()
        self._known.clear()

    def _finish_oldest(self) -> None:
        item, _ = self._leaving.popleft()
        self.store.written(item.ticket)
        self._leaving_bytes -= item.num_bytes

    # Backward

    def fetch(self, item: OffloadedStorage) -> Tensor:
        """Return the contents of `item`, and prefetch the storages that the backward asks for next."""
        self.settle()
        if item.buffer is None:
            self._send_for(item)
        elif not item.was_asked:
            self._ahead_bytes -= item.num_bytes
        is_first, item.was_asked = not item.was_asked, True
        self.store.arrived(item.ticket)
        contents = item.buffer
        assert contents is not None
        item.waiting -= 1
        if item.waiting <= 0:
            item.buffer = None
        if is_first:
            self._fetch_ahead()
        return contents

    def _send_for(self, item: OffloadedStorage) -> None:
        item.buffer = torch.empty(item.num_elements, dtype=item.dtype, device=item.device)
        self.store.read(item.ticket, item.buffer)

    def _fetch_ahead(self) -> None:
        """Prefetch the storages that were saved last and not yet asked for, while `in_flight_bytes` allows it."""
        if self._to_come is None:
            items = [item for reference in self._left if (item := reference()) is not None]
            items.sort(key=lambda item: -item.last_save)
            self._to_come = deque(weakref.ref(item) for item in items)
        while self._to_come:
            item = self._to_come[0]()
            if item is not None and not item.was_asked:
                if self._ahead_bytes + item.num_bytes > self.in_flight_bytes:
                    return
                self._send_for(item)
                self._ahead_bytes += item.num_bytes
            self._to_come.popleft()
