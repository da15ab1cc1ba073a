"""Runs updates during the backward: for each gradient, other threads read the states, step the parameter and write both.

    backward     … │ grad of layer i arrives │ layer i−1 … │
    reads                                    │ states of i │ states of i−1 …
    worker                                                 │ step of i    │ step of i−1 …
    writes                                                                │ values and states of i …

Each parameter is stepped by the optimizer's own `step` over that parameter alone, so the result is the optimizer's, bit
for bit. The bytes that wait (gradients, values, states) are bounded: a backward that is faster than the tier waits for it. A
write never delays a read: writes have threads of their own, and on disks go to the other slot of the item.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ...rank.offload_states import with_groups
from ...tiers import Copy, MemoryStore, TierStore
from .lane import Lane
from .residence import Parked


@dataclass(frozen=True)
class StateForm:
    """The dtype and shape with which a state on the disk is restored to a tensor."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        """Return the state's size."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(eq=False)
class _Pending:
    """One update under way. The calling thread lets go of what it holds: released by a worker it would miss in the allocator's
    records, which are of that thread, and go at some later time."""

    parked: Parked
    grad: Tensor | None
    states: dict[str, Tensor]
    """The states that are read from the store."""
    reads: list[Copy]
    num_bytes: int
    begun: Any
    """The moment of the device at which its gradient is complete."""
    writes: list[Copy] = field(default_factory=list)
    updated: Any = None
    """The moment of the device at which it is updated."""

    def let_go(self) -> None:
        """Wait until everything is written, and release the gradient and the states."""
        for write in self.writes:
            write.finish()
        self.grad = None
        self.states.clear()


class Updates:
    """Updates parameters one by one on `num_workers` threads, with states that are read from and written to the store.

    `num_bytes`, those waiting or in flight, is at most `window_bytes`, except for a single parameter that is larger.
    """

    def __init__(
        self,
        store: TierStore | MemoryStore,
        optimizer: Optimizer,
        window_bytes: int,
        num_workers: int,
        cores: Sequence[int] | None,
        lane: Lane,
    ) -> None:
        self.store, self.optimizer, self.window_bytes, self.lane = store, optimizer, window_bytes, lane
        self.group_of = {param: group for group in optimizer.param_groups for param in group["params"]}
        self.forms: dict[str, dict[str, StateForm]] = {}
        """By parameter, the forms of its states on the disk."""
        self.expected_bytes: dict[str, int] = {}
        """The bytes of the states that its first step makes, by parameter, where known."""
        self.kept: dict[str, dict[str, Tensor]] = {}
        """The states of the parameters that stay in memory, by parameter."""
        self.is_committing = True
        self.waited_s = self.busy_s = 0.0
        self.num_bytes = self.peak_bytes = 0
        self._pending: deque[tuple[Future[None], _Pending]] = deque()
        self._lock = threading.Lock()
        self._step = type(optimizer).step
        self._step = getattr(
            self._step, "__wrapped__", self._step
        )  # without the hooks, which torch has put around the step
        self._workers = ThreadPoolExecutor(
            num_workers, thread_name_prefix="trainwright-tier-update", initializer=_settle_on, initargs=(cores,)
        )

    def step_of(self, optimizer: Optimizer) -> None:
        """Run the optimizer's own step, without torch's hooks around it."""
        self._step(optimizer)

    def keep(self, parked: Parked) -> None:
        """Keep the states of a parameter in memory; those on the disk are read."""
        parked.keeps_states, self.kept[parked.name] = True, {}
        for name, form in self.forms.get(parked.name, {}).items():
            self.kept[parked.name][name] = self._empty(form)
            self.store.read(state_key(parked, name), self.kept[parked.name][name]).wait()

    def write_kept(self, parked: Iterable[Parked]) -> None:
        """Write the kept parameters and states, which steps without a commit do not write."""
        writes: list[Copy] = []
        for each in parked:
            if each.is_trained and each.keeps_states:
                writes += self.write_states(each, self.kept.get(each.name, {}))
            if each.is_trained and each.is_kept:
                writes.append(self._write_values(each))
        for write in writes:
            write.wait()

    def begin(self, parked: Parked, grad: Tensor, from_store: bool = False) -> None:
        """Start the update of one parameter from its gradient; wait first while too many bytes are in flight.

        from_store: the gradient's values are read from the store too.
        """
        forms = self.forms.get(parked.name, {})
        size = local_of(grad).numel() * grad.element_size()
        if not parked.keeps_states:
            size += sum(form.num_bytes for form in forms.values()) or self.expected_bytes.get(parked.name, 0)
        while self._pending and self.num_bytes + size > self.window_bytes:
            self._finish_oldest()
        self.num_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        grad = alone(parked, grad)
        parked.residence.send_for(parked)
        parked.is_updating = True
        states = {name: self._empty(form) for name, form in forms.items() if not parked.keeps_states}
        reads = [self.store.read(state_key(parked, name), state) for name, state in states.items()]
        if from_store:
            reads.append(self.store.read(f"grad.{parked.name}", local_of(grad)))
        pending = _Pending(parked, grad, states, reads, size, self.lane.now())
        self._pending.append((self._workers.submit(self._update, pending), pending))
        while self._pending and self._is_over(*self._pending[0]):
            self._finish_oldest()

    def finish(self) -> None:
        """Wait until all started updates are computed and written."""
        while self._pending:
            self._finish_oldest()

    def close(self) -> None:
        """Stop the threads."""
        self._workers.shutdown(wait=True, cancel_futures=True)

    def _empty(self, form: StateForm) -> Tensor:
        return torch.empty(form.shape, dtype=form.dtype, device=self.lane.device)

    def _is_over(self, future: Future[None], pending: _Pending) -> bool:
        if not future.done():
            return False
        is_written = all(each.is_done for each in pending.writes) and self.lane.is_over(pending.updated)
        return future.exception() is not None or is_written

    def _finish_oldest(self) -> None:
        future, pending = self._pending.popleft()
        parked, began = pending.parked, time.perf_counter()
        future.result()
        self.lane.finish(pending.updated)
        pending.let_go()
        self.waited_s += time.perf_counter() - began
        self.num_bytes -= pending.num_bytes
        if not parked.residence.wanted_first(parked, by_backward=False):
            parked.residence.let_go(parked)

    # On a worker

    def _update(self, pending: _Pending) -> None:
        with self.lane.running(pending.begun):
            self._update_here(pending)

    def _update_here(self, pending: _Pending) -> None:
        for read in pending.reads:
            read.wait()
        parked = pending.parked
        parked.arrived()
        began = time.perf_counter()
        param, held = parked.param, self.optimizer.state
        states = self.kept.get(parked.name, {}) if parked.keeps_states else pending.states
        if states:
            held[param] = {
                name: like(parked, states[name]) if name in states else value for name, value in held[param].items()
            }
        assert pending.grad is not None
        self._step_alone(param, pending.grad)
        leaving = {name: local_of(value) for name, value in held.get(param, {}).items() if rests(value)}
        for name in leaving:
            held[param][name] = None  # its place in the order stays
        if parked.keeps_states:
            self.kept[parked.name] = leaving
        pending.updated = self.lane.now()
        with self._lock:
            self.busy_s += time.perf_counter() - began
        if self.is_committing or not parked.keeps_states:
            pending.writes += self.write_states(parked, leaving)
        if self.is_committing or not parked.is_kept:
            pending.writes.append(self._write_values(parked))

    def _step_alone(self, param: nn.Parameter, grad: Tensor) -> None:
        """Step one parameter under a stand-in, which alone has its gradient: nothing that the loop does reaches it."""
        stand_in, held = nn.Parameter(param.detach()), self.optimizer.state
        stand_in.__dict__.update(param.__dict__)
        stand_in.grad = grad
        alone = with_groups(self.optimizer, [{**self.group_of[param], "params": [stand_in]}])
        alone.state = defaultdict(dict, {stand_in: held[param]} if param in held else {})
        with torch.no_grad():
            self.step_of(alone)
        stand_in.grad = None
        if stand_in in alone.state:
            held[param] = alone.state[stand_in]

    def _write_values(self, parked: Parked) -> Copy:
        return self.store.write(parked.key, parked.local.detach())

    def write_states(self, parked: Parked, leaving: dict[str, Tensor]) -> list[Copy]:
        """Begin to write the states of a parameter, for which room is made where there is none."""
        forms = {name: StateForm(value.dtype, value.shape) for name, value in leaving.items()}
        with self._lock:
            new = {state_key(parked, name): form.num_bytes for name, form in forms.items()}
            self.store.add({key: size for key, size in new.items() if key not in self.store})
            self.forms[parked.name] = forms
        return [self.store.write(state_key(parked, name), value.contiguous()) for name, value in leaving.items()]


def state_key(parked: Parked, name: str) -> str:
    """Return the key in the store of a parameter's state `name`."""
    return f"state.{parked.name}.{name}"


def rests(value: Any) -> bool:
    """Tell whether a state goes to the disk: a tensor with dims does; counters and other values stay in memory."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() > 0


def like(parked: Parked, local: Tensor) -> Tensor:
    """Return a state as a `DTensor` in its parameter's layout, if it has the parameter's local shape; else unchanged."""
    param = parked.param
    if not hasattr(param, "to_local") or local.shape != parked.local.shape:
        return local
    return type(param).from_local(  # type: ignore[attr-defined, no-any-return]
        local, device_mesh=param.device_mesh, placements=param.placements, run_check=False,  # type: ignore[attr-defined]
        shape=param.shape, stride=param.stride(),
    )  # fmt: skip


def alone(parked: Parked, grad: Tensor) -> Tensor:
    """Return a gradient in memory of its own: reduced gradients may share a buffer, which would stay until the last is gone."""
    local = local_of(grad)
    is_alone = local.untyped_storage().nbytes() == local.numel() * local.element_size()
    return grad if is_alone else like(parked, local.clone(memory_format=torch.contiguous_format))


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


def _settle_on(cores: Sequence[int] | None) -> None:
    """Restrict this thread to the given cores, and its ops to as many threads; None: to one thread."""
    torch.set_num_threads(1 if cores is None else len(cores))
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(threading.get_native_id(), cores)
