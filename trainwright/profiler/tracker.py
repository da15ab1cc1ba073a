"""Tracks the memory of a step by following every storage from its allocation to its release.

A dispatch mode below autograd sees each ATen call; a weak reference on each new storage sees its release. Both work for
real tensors and for fake ones, so the same code measures a run and predicts one:

    live(t)  = Σ bytes of the storages alive after call t (each storage once, however many views it has)
    peak     = max over t of live(t) + workspace(t), the workspace being what the kernel of call t allocates and frees inside

On top of a `FakeTensorMode` no memory is taken and no kernel runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..artifacts import MemoryPoint
from ..torch_internals.private import PlainDispatchMode, local_part
from .caching import CachingAllocator, block_bytes
from .kernels.generator_states import seen_generator_states, seen_resizes
from .kernels.gpu_workspace import gpu_workspace_bytes
from .kernels.workspace import output_bytes, workspace_bytes
from .values import DEVICE_OF

Target = Literal["cpu", "gpu"]
CATEGORIES = ("param", "buffer", "grad", "optimizer", "saved", "other")
_NOT_OPS = ("prim", "profiler")  # what only tensor subclasses ask (`tensor.device`); a profiler's marks
_IN_PLACE_IN_ENGINE = {
    torch.ops.aten.add.Tensor,
    torch.ops.aten.index_put.default,  # an index's gradient
    torch.ops.aten.index_add.default,  # index_select's
    torch.ops.aten.scatter_add.default,  # gather's, cummax's and cummin's
    torch.ops.aten.scatter.src,  # those of what picks along a dim: max, min, median, mode, kthvalue, sort, topk
    torch.ops.aten.put.default,  # take's
    torch.ops.aten.index_fill.int_Tensor,  # trace's
}


@dataclass(slots=True)
class _Storage:
    """The entry of one live storage."""

    num_bytes: int
    category: str
    phase: int
    """The index of the phase (from 0) in which it was allocated."""
    born: int
    """The number of the call, counted from 1, that allocated it."""
    path: str
    reference: Any
    """The weak reference whose callback removes the entry; it must live as long as the entry."""


@dataclass
class Excursion:
    """How far a part of a step rises above what is alive where it begins."""

    num_bytes: int = 0
    leaves_nothing: bool = False
    """True where at its end is alive what was at its beginning: only then it can be repeated."""
    breakdown: dict[str, int] = field(default_factory=dict)
    """The bytes by category, at its peak beyond those at its beginning."""
    num_ops: int = 0
    call: tuple[str, Any, str] = ("", None, "")
    """Phase, op and module at its peak."""
    workspace: int = 0


class MemoryTracker(PlainDispatchMode):
    """Dispatch mode that tracks memory: `live_bytes`, `peak_bytes`, and the call, module and categories of the peak.

    `target` is the machine that is predicted, not the one it runs on: `"cpu"` counts exact sizes and the workspaces of the
    CPU kernels, `"gpu"` rounds each storage to 512 bytes as CUDA's caching allocator does. `timeline=True` keeps a
    point after every call (`timeline`). `on_op(func, args, kwargs, out)` is called after each one.

    Enter it *inside* a `FakeTensorMode`. Tensors that exist before are counted only if `watch` is called with them.

    >>> weight = torch.zeros(1000)
    >>> with MemoryTracker() as tracker:
    ...     tracker.watch([weight], "param")
    ...     with tracker.phase("forward"):
    ...         out = (weight * 2).sum()
    >>> tracker.live_bytes, tracker.peak_bytes
    (4004, 8004)
    """

    def __init__(
        self,
        target: Target = "cpu",
        *,
        timeline: bool = False,
        on_op: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None] | None = None,
    ) -> None:
        super().__init__()
        if target not in ("cpu", "gpu"):
            raise ValueError(f"a target is cpu or gpu; got {target!r}")
        self.target: Target = target
        self.allocator: CachingAllocator | None = None
        """The simulated allocator that is told of every allocation and release; None: storages count by their size."""
        self.pool: Hashable = None
        """The allocator's private pool for all allocations while it is set, as CUDA graphs have one; None: the stream's."""
        self.path = ""
        """The path of the running module, set by the caller; the peak and each storage are labelled with it."""
        self.live_bytes = 0
        self.num_ops = 0
        self.saved_bytes = 0
        self.peak_bytes = 0
        self.peak_breakdown: dict[str, int] = {}
        self.timeline: list[MemoryPoint] = []
        self._on_op = on_op
        self.keep_timeline = timeline
        self._phases: list[str] = []
        self.current_phase = ""
        self._storages: dict[int, _Storage] = {}
        self._by_category = dict.fromkeys(CATEGORIES, 0)
        self._ignored: set[int] = set()
        self._is_blind = False
        self._peak_call: tuple[str, Any, str] = ("", None, "")
        self._peak_workspace = 0
        self._changes: list[tuple[str, str, int]] = []
        """Module, category and bytes of each change since `_base`; kept only with the timeline."""
        self._base: dict[tuple[str, str], int] = {}
        self._num_changes_at_peak = self._peak_op = 0
        self._saved_at_peak: dict[str, int] = {}
        """By module, the bytes that counted as `other` at a peak in the forward and turned out to be saved."""
        self._hooks: list[Any] = []
        self._generator_states = ExitStack()

    # What the caller says

    def watch(self, tensors: Iterable[Tensor], category: str) -> None:
        """Count the storages of `tensors` under `category` from now on; those that are counted already change category.

        Categories: param, buffer, grad, optimizer, saved, other; `input` means: never count these. The gradients of tensors
        watched as `param` move to `grad` by themselves.
        """
        if category != "input" and category not in self._by_category:
            raise ValueError(f"a category is input or one of {', '.join(CATEGORIES)}; got {category!r}")
        for tensor in tensors:
            if category == "param" and tensor.requires_grad and tensor.is_leaf:
                self._hooks.append(tensor.register_post_accumulate_grad_hook(self._on_gradient))
            for storage in _storages(tensor):
                if category == "input":
                    self._ignore(storage)
                else:
                    self._count(storage, category)
        self._raise_peak(0, None)

    def hold(self, num_bytes: int, category: str = "other") -> None:
        """Count bytes that are never freed from now on, such as cuBLAS's workspace, which it allocates once."""
        key = -1 - len(self._storages)
        num_bytes = self._taken(key, num_bytes)
        self._storages[key] = _Storage(num_bytes, category, len(self._phases) - 1, self.num_ops, "", None)
        self.live_bytes += num_bytes
        self._by_category[category] += num_bytes
        self._note("", category, num_bytes)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark the calls inside as `forward`, `backward` or `update`; what `update` leaves alive counts as optimizer state."""
        self._phases.append(name)
        before, self.current_phase = self.current_phase, name
        try:
            yield
        finally:
            self.current_phase = before
            if name == "update":
                self._move_born_in_phase("other", "optimizer")

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Count no tensor that is made inside, neither now nor later."""
        before, self._is_blind = self._is_blind, True
        try:
            yield
        finally:
            self._is_blind = before

    def mark_forward_end(self) -> int:
        """Mark the end of the forward; return its `saved_bytes`, those that it allocated and that are still alive."""
        self._count_as_saved_since_birth()
        self._move_born_in_phase("other", "saved")
        born = len(self._phases) - 1
        self.saved_bytes = sum(entry.num_bytes for entry in self._storages.values() if entry.phase == born)
        return self.saved_bytes

    def reset_peak(self) -> None:
        """Reset the peak, the timeline and the number of ops, so that the next step is measured by itself."""
        self.num_ops = self.peak_bytes = 0
        self.timeline = []
        self._changes, self._base = [], self._by_place()
        self._raise_peak(0, None)

    @contextmanager
    def excursion(self) -> Iterator[Excursion]:
        """Follow what happens inside by itself too: how far it rises above what is alive where it begins, at which op.

        Only where the timeline is not kept.
        """
        before = self._peak_call, self._peak_workspace, self._peak_op, self._saved_at_peak
        peak_bytes, peak_breakdown = self.peak_bytes, self.peak_breakdown
        live_bytes, by_category, num_ops = self.live_bytes, dict(self._by_category), self.num_ops
        found = Excursion()
        self.peak_bytes = 0
        self._raise_peak(0, None)
        yield found
        found.leaves_nothing = self._by_category == by_category
        found.num_bytes, found.num_ops = self.peak_bytes - live_bytes, self.num_ops - num_ops
        found.breakdown = {name: size - by_category[name] for name, size in self.peak_breakdown.items()}
        found.call, found.workspace = self._peak_call, self._peak_workspace
        if peak_bytes >= self.peak_bytes:
            self.peak_bytes, self.peak_breakdown = peak_bytes, peak_breakdown
            self._peak_call, self._peak_workspace, self._peak_op, self._saved_at_peak = before

    def repeat(self, known: Excursion) -> None:
        """Count again what was followed once, at the top of what is alive now."""
        self.num_ops += known.num_ops
        if self.live_bytes + known.num_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes + known.num_bytes
            self.peak_breakdown = {name: size + known.breakdown[name] for name, size in self._by_category.items()}
            self._peak_call, self._peak_workspace = known.call, known.workspace
            self._peak_op, self._saved_at_peak = self.num_ops, {}

    def take_peak(self) -> int:
        """Return the peak so far; the next one begins with what is alive now."""
        found, self.peak_bytes = self.peak_bytes, 0
        self._raise_peak(0, None)
        return found

    def place(self, tensors: Iterable[Tensor], path: str) -> None:
        """Assign `tensors` to the module at `path` instead of the one that was running when they were allocated."""
        for storage in (storage for tensor in tensors for storage in _storages(tensor)):
            entry = self._storages.get(id(storage))
            if entry is not None:
                self._note(entry.path, entry.category, -entry.num_bytes)
                entry.path = path
                self._note(entry.path, entry.category, entry.num_bytes)

    def ran(self, func: Any, made: Iterable[Tensor]) -> None:
        """Count a kernel that no dispatch mode sees, and the tensors that it made; `str(func)` is its name."""
        self.num_ops += 1
        for tensor in made:
            self._count_new(tensor)
        self._raise_peak(0, func)
        if self.keep_timeline:
            self.timeline.append(self._point(func))

    # What the tracker answers

    @property
    def peak_at(self) -> str:
        """Return phase, op and module at the peak: `backward: aten.mm in transformer.h.3.mlp`."""
        phase, func, path = self._peak_call
        if func is None:
            return phase
        return f"{phase}: {packet_name(func)}" + (f" in {path}" if path else "")

    @property
    def live_breakdown(self) -> dict[str, int]:
        """Return the bytes alive now, by category."""
        return dict(self._by_category)

    def saved_by_path(self) -> dict[str, int]:
        """Return the bytes of category `saved` that are alive now, by the module that allocated them."""
        totals: dict[str, int] = {}
        for entry in self._storages.values():
            if entry.category == "saved":
                totals[entry.path] = totals.get(entry.path, 0) + entry.num_bytes
        return totals

    def peak_by_place(self) -> dict[tuple[str, str], int]:
        """Return the bytes alive at the peak by (module, category); the timeline must have been kept since `reset_peak`."""
        totals = dict(self._base)
        for path, category, num_bytes in self._changes[: self._num_changes_at_peak]:
            totals[path, category] = totals.get((path, category), 0) + num_bytes
        for path, num_bytes in self._saved_at_peak.items():
            totals[path, "other"] -= num_bytes
            totals[path, "saved"] = totals.get((path, "saved"), 0) + num_bytes
        place = (self._peak_call[2], "other")
        totals[place] = totals.get(place, 0) + self._peak_workspace
        return {place: num_bytes for place, num_bytes in totals.items() if num_bytes}

    # The dispatch mode

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF and (device := getattr(args[0], "fake_device", None)) is not None:
            return device
        kwargs = kwargs or {}
        if func.namespace in _NOT_OPS:
            return func(*args, **kwargs)
        if any(_is_wrapper(kind) for kind in types):
            return NotImplemented  # its own calls on plain tensors come here next
        out = func(*args, **kwargs)
        self.num_ops += 1
        is_new = self._count_outputs(out)
        if self.target == "cpu":
            self._correct(out, output_bytes(func, args, out))
        workspace = self._workspace(func, args, kwargs, out)
        if (is_new or workspace) and not self._is_in_place_without_tracker(func, args):
            self._raise_peak(workspace, func)
        if self.keep_timeline:
            self.timeline.append(self._point(func))
        if self._on_op is not None:
            self._on_op(func, args, kwargs, out)
        return out

    def __enter__(self):
        self._generator_states.enter_context(seen_generator_states(self._note_new))
        self._generator_states.enter_context(seen_resizes(self._resized))
        return super().__enter__()

    def __exit__(self, *exc_info):
        self._generator_states.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        return super().__exit__(*exc_info)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Update the entry of a storage that was resized, as `fully_shard` does with the storages of gathered parameters."""
        entry = self._storages.get(id(storage))
        if entry is None:
            if id(storage) not in self._ignored:
                self._count(storage, "other")
                self._raise_peak(0, None)
            return
        if self.allocator is not None:
            self.allocator.free(id(storage))
        num_bytes = self._taken(id(storage), storage.nbytes())
        self.live_bytes += num_bytes - entry.num_bytes
        self._by_category[entry.category] += num_bytes - entry.num_bytes
        self._note(entry.path, entry.category, num_bytes - entry.num_bytes)
        entry.num_bytes = num_bytes
        self._raise_peak(0, None)

    def _note_new(self, tensor: Tensor) -> None:
        """Count a tensor on the host that was allocated without the dispatcher."""
        if self.target == "cpu":
            self._count_new(tensor)
            self._raise_peak(0, None)

    def _is_in_place_without_tracker(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Tell whether the engine, which allocates for this call because a dispatch mode is active, would else work in place.

        It accumulates gradients into one of which it has the only reference, unless that is a view; it scatters the
        gradients of what was picked into its own zeros. If nobody else has a reference to the operand, it is released right
        after the call; if somebody has, the next call counts both. So leaving this one call out of the peak is right in
        either case.
        """
        if func not in _IN_PLACE_IN_ENGINE or self.current_phase != "backward" or torch.is_grad_enabled():
            return False
        return isinstance(args[0], Tensor) and not args[0]._is_view()

    def _workspace(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
        if self.target == "cpu":
            return workspace_bytes(func, args, kwargs, out)
        num_bytes = gpu_workspace_bytes(func, args, out)
        if num_bytes and self.allocator is not None:
            num_bytes = self.allocator.allocate("workspace", num_bytes, self._stream())
            self.allocator.free("workspace")
        return num_bytes

    def _count_outputs(self, out: Any) -> bool:
        if isinstance(out, Tensor):
            return self._count_new(out)
        if isinstance(out, (tuple, list)):
            return sum(self._count_outputs(item) for item in out) > 0
        return False

    def _count_new(self, tensor: Tensor) -> bool:
        is_new = False
        if self.target == "gpu" and self.current_phase == "update" and tensor.dim() == 0 and type(tensor) is Tensor:
            return False  # an optimizer's counters stay on the host
        for storage in _storages(tensor):
            if id(storage) not in self._storages and id(storage) not in self._ignored:
                if self._is_blind:
                    self._ignore(storage)
                else:
                    is_new = self._count(storage, "other")
        return is_new

    def _count(self, storage: torch.UntypedStorage, category: str) -> bool:
        """Count `storage` under `category`, or move it there; return whether that added memory."""
        key = id(storage)
        entry = self._storages.get(key)
        if entry is not None:
            self._move(entry, category)
            return False
        num_bytes = self._taken(key, storage.nbytes())
        # The id stays with the storage for its whole life, and the callback ends the entry before it can be reused.
        reference = weakref.ref(storage, lambda _: self._release(key))
        phase = len(self._phases) - 1
        self._storages[key] = _Storage(num_bytes, category, phase, self.num_ops, self.path, reference)
        self.live_bytes += num_bytes
        self._by_category[category] += num_bytes
        self._note(self.path, category, num_bytes)
        return num_bytes > 0

    def _correct(self, out: Any, true_bytes: dict[int, int]) -> None:
        """Set the sizes of outputs, by position, to those that the real kernel allocates."""
        for position, num_bytes in true_bytes.items():
            for storage in _storages(out[position]):
                entry = self._storages[id(storage)]
                self.live_bytes += num_bytes - entry.num_bytes
                self._by_category[entry.category] += num_bytes - entry.num_bytes
                self._note(entry.path, entry.category, num_bytes - entry.num_bytes)
                entry.num_bytes = num_bytes

    def _release(self, key: int) -> None:
        entry = self._storages.pop(key)
        self.live_bytes -= entry.num_bytes
        self._by_category[entry.category] -= entry.num_bytes
        self._note(entry.path, entry.category, -entry.num_bytes)
        if self.allocator is not None:
            self.allocator.free(key)

    def _move(self, entry: _Storage, category: str) -> None:
        self._by_category[entry.category] -= entry.num_bytes
        self._by_category[category] += entry.num_bytes
        self._note(entry.path, entry.category, -entry.num_bytes)
        self._note(entry.path, category, entry.num_bytes)
        entry.category = category

    def _note(self, path: str, category: str, num_bytes: int) -> None:
        if self.keep_timeline:
            self._changes.append((path, category, num_bytes))

    def _by_place(self) -> dict[tuple[str, str], int]:
        totals: dict[tuple[str, str], int] = {}
        for entry in self._storages.values():
            totals[entry.path, entry.category] = totals.get((entry.path, entry.category), 0) + entry.num_bytes
        return totals

    def _move_born_in_phase(self, source: str, category: str) -> None:
        born = len(self._phases) - 1
        for entry in self._storages.values():
            if entry.phase == born and entry.category == source:
                self._move(entry, category)

    def _count_as_saved_since_birth(self) -> None:
        """Correct the forward's categories so far: storages alive at its end count as saved since their allocation."""
        phase, is_peak = len(self._phases) - 1, self._peak_call[0] == self.current_phase
        saved_since: dict[int, int] = {}
        for entry in self._storages.values():
            if entry.phase == phase and entry.category == "other":
                saved_since[entry.born] = saved_since.get(entry.born, 0) + entry.num_bytes
                if is_peak and entry.born <= self._peak_op:
                    self.peak_breakdown["other"] -= entry.num_bytes
                    self.peak_breakdown["saved"] += entry.num_bytes
                    self._saved_at_peak[entry.path] = self._saved_at_peak.get(entry.path, 0) + entry.num_bytes
        saved = 0
        for place, point in enumerate(self.timeline):
            saved += saved_since.get(place + 1, 0)
            sizes = {"saved_bytes": point.saved_bytes + saved, "other_bytes": point.other_bytes - saved}
            self.timeline[place] = point.model_copy(update=sizes)

    def _ignore(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._storages:
            self._release(key)
        self._ignored.add(key)
        weakref.finalize(storage, self._ignored.discard, key)

    def _on_gradient(self, param: Tensor) -> None:
        if param.grad is not None:
            for storage in _storages(param.grad):
                if id(storage) in self._storages:
                    self._move(self._storages[id(storage)], "grad")

    def _taken(self, key: int, num_bytes: int) -> int:
        """Return the bytes that a storage of `num_bytes` takes on the target: with an allocator, the size of its block."""
        if self.allocator is not None:
            return self.allocator.allocate(key, num_bytes, self._stream())
        return num_bytes if self.target == "cpu" else block_bytes(num_bytes)

    def _stream(self) -> Hashable:
        return id(torch.cpu.current_stream()) if self.pool is None else self.pool

    def _raise_peak(self, workspace: int, func: Any) -> None:
        if self.live_bytes + workspace > self.peak_bytes:
            self.peak_bytes = self.live_bytes + workspace
            self.peak_breakdown = dict(self._by_category)
            self.peak_breakdown["other"] += workspace
            self._peak_call = (self.current_phase, func, self.path)
            self._peak_workspace, self._num_changes_at_peak = workspace, len(self._changes)
            self._peak_op, self._saved_at_peak = self.num_ops, {}

    def _point(self, func: Any) -> MemoryPoint:
        by = self._by_category
        return MemoryPoint.model_construct(
            phase=self.current_phase,
            op=packet_name(func),
            path=self.path,
            live_bytes=self.live_bytes,
            param_bytes=by["param"],
            grad_bytes=by["grad"],
            optimizer_bytes=by["optimizer"],
            saved_bytes=by["saved"],
            other_bytes=by["other"] + by["buffer"],
        )


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return a tensor's storages: one; of a sparse tensor, those of indices and values; of a `DTensor`, that of its local part."""
    tensor = local_part(tensor)
    if tensor.layout is torch.strided:
        return [tensor.untyped_storage()]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices().untyped_storage(), tensor._values().untyped_storage()]
    return []


@functools.cache
def _is_wrapper(kind: type) -> bool:
    """Tell whether a tensor type wraps other tensors, as `DTensor` does."""
    return hasattr(kind, "__tensor_flatten__")


def packet_name(func: Any) -> str:
    """Return an op's name without its overload: `aten.mm`."""
    return str(getattr(func, "overloadpacket", func))
