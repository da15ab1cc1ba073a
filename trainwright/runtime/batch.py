"""Cuts a global batch into each rank's part.

A plan fixes a batch's names, dtypes and largest shape. A global batch may be smaller in any dim: fewer rows, a shorter
sequence. From its part alone a rank could not tell (seven rows over four ranks are 2, 2, 2 and 1), so each tensor of a
part carries the shapes of the whole batch, which the module reads.

    Cut          global shapes → each entry's layout, micro-batches, and a rank's local shapes
    shard_batch  global batch, or this rank's rows of one → this rank's part, marked
    shapes_of    a rank's part → the global shapes
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..artifacts import BatchEntry, Plan, UserError
from ..artifacts.plan import names_of_batch
from ..program.layout import REPLICATE, Layout, Slot, local_shape
from ..program.other_shapes import entry_layout
from ..torch_internals.private import flatten_batch
from .entries import check_entries, check_within, rows_meant
from .extents import extent_of
from .sharding import own_part

Shapes = dict[str, tuple[int, ...]]
"""The global shape of every entry of a batch, in the plan's order."""
_MARK = "_trainwright_shapes"


def shard_batch(
    plan: Plan, batch: Mapping[str, Any] | Sequence[Any], coords: Sequence[int] | None = None, rows: str | None = None
) -> Any:
    """Return the part of a global `batch` that the rank at `coords` works on (default: this rank).

    The batch may be smaller than planned in any dim. Of a plan with micro-batches, which are consecutive rows of the batch,
    the rank has its part of the first, then of the second …

    rows: `all`: `batch` is the whole global batch, the same on every rank; `own`: it holds this rank's rows of a batch of the
    planned shape, and what else the plan splits is cut. By default it is taken for whole where it has more rows than any rank
    has of a planned one, or for what a loader with `plan.sampler` gives; where it could be either, it is refused.

    Raises `UserError` when an entry is missing, unknown to the plan, of another dtype or larger than planned; and when what
    is no tensor differs from what the plan was made with.
    """
    mesh = tuple(plan.inner_mesh.values())
    here = tuple(coords) if coords is not None else coordinates(mesh)
    tensors = check_entries(plan, batch)
    shapes: Shapes = {name: tuple(leaf.shape) for name, leaf in tensors.items()}
    own = _are_own(plan, shapes, here, rows)
    cut = planned_cut(plan) if own else Cut(plan, shapes)
    if own:
        _check_own(plan, shapes, here)
    else:
        check_within(plan, shapes)
    named, rebuild = flatten_batch(batch)
    return rebuild([cut.part(name, leaf, here, own) if isinstance(leaf, Tensor) else leaf for name, leaf in named])


def _are_own(plan: Plan, shapes: Shapes, coords: Sequence[int], rows: str | None) -> bool:
    """Return whether a batch of `shapes` holds this rank's rows alone."""
    if rows not in (None, "all", "own"):
        raise UserError(
            f'rows of a batch are "all" or "own", or None to tell by their number; got {rows!r}; choose one'
        )
    if rows is not None:
        return rows == "own" and shapes != planned_shapes(plan)
    num, whole = rows_in(plan, shapes), global_batch_size(plan)
    if num >= whole:
        return False
    most = len(own_rows(plan, (0,) * len(plan.inner_mesh)))
    return most < whole and rows_meant(plan, num, len(own_rows(plan, coords)), most) == "own"


def _check_own(plan: Plan, shapes: Shapes, coords: Sequence[int]) -> None:
    num_rows, own = len(own_rows(plan, coords)), names_of_batch(planned_shapes(plan))
    for name, shape in planned_shapes(plan).items():
        wanted = (num_rows, *shape[1:]) if name in own else shape
        if shapes[name] not in (wanted, shape):
            raise UserError(
                f"this rank's {num_rows} rows of the batch entry {name}, of shape {list(wanted)}, are needed; got "
                f'{list(shapes[name])}; give the whole global batch with rows="all" where shapes vary'
            )


def own_rows(plan: Plan, coords: Sequence[int]) -> list[int]:
    """Return the rows of a batch of the planned shape that the rank at `coords` needs: all, where entries are split differently."""
    mesh = tuple(plan.inner_mesh.values())
    found: set[tuple[int, ...]] = set()
    size = global_batch_size(plan)
    each = size // plan.micro_batches
    for entry in plan.micro_batch().values():
        if entry.shape and entry.shape[0] == each:
            text = [part if _splits_rows(part) else "R" for part in entry.layout]
            boxes = extent_of(entry.shape, *entry_slots(entry.shape, text), mesh, coords).boxes
            found.add(tuple(row for box in boxes for row in range(box.offset[0], box.offset[0] + box.size[0])))
    if len(found) != 1:
        return list(range(size))
    rows = found.pop()
    return [k * each + row for k in range(plan.micro_batches) for row in rows]


def planned_shapes(plan: Plan) -> Shapes:
    """Return the global shapes of the planned batch."""
    return {name: entry.shape for name, entry in plan.batch.items()}


def global_batch_size(plan: Plan) -> int:
    """Return the number of examples in a batch of the plan, over all ranks."""
    return rows_in(plan, planned_shapes(plan))


def rows_in(plan: Plan, shapes: Shapes) -> int:
    """Return the number of examples in a global batch of `shapes`."""
    return next((shapes[name][0] for name, entry in plan.batch.items() if entry.shape), 1)


def _splits_rows(part: str) -> bool:
    return part == "S0" or part.startswith("S0.")


def coordinates(mesh: Sequence[int]) -> tuple[int, ...]:
    """Return this rank's coordinates on a mesh, outermost axis first."""
    from ..launch import rank

    index, found = rank(), []
    for size in reversed(mesh):
        found.append(index % size)
        index //= size
    return tuple(reversed(found))


@dataclass(frozen=True)
class Cut:
    """Describes how a global batch of `shapes` is cut into micro-batches, and these over the ranks."""

    plan: Plan
    shapes: Shapes

    @cached_property
    def num_runs(self) -> int:
        """Return the number of equal micro-batches: the smallest for which none is larger than planned.

        A number of rows without such a divisor, such as a prime, is cut into micro-batches of one row.
        """
        if self.plan.micro_batches == 1:
            return 1
        rows, most = rows_in(self.plan, self.shapes), global_batch_size(self.plan) // self.plan.micro_batches
        return next(num for num in range(math.ceil(rows / most), rows + 1) if rows % num == 0)

    @cached_property
    def own(self) -> frozenset[str]:
        """Return the names of the entries that have one row for each example."""
        return names_of_batch(planned_shapes(self.plan))

    def entries(self) -> dict[str, BatchEntry]:
        """Return the entries of one micro-batch, with their layouts."""
        found = {}
        for name, planned in self.plan.micro_batch().items():
            shape = self.shapes[name]
            if name in self.own:
                shape = (shape[0] // self.num_runs, *shape[1:])
            layout = entry_layout(planned, shape)
            found[name] = BatchEntry(shape=shape, dtype=planned.dtype, layout=layout)
        return found

    @cached_property
    def _entries(self) -> dict[str, BatchEntry]:
        return self.entries()

    def pieces(self, name: str, leaf: Tensor) -> list[Tensor]:
        """Return, for each micro-batch, its rows of `leaf`, which is the whole entry `name` or a rank's part of it."""
        if self.num_runs == 1 or name not in self.own:
            return [leaf] * self.num_runs
        size = leaf.shape[0] // self.num_runs
        return [leaf.narrow(0, k * size, size) for k in range(self.num_runs)]

    def part(self, name: str, leaf: Tensor, coords: Sequence[int], own: bool) -> Tensor:
        """Return the rank's part of the entry `name`, marked with the batch's shapes; with `own`, `leaf` may be its rows alone."""
        mesh, text = tuple(self.plan.inner_mesh.values()), self._entries[name].layout
        if own and tuple(leaf.shape) != self.shapes[name]:
            text = tuple("R" if _splits_rows(part) else part for part in text)
            pieces = [leaf]
        else:
            pieces = self.pieces(name, leaf) if name in self.own else [leaf]
        slots, layout = entry_slots(pieces[0].shape, text)
        parts = [own_part(piece, slots, layout, mesh, coords) for piece in pieces]
        found = parts[0] if len(parts) == 1 else torch.cat(parts)
        setattr(found, _MARK, self.shapes)
        return found

    def local_shape(self, name: str, coords: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the rank's part of the entry `name`, all micro-batches together."""
        entry, mesh = self._entries[name], tuple(self.plan.inner_mesh.values())
        shape = local_shape(entry.shape, *entry_slots(entry.shape, entry.layout), mesh, coords)
        return (self.num_runs * shape[0], *shape[1:]) if name in self.own else shape

    def is_whole(self) -> bool:
        """Return True if every rank's part is the whole batch."""
        sizes = tuple(self.plan.inner_mesh.values())
        return all(
            part == "R" or size == 1 for entry in self.plan.batch.values() for part, size in zip(entry.layout, sizes)
        )


def planned_cut(plan: Plan) -> Cut:
    """Return the cut of a batch of the planned shape."""
    return Cut(plan, planned_shapes(plan))


def shapes_of(plan: Plan, part: Mapping[str, Tensor]) -> Shapes:
    """Return the global shapes of the batch of which `part` is this rank's part: those that it is marked with, or the planned ones.

    Raises `UserError` where its tensors are marked as parts of several batches.
    """
    marks = [mark for mark in (getattr(leaf, _MARK, None) for leaf in part.values()) if mark is not None]
    if any(mark != marks[0] for mark in marks):
        raise UserError(
            "the parts of one batch are needed; got some of a batch of shapes "
            f"{_text(marks[0])} and some of another; pass what one call of plan.shard_batch returns"
        )
    if marks:
        return dict(marks[0])
    whole = {name: tuple(leaf.shape) for name, leaf in part.items()}
    return whole if planned_cut(plan).is_whole() else planned_shapes(plan)


def _text(shapes: Shapes) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())


def entry_slots(shape: Sequence[int], text: Sequence[str]) -> tuple[list[Slot], Layout]:
    """Return the slots and the layout of a batch entry, parsed from its text, which names the factors of split dims."""
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


def checked_part(cut: Cut, part: Mapping[str, Tensor], coords: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the entries of a rank's part by name; raise `UserError` for one whose shape is not the rank's in this cut."""
    for name, leaf in part.items():
        wanted = cut.local_shape(name, coords)
        if tuple(leaf.shape) != wanted:
            hint = (
                "pass plan.shard_batch(batch), as it returned it: a rank's part alone does not tell the batch's shape"
            )
            raise UserError(
                f"this rank's part of {name} is needed, shape {list(wanted)} of a batch entry {list(cut.shapes[name])}; got "
                f"{list(leaf.shape)}; {hint}"
            )
        yield name, leaf


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with its tensors on `device`."""
    named, rebuild = flatten_batch(batch)
    return rebuild([leaf.to(device) if isinstance(leaf, Tensor) else leaf for _, leaf in named])
