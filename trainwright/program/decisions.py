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
"""The distance that parameters travel ahead of their use; each hides as much as the one before or more, and holds more memory."""
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)


@dataclass(eq=False)
class Decisions:
    """The decisions of a plan, in terms of the program.

    `recomputed` holds the keys of values that are not kept for the backward, `offloaded` the keys of those that are
    kept off the device.
    """

    mesh: tuple[int, ...]
    splits: dict[Group, Split]
    params: dict[Tensor, Layout]
    inputs: dict[Tensor, Layout] = field(default_factory=dict)
    recomputed: set[str] = field(default_factory=set)
    offloaded: set[str] = field(default_factory=set)
    offloaded_states: set[Tensor] = field(default_factory=set)
    """The parameters whose optimizer states are on the device during their update alone, see `offload_states`."""
    offloaded_params: set[Tensor] = field(default_factory=set)
    """The parameters whose values rest on disks and are in memory while something reads them; theirs are offloaded states too,
    or not."""
    in_flight_bytes: int = 0
    """The bytes on their way out that may still be on the device, and the bytes that may be fetched ahead of their use."""
    overlap: Overlap = "none"
    """The distance that parameters travel ahead of their use, see `travel`."""
    imbalance: float = DEFAULT_IMBALANCE
    """The ratio of the rows of experts on the fullest rank to its even share; inf plans for all rows on one rank."""
    shared: set[tuple[Tensor, Layout]] = field(default_factory=set)
    """The parameters of which one gathered copy serves the readers in all regions, each with the copy's layout. The
    readers' gradients are summed before they are resharded. A parameter that is read in its layout at rest always has
    one copy."""
    compiled: dict[int, float] | None = None
    """The share of what torch's partitioner would keep that each region keeps, see `compiled_shares`; None: nothing is compiled."""


def wider(overlap: Overlap) -> Iterator[Overlap]:
    """Yield the overlaps that hold no more memory than `overlap`, the fastest first.

    >>> list(wider("buckets"))
    ['buckets', 'none']
    """
    yield from reversed(OVERLAPS[: OVERLAPS.index(overlap) + 1])
