"""The decisions of a plan, in terms of a program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from ..artifacts import DEFAULT_IMBALANCE
from .groups import Group, Split
from .layout import Layout
from .program import Tensor

Overlap = Literal["none", "buckets", "ahead"]
"""The distance that parameters travel ahead of their use; each holds more memory than the one before."""
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)


@dataclass(eq=False)
class Decisions:
    """The decisions of a plan, in terms of the program.

    `recomputed` holds the keys of values that are not kept, `offloaded` of those that leave the device meanwhile.
    """

    mesh: tuple[int, ...]
    splits: dict[Group, Split]
    params: dict[Tensor, Layout]
    inputs: dict[Tensor, Layout] = field(default_factory=dict)
    recomputed: set[str] = field(default_factory=set)
    offloaded: set[str] = field(default_factory=set)
    offloaded_states: set[Tensor] = field(default_factory=set)
    """The parameters whose optimizer states are on the device during their update alone, see `offload_states`."""
    in_flight_bytes: int = 0
    """Offloaded bytes that may stand on the device while they leave, and again before they are asked for."""
    overlap: Overlap = "none"
    """The distance that parameters travel ahead of their use, see `travel`."""
    imbalance: float = DEFAULT_IMBALANCE
    """By how much the fullest rank may have more rows of experts than its even share; inf: all that there can be."""
    shared: set[tuple[Tensor, Layout]] = field(default_factory=set)
    """Parameters, with a layout in which one gathered copy serves their readers in all regions; their gradients are summed
    before they are brought back. A parameter that is read as it rests is always read so."""


def wider(overlap: Overlap) -> Iterator[Overlap]:
    """Yield the overlaps that hold no more memory than `overlap`, the fastest first.

    >>> list(wider("buckets"))
    ['buckets', 'none']
    """
    yield from reversed(OVERLAPS[: OVERLAPS.index(overlap) + 1])
