"""Layouts: for each mesh axis a tensor is split along a slot, replicated, or a partial sum; and one rank's part of it.

A *slot* is one factor of one dim of a tensor, counted major first over the whole shape; `Layout` is one entry a mesh
axis, outermost first: a slot's index, `REPLICATE` or `PARTIAL`. Two axes may split one slot, the outer one first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..artifacts import UserError

REPLICATE, PARTIAL = -1, -2
Layout = tuple[int, ...]


@dataclass(frozen=True)
class Slot:
    """One factor of one dim of a tensor."""

    dim: int
    size: int
    blocked: bool = False


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and stop of part `index` of `size` entries, as `torch.chunk` cuts them: the last parts may be empty.

    >>> [chunk(5, 4, index) for index in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def slot_range(size: int, splits: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return start and stop of a slot of `size` after nested `splits`, each (parts, index), outermost first."""
    start, stop = 0, size
    for parts, index in splits:
        low, high = chunk(stop - start, parts, index)
        start, stop = start + low, start + high
    return start, stop


def local_sizes(slots: Sequence[Slot], layout: Layout, mesh: Sequence[int], coords: Sequence[int] | None) -> list[int]:
    """Return the size of every slot on the rank at `coords`; without them, on the rank that holds most.

    >>> local_sizes([Slot(0, 5), Slot(1, 6)], (0, 1, 0), (2, 3, 2), None)
    [2, 2]
    """
    sizes = [slot.size for slot in slots]
    if not coords:
        for axis, at in enumerate(layout):
            if at >= 0:
                sizes[at] = -(-sizes[at] // mesh[axis])  # the first part, which is no smaller than any
        return sizes
    for split in {at for at in layout if at >= 0}:
        parts = [(mesh[axis], coords[axis]) for axis, at in enumerate(layout) if at == split]
        start, stop = slot_range(sizes[split], parts)
        sizes[split] = stop - start
    return sizes


def local_shape(
    shape: Sequence[int], slots: Sequence[Slot], layout: Layout, mesh: Sequence[int], coords: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the shape of the rank's part of a tensor of global `shape`."""
    if all(at < 0 for at in layout):
        return tuple(shape)
    sizes = local_sizes(slots, layout, mesh, coords)
    dims = [1 if slots_of_dim(slots, dim) else size for dim, size in enumerate(shape)]
    for slot, size in zip(slots, sizes):
        dims[slot.dim] *= size
    return tuple(dims)


def memory_order(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the dims of a tensor from the one whose entries lie furthest apart in memory to the one with the nearest.

    >>> memory_order((60, 4, 12, 1)), memory_order((12, 4, 1))  # of a transposed tensor, and of one that is not
    ((0, 2, 1, 3), (0, 1, 2))
    """
    return tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))


def slots_in_order(slots: Sequence[Slot], order: Sequence[int]) -> list[int]:
    """Return the indices of all slots, dim by dim as `order` has them.

    >>> slots_in_order([Slot(0, 2), Slot(1, 3), Slot(1, 4), Slot(2, 5)], (2, 1, 0))
    [3, 1, 2, 0]
    """
    return [index for dim in order for index in slots_of_dim(slots, dim)]


def slots_of_dim(slots: Sequence[Slot], dim: int) -> list[int]:
    """Return the indices of the slots of `dim`."""
    return [index for index, slot in enumerate(slots) if slot.dim == dim]


def fraction(slots: Sequence[Slot], layout: Layout, mesh: Sequence[int]) -> float:
    """Return the share of a tensor's bytes that the rank with most of it holds."""
    share = 1.0
    for slot, size in zip(slots, local_sizes(slots, layout, mesh, None)):
        share *= size / slot.size if slot.size else 1.0
    return share


def layout_text(layout: Layout, slots: Sequence[Slot]) -> tuple[str, ...]:
    """Write a layout as a plan does: `R`, `P`, `S1`, or `S1.2/3.12.64` for one factor of a dim.

    >>> layout_text((REPLICATE, 1), [Slot(0, 8), Slot(1, 12), Slot(1, 64)])
    ('R', 'S1.0/12.64')
    """
    return tuple(_slot_text(at, slots) for at in layout)


def _slot_text(at: int, slots: Sequence[Slot]) -> str:
    if at < 0:
        return "R" if at == REPLICATE else "P"
    peers = slots_of_dim(slots, slots[at].dim)
    if len(peers) == 1:
        return f"S{slots[at].dim}"
    return f"S{slots[at].dim}.{peers.index(at)}/{'.'.join(str(slots[peer].size) for peer in peers)}"


def parse_layout(text: Sequence[str], slots: Sequence[Slot], where: str) -> Layout:
    """Read a layout from a plan; `UserError` naming `where` when the tensor has no such dim or factor."""
    return tuple(_parse_slot(part, slots, where) for part in text)


def parse_layout_at_rest(text: Sequence[str], slots: Sequence[Slot], where: str) -> Layout:
    """Read the layout of what a rank holds between steps: no partial sum, and no factor that is never split."""
    layout = parse_layout(text, slots, where)
    for part, at in zip(text, layout):
        if at == PARTIAL or (at >= 0 and slots[at].blocked):
            known = ["R", *(_slot_text(index, slots) for index, slot in enumerate(slots) if not slot.blocked)]
            raise UserError(f"{where} cannot rest as {part!r}; it can as {', '.join(known)}; write one of these")
    return layout


def _parse_slot(part: str, slots: Sequence[Slot], where: str) -> int:
    if part in ("R", "P"):
        return REPLICATE if part == "R" else PARTIAL
    for index in range(len(slots)):
        if _slot_text(index, slots) == part:
            return index
    known = ", ".join(["R", *(_slot_text(index, slots) for index in range(len(slots)))])
    raise UserError(f"{where} has no layout {part!r}; it has {known}; write one of these")


def axes_of(layout: Layout, slot: int) -> tuple[int, ...]:
    """Return the mesh axes that split `slot`, outermost first."""
    return tuple(axis for axis, at in enumerate(layout) if at == slot)


def num_elements(shape: Sequence[int]) -> int:
    """Return the number of entries of a tensor of `shape`."""
    return math.prod(shape)
