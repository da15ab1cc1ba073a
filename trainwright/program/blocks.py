"""Cuts a program into regions: the repeated blocks of a model, and what stands before, between and behind them.

Which calls are of a block, `capture.block_paths` says. Regions with the same ops on the same shapes form one class; every
decision is taken once a class.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..capture.block_paths import block_containers, block_of

if TYPE_CHECKING:
    from .groups import Group
    from .program import Op, Tensor


@dataclass(eq=False)
class Region:
    """A run of consecutive ops: one block, or what lies between two."""

    index: int
    path: str | None
    """The block's module path; None outside the blocks."""
    ops: list[Op]
    region_class: RegionClass = field(init=False, repr=False)
    member: int = 0
    """The region's index among the members of its class."""
    externals: list[Tensor] = field(default_factory=list, repr=False)
    """The tensors that the region reads from outside, parameters included, in order of first use."""


@dataclass(eq=False)
class RegionClass:
    """A class of regions that are equal in everything but their place in the step."""

    index: int
    members: list[Region]
    groups: list[Group] = field(default_factory=list, repr=False)
    group_at: dict[int, Group] = field(default_factory=dict, repr=False)
    """The group of the op at each position."""

    @property
    def representative(self) -> Region:
        return self.members[0]

    @property
    def multiplicity(self) -> int:
        return len(self.members)


def find_regions(ops: Sequence[Op]) -> list[Region]:
    """Cut the ops, in order, into blocks and what lies between them."""
    containers = block_containers([op.path for op in ops])
    regions: list[Region] = []
    for op in ops:
        block = block_of(op.path, containers)
        if not regions or regions[-1].path != block:
            regions.append(Region(len(regions), block, []))
        region = regions[-1]
        op.region, op.position = region, len(region.ops)
        region.ops.append(op)
    return regions


def classify(regions: Sequence[Region]) -> list[RegionClass]:
    """Group regions that run the same ops on the same shapes, wired alike."""
    classes: dict[Any, RegionClass] = {}
    for region in regions:
        key = _signature(region)
        found = classes.setdefault(key, RegionClass(len(classes), []))
        region.member = len(found.members)
        region.region_class = found
        found.members.append(region)
    return list(classes.values())


def _signature(region: Region) -> Any:
    inside: dict[Any, tuple[int, int]] = {}
    outside: dict[Any, int] = {}
    rows = []
    for op in region.ops:
        refs = [_reference(tensor, inside, outside) for tensor in op.inputs]
        rows.append((op.name, normalise_path(op.path), tuple(refs), tuple(t.shape for t in op.outputs), _literals(op)))
        inside.update({tensor: (op.position, index) for index, tensor in enumerate(op.outputs)})
    region.externals = list(outside)
    return (region.path is None, tuple(rows))


def _reference(tensor: Tensor, inside: dict[Any, tuple[int, int]], outside: dict[Any, int]) -> Any:
    if tensor in inside:
        return inside[tensor]
    index = outside.setdefault(tensor, len(outside))
    kind = tensor.role if tensor.role != "op" else ("const" if tensor.producer and tensor.producer.constant else "op")
    return (index, kind, tensor.shape, str(tensor.dtype), tensor.requires_grad)


def _literals(op: Op) -> str:
    return repr((op.call.args, sorted(op.call.kwargs.items())))


def normalise_path(path: str) -> str:
    """Replace the numbers in a module path by `*`.

    >>> normalise_path("transformer.h.3.mlp.c_fc")
    'transformer.h.*.mlp.c_fc'
    """
    return re.sub(r"(^|(?<=\.))\d+(?=\.|:|$)", "*", path)
