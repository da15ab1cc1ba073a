"""Measures the peak of a streamed step on real tensors, or predicts it on fake ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts import Device, UserError
from ..optim.mezo import MeZO
from ..profiler.time import op_seconds
from ..profiler.tracker import MemoryTracker
from ..profiler.values import KnownValues
from ..torch_internals.fakes import fake_like, faked, new_mode
from ..torch_internals.private import flatten, unflatten
from ..torch_internals.trees import tensors_in
from .blocks import Part, find_parts
from .schedule import PartCost
from .streamed import Streamed

OnOp = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
NORMAL_S, BITS_S = 8.4e-9, 2.9e-9
"""The seconds of one drawn normal number and of one for rounding, on one core: measured over ten million of each, and hardly
different on the processors of the last years. They are NumPy's, on the CPU, whatever the device."""


@dataclass(frozen=True)
class StepCost:
    """The memory that a streamed step takes of the device, and the bytes that it moves."""

    peak_bytes: int
    read_bytes: int
    written_bytes: int
    parts: tuple[PartCost, ...]
    """The model's parts in the order in which a step enters them."""
    beside_s: float
    """The seconds of computation before the first part."""

    @property
    def compute_s(self) -> float:
        """Return the seconds of all computation."""
        return self.beside_s + sum(part.update_s + part.use_s for part in self.parts)


def peak_of_step(streamed: Streamed, step: Callable[[], Any], batch: Any = (), on_op: OnOp | None = None) -> int:
    """Return the peak bytes on the device during `step()`: streaming buffers, staying parameters, activations, temporaries.

    The store, which is off the device, and the batch, which is the caller's, are not counted.
    """
    with MemoryTracker(on_op=on_op) as tracker:
        tracker.watch(tensors_in(batch), "input")
        tracker.watch(streamed.device_tensors(), "param")
        tracker.watch(streamed.model.buffers(), "buffer")
        step()
        return tracker.peak_bytes


def predicted_peak(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Any], *, storage: torch.dtype | None = None,
    blocks: Sequence[str] | None = None, exact: bool = False,
) -> int:  # fmt: skip
    """Return the peak of a streamed step of `loss(model, batch)`, simulated on fake tensors, which take no memory.

    model: on any device, meta included; it stays unchanged. The other arguments are those of `Streamed` and `MeZO`.

    >>> model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(30)])
    >>> peak = predicted_peak(model, torch.ones(1, 64), lambda model, x: model(x).sum())
    >>> peak < 4 * 64 * 65 * 7  # bytes of 7 blocks of 30: three, and what moves one
    True
    """
    device = Device(
        name="", kind="cpu", memory_bytes=1, flops_per_s={"fp32": 1.0}, bandwidth_bytes_per_s=1.0, launch_s=0.0
    )
    return cost_of_step(model, batch, loss, device, storage=storage, blocks=blocks, exact=exact).peak_bytes


def cost_of_step(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Any], device: Device, *,
    storage: torch.dtype | None = None, blocks: Sequence[str] | None = None, exact: bool = False,
) -> StepCost:  # fmt: skip
    """Return what a streamed step takes on `device`, simulated on fakes; the other arguments are those of `predicted_peak`.

    The seconds are those of both forwards, of moving parameters along their directions, and of drawing these.
    """
    mode = new_mode()
    leaves, form = flatten(batch)
    fakes = [fake_like(leaf.detach(), mode) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    faked_batch = unflatten(fakes, form)
    clock = _Clock(device)
    with faked(model, mode) as stand_in, KnownValues(mode, fills_memory=False):
        trained = [param for param in stand_in.parameters() if param.requires_grad]
        optimizer = MeZO(trained, exact=exact)
        streamed = Streamed(
            stand_in, optimizer, _Nowhere(), storage=storage, blocks=blocks, in_turns=True,  # there are no losses to compare
            draws=(clock.drawing(None, NORMAL_S), clock.drawing(torch.int32, BITS_S)),
        )  # fmt: skip

        def closure() -> float:
            loss(stand_in, faked_batch)
            return 0.0

        streamed.step(closure)
        before = streamed.resting.num_read, streamed.resting.num_written
        clock.follow(streamed)
        peak = peak_of_step(streamed, lambda: streamed.step(closure), faked_batch, clock.on_op)
        moved = streamed.resting.num_read - before[0], streamed.resting.num_written - before[1]
        return StepCost(peak, *moved, clock.parts(), clock.beside_s)


class _Clock:
    """Counts the seconds of a simulated step by the part that they are spent on, its update apart."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.beside_s = 0.0
        self._parts: dict[Part, tuple[int, list[float]]] = {}
        """By part that was entered, in order: its bytes in the store, and the seconds of its update and of what follows."""
        self._spending: list[float] | None = None
        self._is_updating = False

    def follow(self, streamed: Streamed) -> None:
        """Count by the parts that `streamed` loads from now on."""
        self.beside_s, streamed.loading = 0.0, self._loading

    @contextmanager
    def _loading(self, part: Part, num_bytes: int) -> Iterator[None]:
        _, self._spending = self._parts.setdefault(part, (num_bytes, [0.0, 0.0]))
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count an op."""
        self._count(op_seconds(self.device, func, args, kwargs, out))

    def drawing(self, dtype: torch.dtype | None, seconds: float) -> Callable[[int, tuple[int, ...], int], Tensor]:
        """Return what stands for drawing numbers of `dtype`, which takes `seconds` for each."""

        def draw(num: int, _key: tuple[int, ...], _start: int) -> Tensor:
            self._count(num * seconds)
            return torch.empty(num, dtype=dtype)

        return draw

    def parts(self) -> tuple[PartCost, ...]:
        """Return what was counted, by part."""
        return tuple(PartCost(num_bytes, *seconds) for num_bytes, seconds in self._parts.values())

    def _count(self, seconds: float) -> None:
        if self._spending is None:
            self.beside_s += seconds
        else:
            self._spending[0 if self._is_updating else 1] += seconds


class _Nowhere:
    """A `BlockStore` for fake tensors, which stores nothing."""

    def reserve(self, num_bytes: Mapping[str, int]) -> None:
        """Do nothing."""

    def read(self, name: str, into: Tensor) -> None:
        """Leave `into` unchanged."""

    def write(self, name: str, data: Tensor) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""


def check_fits(
    model: nn.Module, budget_bytes: int | None, predicted_bytes: int | None, *, storage: torch.dtype | None = None,
    blocks: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Raise `UserError` if a step does not fit into the device's budget.

    predicted_bytes: the step's peak, if known. The other arguments are those of `Streamed`.
    """
    if budget_bytes is None:
        return
    used = {name: param.dtype for name, param in model.named_parameters()}
    rests = {name: storage or dtype for name, dtype in used.items()}
    parts = [part for part in find_parts(model, blocks).parts if not part.stays]
    name, size = max(
        ((part.name, 2 * part.layout(rests)[1] + part.layout(used)[1]) for part in parts), key=lambda found: found[1]
    )
    if size > budget_bytes:
        raise UserError(
            f"room for a block three times is needed, {size} bytes for {name}; the budget is {budget_bytes}; raise it, store in "
            "bf16, or cut the model into smaller blocks"
        )
    if predicted_bytes is not None and predicted_bytes > budget_bytes:
        raise UserError(
            f"{predicted_bytes} bytes are needed at the peak of a step; the budget is {budget_bytes}; raise it, store in bf16, or "
            "take a smaller batch"
        )
