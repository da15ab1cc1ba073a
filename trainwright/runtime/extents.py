"""Describes the entries of a tensor that a rank holds as boxes of the user's own tensor, whatever the plan.

A split along an inner factor of a dim (the heads of a fused QKV weight) is several boxes of the user's shape; every other
split is one. Code that reads or writes weights (files, checkpoints) uses these boxes, so it never depends on how a plan
stores a tensor.

    slots, layout, coords  →  an interval list per dim  →  their products, the boxes      `extent_of`
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..program.layout import Layout, Slot, local_shape, slot_range, slots_of_dim


@dataclass(frozen=True)
class Box:
    """A box of entries: for each dim, its start in the whole tensor (`offset`) and in the rank's part (`local`), and its size."""

    offset: tuple[int, ...]
    local: tuple[int, ...]
    size: tuple[int, ...]

    def of_whole(self, tensor: Tensor) -> Tensor:
        """Return the box as a view of the whole tensor."""
        return tensor[tuple(slice(start, start + size) for start, size in zip(self.offset, self.size))]

    def of_part(self, part: Tensor) -> Tensor:
        """Return the box as a view of the rank's part."""
        return part[tuple(slice(start, start + size) for start, size in zip(self.local, self.size))]


@dataclass(frozen=True)
class Extent:
    """The part of a tensor of global `shape` that a rank holds, as a tensor of `local_shape`."""

    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    def cut(self, whole: Tensor) -> Tensor:
        """Return a copy of the entries of `whole` in this extent, as the rank's part."""
        part = whole.new_empty(self.local_shape)
        for box in self.boxes:
            box.of_part(part).copy_(box.of_whole(whole))
        return part


def whole_extent(shape: Sequence[int]) -> Extent:
    """Return the extent of all entries of a tensor.

    >>> whole_extent((2, 3)).boxes
    (Box(offset=(0, 0), local=(0, 0), size=(2, 3)),)
    """
    return extent_of(shape, [], (), (), ())


def extent_of(
    shape: Sequence[int], slots: Sequence[Slot], layout: Layout, mesh: Sequence[int], coords: Sequence[int]
) -> Extent:
    """Return the extent that the rank at `coords` holds of a tensor of global `shape` in `layout`.

    >>> qkv = [Slot(0, 3), Slot(0, 4)]                         # three matrices of four heads in one dim of 12
    >>> [box.offset for box in extent_of((12,), qkv, (1,), (2,), (1,)).boxes]
    [(2,), (6,), (10,)]
    """
    per_dim = []
    for dim, size in enumerate(shape):
        own = slots_of_dim(slots, dim)
        sizes = [slots[at].size for at in own] or [size]
        held = [_held(slots[at].size, at, layout, mesh, coords) for at in own] or [(0, size)]
        per_dim.append(_intervals(sizes, held))
    boxes = [_box(choice) for choice in itertools.product(*per_dim)]
    part = local_shape(shape, slots, layout, mesh, coords)
    return Extent(tuple(shape), part, tuple(box for box in boxes if math.prod(box.size)))


def _held(size: int, slot: int, layout: Layout, mesh: Sequence[int], coords: Sequence[int]) -> tuple[int, int]:
    return slot_range(size, [(mesh[axis], coords[axis]) for axis, at in enumerate(layout) if at == slot])


def _intervals(sizes: Sequence[int], held: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return (start in the whole dim, start in the part, length) of each run of consecutive entries of one dim.

    `sizes` are the dim's factors, major first, `held` the range of each that the rank holds.
    """
    split = [index for index, (size, (start, stop)) in enumerate(zip(sizes, held)) if (start, stop) != (0, size)]
    last = split[-1] if split else 0
    inner = math.prod(sizes[last + 1 :])
    start, stop = held[last]
    length = (stop - start) * inner
    runs = []
    for number, leading in enumerate(itertools.product(*(range(*bounds) for bounds in held[:last]))):
        major = 0
        for index, size in zip(leading, sizes):
            major = major * size + index
        runs.append(((major * sizes[last] + start) * inner, number * length, length))
    return runs


def _box(choice: Sequence[tuple[int, int, int]]) -> Box:
    return Box(*(tuple(run[entry] for run in choice) for entry in range(3)))
