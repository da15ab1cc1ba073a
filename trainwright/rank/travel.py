"""States the rule by which parameters travel to their readers and gradients back: buckets, prefetch, and memory held.

The run (`buckets`, `schedule`), the price (`planner.costs.overlap`) and the solver's rows (`planner.model.joined`,
`arrivals`, `hidden`, `bucket_memory`) all read the rule here. A parameter whose layout changes is a `Travel`; those of a *bucket*
set out together:

    overlap    bucket                            gathers are issued           reductions are waited for
    none       each parameter by itself          where it is read             where its gradient is made
    buckets    the parameters of a region        where the region begins      where its backward ends
    ahead      the parameters of a region        one region earlier           one region later       `regions_ahead`
    not none   sums that stay whole, all         where the step begins        where the backward ends  `is_whole_sum`

    a gather     joins the small gathers of its bucket along the same axis, of one type              `gather_key`
    a gradient   shares a flat buffer with those that take the same collectives, of one type         `reduction_key`
    a buffer     takes gradients of one region up to a limit, of several up to a smaller one         `has_room`
    early        of several steps, the first collective is under way while something is computed     `issued_step`
    last         the last buffer of the sums that stay whole, with nothing left to compute behind it `last_buffer_share`
    held         a buffer is whole from its first gradient on, and holds its share of all            `held_share`

Each overlap holds more memory than the one before: `buckets` a region's gradients before they are reduced, `ahead` the
gathered parameters of two regions. Sums that stay whole are reduced in place, in the buffer that then is the gradients:
not to wait for them holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..program.decisions import Overlap
from ..program.transition import ReshardStep

BUFFER_BYTES = 25 * 2**20
"""The size of a buffer: large enough for the bandwidth, small enough that its reduction begins early."""

ENOUGH_BYTES = 4 * 2**20
"""A buffer beyond this size takes no gradient of another region, since latency is then a small part of its reduction."""

SMALL_BYTES = 64 * 2**10
"""Parameters up to this size are gathered together, which copies each; larger ones are gathered alone, without a copy."""

Kinds = tuple[tuple[str, int], ...]
"""The kinds of collectives with their mesh axes, in order."""


@dataclass(frozen=True)
class Travel:
    """The reshard of one parameter to its reader, and that of its gradient back."""

    there: tuple[ReshardStep, ...]
    back: tuple[ReshardStep, ...]
    """The steps of the gradient; empty if the parameter is not trained."""
    num_bytes: int
    """The bytes of the rank's part where it is read, which are those of the gradient before it is reduced."""
    dtype: torch.dtype

    @property
    def moves(self) -> bool:
        """Return True if any step, there or back, communicates."""
        return _sends(self.there) or _sends(self.back)

    @property
    def is_whole_sum(self) -> bool:
        """Return True if the gradient is only all-reduced and nothing is gathered; all such parameters form one bucket."""
        return only_sums(self.back) and not _sends(self.there)

    @property
    def gather_key(self) -> tuple[int, torch.dtype] | None:
        """Return the key that small gathers have in common which one collective joins; None for a gather that goes alone."""
        is_small = [step.kind for step in self.there] == ["all_gather"] and self.num_bytes <= SMALL_BYTES
        return (self.there[0].axis, self.dtype) if is_small else None

    @property
    def reduction_key(self) -> tuple[Kinds, torch.dtype] | None:
        """Return the key that gradients have in common which share a buffer; None for a gradient that is reduced alone.

        These are sums that stay whole, or those of one reduce-scatter.
        """
        kinds = tuple((step.kind, step.axis) for step in self.back)
        is_one_scatter = len(kinds) == 1 and kinds[0][0] == "reduce_scatter"
        return (kinds, self.dtype) if only_sums(self.back) or is_one_scatter else None

    @property
    def fills_buffer(self) -> bool:
        """Return True if the gradient fills a buffer alone."""
        return self.num_bytes >= BUFFER_BYTES


def _sends(steps: Sequence[ReshardStep]) -> bool:
    return any(step.kind != "slice" for step in steps)


def only_sums(steps: Sequence[ReshardStep]) -> bool:
    """Tell whether there are steps and all are all-reduces, so that a gradient is reduced in place in its buffer."""
    return bool(steps) and all(step.kind == "all_reduce" for step in steps)


def issued_step(steps: Sequence[ReshardStep]) -> int | None:
    """Return the number of the step that is issued early: the first collective, unless that is an all-to-all."""
    number = next((number for number, step in enumerate(steps) if step.kind != "slice"), None)
    return None if number is None or steps[number].kind == "all_to_all" else number


def has_room(filled_bytes: float, more_bytes: float, same_region: bool) -> bool:
    """Tell whether a buffer with `filled_bytes` takes one more gradient, of the last one's region or of another.

    >>> [has_room(5 * 2**20, 2**20, same_region) for same_region in (True, False)]
    [True, False]
    """
    return filled_bytes + more_bytes <= BUFFER_BYTES and (same_region or filled_bytes <= ENOUGH_BYTES)


def shared_buffer_bytes(region_bytes: float) -> float:
    """Return the bytes that a buffer of several regions' gradients holds, where each region has `region_bytes`."""
    return max(1.0, min(BUFFER_BYTES, max(ENOUGH_BYTES, region_bytes)))


def held_share(sizes: Iterable[float], one_region: bool) -> float:
    """Return the share that one buffer holds of gradients of these sizes, of one region or of several."""
    total = max(1.0, sum(sizes))
    return min(1.0, (BUFFER_BYTES if one_region else ENOUGH_BYTES) / total)


def last_buffer_share(whole_sum_bytes: float) -> float:
    """Return the share of the gradients that stay whole that leaves last, with nothing left to compute behind it."""
    return held_share([whole_sum_bytes], one_region=False)


def regions_ahead(overlap: Overlap) -> int:
    """Return how many regions ahead gathers are issued, which is how many regions later reductions are waited for."""
    return 1 if overlap == "ahead" else 0


def opening_region(order: Sequence[int], region: int | None, overlap: Overlap) -> int:
    """Return the region of `order` where the bucket of `region` opens; None stands for the sums that stay whole.

    >>> opening_region([4, 7, 9], 9, "ahead"), opening_region([4, 7, 9], 4, "ahead"), opening_region([4, 7, 9], None, "buckets")
    (7, 4, 4)
    """
    return order[0] if region is None else order[max(0, order.index(region) - regions_ahead(overlap))]
