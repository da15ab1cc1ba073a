"""Measures the peak of a streamed step on real tensors, or predicts it on fake ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from .blocks import find_parts
from .streamed import Streamed

OnOp = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
NORMAL_S, BITS_S = 8.4e-9, 2.9e-9
"""The seconds of one drawn normal number and of one for rounding, on one core: measured over ten million of each, and hardly
different on the processors of the last years. They are NumPy's, on the CPU, whatever the device."""


@dataclass(frozen=True)
class StepCost:
    """The memory that a streamed step takes of the device, and the bytes that it moves."""

    peak_bytes: int
    compute_s: float
    read_bytes: int
    written_bytes: int


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

    >>> model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(100)])
    >>> peak = predicted_peak(model, torch.ones(1, 64), lambda model, x: model(x).sum())
    >>> peak < 4 * 64 * 65 * 7  # bytes of 7 blocks of 100: three, and what moves one
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
    drawn, total = Counter[str](), [0.0]

    def on_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        total[0] += op_seconds(device, func, args, kwargs, out)

    mode = new_mode()
    leaves, form = flatten(batch)
    fakes = [fake_like(leaf.detach(), mode) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    faked_batch = unflatten(fakes, form)
    with faked(model, mode) as stand_in, KnownValues(mode, fills_memory=False):
        trained = [param for param in stand_in.parameters() if param.requires_grad]
        optimizer = MeZO(trained, exact=exact)
        streamed = Streamed(
            stand_in, optimizer, _Nowhere(), storage=storage, blocks=blocks,
            draws=(_drawn(None, drawn, "normals"), _drawn(torch.int32, drawn, "bits")),
        )  # fmt: skip

        def closure() -> float:
            loss(stand_in, faked_batch)
            return 0.0

        streamed.step(closure)
        drawn.clear()
        before = streamed.resting.num_read, streamed.resting.num_written
        peak = peak_of_step(streamed, lambda: streamed.step(closure), faked_batch, on_op)
        moved = streamed.resting.num_read - before[0], streamed.resting.num_written - before[1]
        drawn_s = drawn["normals"] * NORMAL_S + drawn["bits"] * BITS_S
        return StepCost(peak, total[0] + drawn_s, *moved)


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


def _drawn(dtype: torch.dtype | None, count: Counter[str], what: str) -> Callable[[int, tuple[int, ...], int], Tensor]:
    def draw(num: int, _key: tuple[int, ...], _start: int) -> Tensor:
        count[what] += num
        return torch.empty(num, dtype=dtype)

    return draw


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
