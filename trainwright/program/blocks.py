"""Cuts a program into regions: the repeated blocks of a model, and what stands before, between and behind them.

A block is an element of a list of modules (`transformer.h.3`). Where the elements of an outer list do nothing but run
an inner list (the stages of a ResNet), the inner elements are the blocks. Regions with the same ops on the same shapes
form one class; every decision is taken once a class.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .groups import Group
    from .program import Op, Tensor

MIN_OPS_PER_BLOCK = 4


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
    containers = _block_containers([op.path for op in ops])
    regions: list[Region] = []
    for op in ops:
        block = _block_of(op.path, containers)
        if not regions or regions[-1].path != block:
            regions.append(Region(len(regions), block, []))
        region = regions[-1]
        op.region, op.position = region, len(region.ops)
        region.ops.append(op)
    return regions


def _block_of(path: str, containers: set[str]) -> str | None:
    """Return the path of the deepest block that contains `path`, or None outside the blocks."""
    found = None
    for prefix, index, _ in _numbered(path):
        if prefix in containers:
            found = f"{prefix}.{index}" if prefix else index
    return found


def _numbered(path: str) -> list[tuple[str, str, str]]:
    """Return every numeric part of a path, as (the parts before it, the number, the parts after it)."""
    parts = path.split(".")
    return [(".".join(parts[:k]), part, ".".join(parts[k + 1 :])) for k, part in enumerate(parts) if part.isdigit()]


def _block_containers(paths: Sequence[str], below: str | None = None) -> set[str]:
    """Return the module lists whose elements are blocks, among `paths` that lie under the prefix `below`."""
    elements: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in paths:
        for prefix, index, _ in _numbered(path):
            if below is None or prefix.startswith(below + "."):
                elements[prefix][index].append(path)
                break
    found: set[str] = set()
    for prefix, members in elements.items():
        num_ops = sum(len(paths_in) for paths_in in members.values())
        for index, inside in members.items():
            inner = _block_containers(inside, f"{prefix}.{index}" if prefix else index)
            covered = sum(any(before in inner for before, _, _ in _numbered(path)) for path in inside)
            if inner and covered >= len(inside) - 2:
                found |= inner
        if (
            len(members) >= 2
            and num_ops >= MIN_OPS_PER_BLOCK * len(members)
            and not any(other.startswith(prefix + ".") for other in found)
        ):
            found.add(prefix)
    return found


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
        rows.append((op.name, normalise_path(op.key), tuple(refs), tuple(t.shape for t in op.outputs), _literals(op)))
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
