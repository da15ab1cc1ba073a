"""A rank's part of a global batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..artifacts import Plan, UserError
from ..capture._torch_private import flatten_batch
from ..capture.layout import REPLICATE, Layout, Slot, local_shape
from .entries import check_entries
from .regions import region_of
from .sharding import own_part


def shard_batch(plan: Plan, batch: Mapping[str, Any] | Sequence[Any], coords: Sequence[int] | None = None) -> Any:
    """Return the part of a global `batch` that the rank at `coords` works on (default: this rank).

    A batch of a loader with `plan.sampler` holds this rank's rows already; of that, what else the plan splits is cut. Of a
    plan with micro-batches, which are consecutive rows of the batch, the rank has its part of the first, then of the second …

    Raises `UserError` when an entry is missing, unknown to the plan, or of another shape or dtype than planned; and when what
    is no tensor differs from what the plan was made with.
    """
    mesh = tuple(plan.mesh.values())
    here = tuple(coords) if coords is not None else coordinates(mesh)
    check_entries(plan, batch)
    named, rebuild = flatten_batch(batch)
    num_rows = len(own_rows(plan, here))
    return rebuild(
        [_part(plan, name, leaf, here, num_rows) if isinstance(leaf, Tensor) else leaf for name, leaf in named]
    )


def micro_parts(plan: Plan, leaf: Tensor, name: str) -> list[Tensor]:
    """Return, for each micro-batch, its rows of this rank's part `leaf` of the entry `name`."""
    num = plan.micro_batches
    if plan.micro_batch()[name].shape == plan.batch[name].shape:
        return [leaf] * num
    size = leaf.shape[0] // num
    return [leaf.narrow(0, k * size, size) for k in range(num)]


def own_rows(plan: Plan, coords: Sequence[int]) -> list[int]:
    """Return which rows of the global batch the rank at `coords` needs: all, where its entries do not agree."""
    mesh = tuple(plan.mesh.values())
    found: set[tuple[int, ...]] = set()
    size = global_batch_size(plan)
    each = size // plan.micro_batches
    for entry in plan.micro_batch().values():
        if entry.shape and entry.shape[0] == each:
            text = [part if _splits_rows(part) else "R" for part in entry.layout]
            boxes = region_of(entry.shape, *entry_slots(entry.shape, text), mesh, coords).boxes
            found.add(tuple(row for box in boxes for row in range(box.offset[0], box.offset[0] + box.size[0])))
    if len(found) != 1:
        return list(range(size))
    rows = found.pop()
    return [k * each + row for k in range(plan.micro_batches) for row in rows]


def global_batch_size(plan: Plan) -> int:
    """Return how many examples a batch of the plan holds, over all ranks."""
    return next((entry.shape[0] for entry in plan.batch.values() if entry.shape), 1)


def _splits_rows(part: str) -> bool:
    return part == "S0" or part.startswith("S0.")


def coordinates(mesh: Sequence[int]) -> tuple[int, ...]:
    """Return this rank's place on a mesh, outermost axis first."""
    from ..launch import rank

    index, found = rank(), []
    for size in reversed(mesh):
        found.append(index % size)
        index //= size
    return tuple(reversed(found))


def _part(plan: Plan, name: str, leaf: Tensor, coords: Sequence[int], num_rows: int) -> Tensor:
    entry, mesh = plan.batch.get(name), tuple(plan.mesh.values())
    if entry is None:
        return leaf
    text: Sequence[str] = entry.layout
    if plan.micro_batch()[name].shape != entry.shape == tuple(leaf.shape):
        pieces = micro_parts(plan, leaf, name)
        slots, layout = entry_slots(pieces[0].shape, text)
        return torch.cat([own_part(piece, slots, layout, mesh, coords) for piece in pieces])
    if tuple(leaf.shape) != entry.shape:
        if tuple(leaf.shape) != (num_rows, *entry.shape[1:]):
            raise UserError(
                f"a batch entry {name} of shape {list(entry.shape)} is needed by this plan, or this rank's {num_rows} rows of "
                f"it; got {list(leaf.shape)}; drop or pad a short last batch (plan.sampler), or plan for the other shape"
            )
        text = ["R" if _splits_rows(part) else part for part in text]
    slots, layout = entry_slots(leaf.shape, text)
    return own_part(leaf, slots, layout, mesh, coords)


def entry_slots(shape: Sequence[int], text: Sequence[str]) -> tuple[list[Slot], Layout]:
    """Read the layout of a batch entry, with the factors that it names."""
    factors: dict[int, list[int]] = {}
    for part in text:
        if part.startswith("S") and "/" in part:
            dim = int(part[1:].split(".")[0])
            factors[dim] = [int(size) for size in part.split("/")[1].split(".")]
    slots: list[Slot] = []
    start: dict[int, int] = {}
    for dim, size in enumerate(shape):
        start[dim] = len(slots)
        slots += [Slot(dim, own) for own in factors.get(dim, [size] if size != 1 else [])]
    return slots, tuple(_slot(part, start) for part in text)


def _slot(part: str, start: dict[int, int]) -> int:
    if not part.startswith("S"):
        return REPLICATE
    dim, _, rest = part[1:].partition(".")
    return start[int(dim)] + (int(rest.split("/")[0]) if rest else 0)


def check_part(plan: Plan, plan_shape: Sequence[int], slots: Sequence[Slot], layout: Layout, leaf: Tensor, name: str,
               mesh: Sequence[int], coords: Sequence[int]) -> None:  # fmt: skip
    """Raise `UserError` unless `leaf` is the rank's part of the entry `name`."""
    wanted, whole = local_shape(plan_shape, slots, layout, mesh, coords), plan.batch[name].shape
    if whole != tuple(plan_shape):
        wanted = (plan.micro_batches * wanted[0], *wanted[1:])
    if tuple(leaf.shape) == wanted:
        return
    hint = "pass plan.shard_batch(batch)" if tuple(leaf.shape) == whole else "plan for the other shape"
    raise UserError(f"this rank's part of {name} is needed, shape {list(wanted)}; got {list(leaf.shape)}; {hint}")


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`."""
    named, rebuild = flatten_batch(batch)
    return rebuild([leaf.to(device) if isinstance(leaf, Tensor) else leaf for _, leaf in named])
