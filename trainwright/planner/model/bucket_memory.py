"""What parameters that travel in buckets hold (`rank.travel`), beyond what rows count of parameters that travel one by one.

    forward    Σ f · bytes of the copy            of copies gathered for later groups of the region. What one collective gathers is
                                                  there until the last of it has been copied out
    reruns     Σ C · bytes of the copy            the same, of what the backward gathers again
    backward   Σ f · bytes of the gradient        of gradients that wait to be scattered when the region's backward ends, and of
                                                  the places in their buffer that are still empty
               Σ f · (what its collective holds − bytes at rest)     of a gradient that is reduced by itself, up to that end
               Σ f · bytes of the gradient        of the empty places in the buffer of the sums that stay whole
               − Σ f · bytes at rest              of gradients that are scattered: the rows count a region's gradients at rest
                                                  throughout its backward, and these come to rest at its end, which is a moment
                                                  by itself (`coming_to_rest`)
    at rest    Σ f · what rounding to blocks adds     of gradients that end in memory of their own, not as a part of a buffer
               512 · n − Σ f · bytes, n whole     of those that are scattered together, and of the sums that stay whole
    ahead      in the forward the copies for the next region; in the backward the gradients of the region behind, which are on
               their way, and the copies that the region before gathers again, if it does. The row of the last instance also
               stands for the instances between, which have both (`_between`)

A buffer is allocated when its first gradient has been made (`opened`). In a small program one buffer holds all gradients, so
its places are known; in a larger one the rows count the share of all gradients that one buffer holds (`held_share`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ...program.blocks import RegionClass
from ...program.layout import Layout
from ...rank.travel import Kinds, Travel, held_share, issued_step, regions_ahead
from ..problem.problem import Decision, Problem, Source, Use, Want
from .joined import travel_of
from .milp import MIB, Model, Terms
from .recompute import Recompute
from .sharding import Sharding, has_one_want
from .tied import RegionGroup

AHEAD = "what is gathered a region ahead"
PLACES = "places in a buffer of gradients"
BLOCKS = "buffers of gradients take whole blocks"


@dataclass(frozen=True)
class _Part:
    """One reshard's part of a bucket."""

    use: Use
    column: int
    mib: float
    rest_mib: float = 0.0
    """The part of its gradient that comes to rest when the region's backward ends."""
    is_small: bool = True
    """True if it shares a collective with others."""
    key: tuple[Kinds, torch.dtype] | None = None
    """The key that gradients of one buffer have in common."""

    @cached_property
    def position(self) -> int:
        """Return the group that reads the parameter first; its backward is the last to add to the gradient."""
        return min(demand.position for demand in self.use.demands)

    @cached_property
    def last_place(self) -> RegionGroup:
        """Return the region, and the group in it, where the backward makes the gradient first."""
        return _last_region(self.use), self.position


class BucketMemory:
    """Terms of the rows; none where parameters travel one by one."""

    def __init__(self, model: Model, problem: Problem, sharding: Sharding, recompute: Recompute) -> None:
        self.model, self.problem = model, problem
        self.ahead = regions_ahead(sharding.joined.travel) > 0
        self._next: dict[RegionClass, Terms] = {}
        self._region_shares: dict[RegionClass, float] = {}
        self._again: dict[RegionClass, list[_Part]] = defaultdict(list)
        self._flow_of: dict[int, int] = {}
        """The column that chooses a copy, by the column of how often it is gathered again."""
        self._gathers: dict[RegionClass, list[_Part]] = defaultdict(list)
        self._scattered: dict[RegionClass, list[_Part]] = defaultdict(list)
        self._alone: dict[RegionClass, list[_Part]] = defaultdict(list)
        self._sums: list[_Part] = []
        self._buffers: dict[RegionClass, list[_Buffer]] = {}
        self._padding: dict[Decision, Terms] = defaultdict(list)
        """What memory of its own holds beyond a gradient, by the parameter."""
        self._carried: set[int] = set()
        self._rounding: dict[RegionClass, Terms] = defaultdict(list)
        """What blocks of the allocator add to the gradients that one instance scatters together."""
        self._rounding_of_sums: Terms = []
        if not sharding.joined.in_buckets:
            return
        self._first_given: dict[Source, int] = defaultdict(int)
        """The region whose backward is the first to give a parameter's gradient."""
        for use in problem.uses:
            self._first_given[use.source] = max(self._first_given[use.source], _last_region(use))
        for (use, native, want), column in sharding.flow.items():
            if use.source.is_param:
                self._add(use, native, want, column)
        for tied in sharding.tied:
            for (source, native, want), column in sharding.shared.items():
                if source is tied.source and native == want[0] and source.tensor.requires_grad:
                    self._add_back(tied.uses[0], native, want, column, 0.0)
        for (use, native, want), column in recompute.convert.items():
            if use.source.is_param:
                self._again[use.region_class].append(self._gathered(use, native, want, column, use.count))
                self._flow_of[column] = sharding.flow[use, native, want]
        self._share = held_share([tensor.num_bytes for tensor in problem.program.params], one_region=False)
        self._add_rounding()

    def _add(self, use: Use, native: Layout, want: Want, column: int) -> None:
        if native != want[0]:
            self._gathers[use.region_class].append(self._gathered(use, native, want, column))
        if use.tensor.requires_grad:
            # where another reader has given a part of the gradient before, something is at rest already
            brings = has_one_want(use) and _last_region(use) == self._first_given[use.source]
            rest = self.problem.costs.local_bytes(use.source.tensor, native) if brings else 0
            self._add_back(use, native, want, column, rest / MIB)

    def _gathered(self, use: Use, native: Layout, want: Want, column: int, count: int = 1) -> _Part:
        """Return the part of a copy of one of `count` instances, which several may share a collective for."""
        size = self.problem.costs.copy_bytes(use.source.tensor, native, want[0]) / count
        return _Part(
            use, column, size / MIB, is_small=travel_of(self.problem, use, native, want).gather_key is not None
        )

    def _add_back(self, use: Use, native: Layout, want: Want, column: int, rest_mib: float) -> None:
        travel = travel_of(self.problem, use, native, want)
        if travel.reduction_key is None:
            more_mib = self._padding_mib(use, native) if rest_mib else 0.0
            flight_mib = self._flight_mib(use, native, travel)
            self._alone[use.region_class].append(_Part(use, column, flight_mib, rest_mib + more_mib))
            if more_mib:
                self._padding[use.source.decision].append((column, more_mib))
            return
        part = _Part(use, column, travel.num_bytes / MIB, rest_mib, not travel.fills_buffer, travel.reduction_key)
        if part.is_small:
            self._carried.add(column)
        if travel.is_whole_sum:
            self._sums.append(part)
        else:
            self._scattered[use.region_class].append(part)

    def _padding_mib(self, use: Use, native: Layout) -> float:
        """Return what a gradient in memory of its own holds beyond its elements."""
        costs, tensor = self.problem.costs, use.source.tensor
        return (costs.block_bytes(tensor, native) - costs.local_bytes(tensor, native)) / MIB

    def _flight_mib(self, use: Use, native: Layout, travel: Travel) -> float:
        """Return what a gradient that is reduced by itself holds beyond its bytes at rest, until it is waited for.

        Its first collective is on its way then, if it is one that is issued early.
        """
        if all(step.kind == "slice" for step in travel.back):
            return 0.0
        costs, tensor, number = self.problem.costs, use.source.tensor, issued_step(travel.back)
        held = travel.num_bytes if number is None else costs.step_held_bytes(tensor, travel.back[number])
        return max(0, held - costs.block_bytes(tensor, native)) / MIB

    def _add_rounding(self) -> None:
        """Add the columns of what whole blocks of the allocator add to gradients that come to rest as parts of one buffer."""
        for region_class, parts in self._scattered.items():
            for together in _by_key([part for part in parts if part.rest_mib]):
                added = self._rounding_of(together)
                self._rounding[region_class] += added
                params = [part.use.source.decision for part in together]
                # as many instances come to rest as of the class; a parameter that all instances read has one
                self._padding[max(params, key=lambda param: param.count)] += added
        for together in _by_key([part for part in self._sums if part.rest_mib]):
            self._rounding_of_sums += self._rounding_of(together, of_all_instances=True)

    def _rounding_of(self, parts: list[_Part], *, of_all_instances: bool = False) -> Terms:
        """Return the term of what rounding the bytes of one buffer up to blocks adds; none where the device rounds nothing."""
        block_bytes = self.problem.costs.taken_bytes(1)
        if block_bytes == 1:
            return []
        num_blocks, added = self.model.column(integer=True), self.model.column(block_bytes / MIB)
        terms = [(part.column, part.rest_mib * (part.use.count if of_all_instances else 1)) for part in parts]
        self.model.row(BLOCKS, [*terms, (added, 1.0), (num_blocks, -block_bytes / MIB)], 0.0, 0.0)
        return [(added, 1.0)]

    def padding_at_rest(self, decision: Decision, num: int) -> Terms:
        """Return the terms of what `num` gradients of a parameter at rest hold beyond their elements."""
        return [(column, num * size) for column, size in self._padding[decision]]

    def carries(self, column: int) -> bool:
        """Tell whether the gradient of a reshard shares a buffer with others."""
        return column in self._carried

    def forward(self, region_class: RegionClass, position: int, kept: Terms) -> Terms:
        """Return the terms of the copies that are gathered already while a group runs, for later groups.

        kept: what one instance of the class keeps.
        """
        parts = self._gathers[region_class]
        own = [(part.column, part.mib) for part in parts if not part.is_small and part.position > position]
        own += _not_copied_out(parts, position)
        return own + self._next_gathers(region_class, kept) if self.ahead else own

    def rerun(self, region_class: RegionClass, position: float) -> Terms:
        """Return the terms of what is gathered again and waits to be copied out while a group runs again."""
        return _not_copied_out(self._again[region_class], position)

    def _next_gathers(self, region_class: RegionClass, kept: Terms) -> Terms:
        """Return the terms of the copies for the next region, beside the last instance of a class or the one before that.

        The last one runs beside the copies for the region behind them all. The one before runs beside those of its own class,
        when one instance less is kept.
        """
        if region_class not in self._next:
            behind = self._beside(region_class.members[-1].index, 1)
            beside = [[] if behind is None else _whole(self._gathers[behind])]
            if region_class.multiplicity > 1:
                beside.append([*_whole(self._gathers[region_class]), *((column, -size) for column, size in kept)])
            self._next[region_class] = self.model.largest(AHEAD, beside)
        return self._next[region_class]

    def in_flight(self, region_class: RegionClass, region: int, fewer: Terms) -> Terms:
        """Return the terms of what other regions have on their way while this one's backward runs, where they travel ahead.

        These are the gradients of the region behind it, and what the one before it gathers again, which is issued where this
        region's reruns begin. The first of several instances stands for the second too, which comes behind one that gathers
        again, since the first ones do; the last stands for those between, which have an instance on either side.
        fewer: what an instance holds less than the one behind it.
        """
        places = [member.index for member in region_class.members]
        before, after = self._beside(region, -1), self._beside(region, 1)
        found = [] if before is None else [self._again_in_all(before)]
        if region == places[0] and len(places) > 1:
            found.append(self._again_whole(region_class, 2))
        terms = self._given(after) + self.model.largest(AHEAD, found)
        if region == places[-1] and len(places) > 2:
            terms = self.model.largest(AHEAD, [terms, *self._between(region_class, fewer)])
        return terms

    def _between(self, region_class: RegionClass, fewer: Terms) -> Iterator[Terms]:
        """Yield what is on its way at the instances 1, 2, 4 … places before the last, less what is gone by then."""
        given, count = self._given(region_class), region_class.multiplicity
        for num in (2**power for power in range((count - 2).bit_length())):
            yield [*given, *self._again_whole(region_class, count - num), *((c, -num * size) for c, size in fewer)]

    def _given(self, region_class: RegionClass | None) -> Terms:
        """Return the terms of the gradients that a region gives, on their way."""
        return [] if region_class is None else _whole([*self._scattered[region_class], *self._alone[region_class]])

    def _again_in_all(self, region_class: RegionClass) -> Terms:
        """Return the terms of what one instance gathers, which count if all of them gather it again: of C instances C − (M − 1)."""
        if region_class.multiplicity == 1:
            return _whole(self._again[region_class])
        held = self.model.column()
        terms: Terms = []
        for part in self._again[region_class]:
            size = part.mib * part.use.count
            terms += [(part.column, size), (self._flow_of[part.column], -size * (part.use.count - 1))]
        self.model.row(AHEAD, [*terms, (held, -1.0)], upper=0.0)
        return [(held, 1.0)] if terms else []

    def _again_whole(self, region_class: RegionClass, num: int) -> Terms:
        """Return the terms of what one instance gathers, which count if at least `num` gather it again."""
        count, parts = region_class.multiplicity, self._gathers[region_class]
        if not self._again[region_class] or not parts:
            return []
        all_mib = sum(_largest((part, part.mib) for part in parts).values())
        do_several, held = self.model.column(1.0, integer=True), self.model.column()
        for part in self._again[region_class]:
            self.model.row(AHEAD, [(part.column, 1.0), (do_several, num - 1.0 - count)], upper=num - 1.0)
        self.model.row(AHEAD, [*_whole(parts), (do_several, all_mib), (held, -1.0)], upper=all_mib)
        return [(held, 1.0)]

    def _beside(self, region: int, step: int) -> RegionClass | None:
        """Return the class of the region `step` places after this one, if there is one."""
        regions = self.problem.program.regions
        return regions[region + step].region_class if 0 <= region + step < len(regions) else None

    def backward(self, region_class: RegionClass, region: int, position: float) -> Terms:
        """Return the terms of the region's own gradients, and of sums, beyond those at rest, while a group's backward runs."""
        return [*self._of_region(region_class, position), *self._of_sums(region, position)]

    def places(self, region_class: RegionClass) -> Terms:
        """Return the terms of the places of one instance's gradients in the buffers of sums that stay whole."""
        parts = [part for part in self._sums if part.is_small and part.use.region_class is region_class]
        return [(part.column, part.mib * self._share) for part in parts]

    def coming_to_rest(self, region_class: RegionClass) -> Terms:
        """Return the terms of a region's gradients at rest that come when its backward ends: they are scattered then."""
        parts = [(part.column, part.rest_mib) for part in self._scattered[region_class]]
        return [*parts, *self._rounding[region_class]]

    def of_sums_at_rest(self) -> Terms:
        """Return the terms of what blocks add to the buffers of sums that stay whole."""
        return self._rounding_of_sums

    def opened(self, region_class: RegionClass, position: int) -> Terms:
        """Return the terms of buffers that are allocated when a group has given the first gradient that goes into them."""
        terms: Terms = []
        for buffer in self._buffers_of(region_class):
            if (0, position) in buffer.given:
                before = self._empty(region_class, buffer, position)
                terms += [
                    *self._empty(region_class, buffer, position, has_given=True),
                    *((c, -size) for c, size in before),
                ]
        return terms

    def not_made(self, region_class: RegionClass, position: float) -> Terms:
        """Return the terms of gradients at rest that no other joins and that a region's backward has not made before a group."""
        return [(part.column, part.rest_mib) for part in self._alone[region_class] if part.position <= position]

    def _of_region(self, region_class: RegionClass, position: float) -> Terms:
        made = [*self._scattered[region_class], *self._alone[region_class]]
        terms = _whole([part for part in made if part.position > position])
        buffers = self._buffers_of(region_class)
        return terms + [term for buffer in buffers for term in self._empty(region_class, buffer, position)]

    def _empty(self, region_class: RegionClass, buffer: _Buffer, position: float, *, has_given: bool = False) -> Terms:
        """Return the term of the empty places while a group's backward runs, before or after it has given its gradient."""
        share = self._region_share(region_class)
        empty = [(part, share) for part in buffer.parts if part.position <= position]
        behind = [place for place in buffer.given if place > (0, position) or (has_given and place == (0, position))]
        return buffer.held(empty, min(behind, default=None))

    def _buffers_of(self, region_class: RegionClass) -> list[_Buffer]:
        """Return the buffers that one instance's gradients are scattered from."""
        if region_class not in self._buffers:
            found = _by_key(self._scattered[region_class])
            self._buffers[region_class] = [
                _Buffer(self.model, parts, [(0, part.position) for part in parts]) for parts in found
            ]
        return self._buffers[region_class]

    def _region_share(self, region_class: RegionClass) -> float:
        """Return the share of a region's gradients that one buffer holds, each parameter's at its largest."""
        if region_class not in self._region_shares:
            largest = _largest((part, part.mib * MIB) for part in self._scattered[region_class])
            self._region_shares[region_class] = held_share(largest.values(), one_region=True)
        return self._region_shares[region_class]

    def _of_sums(self, region: int, position: float) -> Terms:
        first = max((part.last_place for part in self._sums), default=(-1, -1))
        if (region, position) > first:
            return []
        terms = [*self._rounding_of_sums]
        for buffer in self._buffers_of_sums:
            nums = [
                sum(part.use.region_class.members[m].index < region for m in part.use.members) for part in buffer.parts
            ]
            empty = [(part, num * self._share) for part, num in zip(buffer.parts, nums) if num]
            terms += buffer.held(
                empty, min((place for place in buffer.given if place >= (region, position)), default=None)
            )
        return terms

    @cached_property
    def _buffers_of_sums(self) -> list[_Buffer]:
        """Return the buffers of the sums that stay whole, which hold those of all regions."""
        return [_Buffer(self.model, parts, [part.last_place for part in parts]) for parts in _by_key(self._sums)]


class _Buffer:
    """The places in one buffer of gradients, which are held from when its first gradient is made, empty until theirs are.

    Which gradient is the first hangs on what is chosen: a parameter may travel otherwise, or not at all. So a column says for
    each group whether its backward, or that of a group behind it, gives a gradient to the buffer.
    """

    def __init__(self, model: Model, parts: list[_Part], places: Sequence[RegionGroup]) -> None:
        """Take the parts that may share the buffer, and in which region's group the backward makes each of them first."""
        self.model, self.parts = model, parts
        self.given: dict[RegionGroup, list[_Part]] = defaultdict(list)
        for part, place in zip(parts, places):
            self.given[place].append(part)
        self._open: dict[RegionGroup, int] = {}
        self._held: dict[tuple[tuple[tuple[int, float], ...], RegionGroup], int] = {}

    def held(self, places: Iterable[tuple[_Part, float]], last: RegionGroup | None) -> Terms:
        """Return the term of places, each so many times a part's bytes, if a group from `last` on has given its gradient."""
        sizes = [(part, num * part.mib) for part, num in places]
        if last is None or not sizes:
            return []
        terms = tuple((part.column, mib) for part, mib in sizes)
        if (terms, last) not in self._held:
            column = self._held[terms, last] = self.model.column()
            most = sum(_largest(sizes).values())
            self.model.row(PLACES, [*terms, (self._is_open(last), most), (column, -1.0)], upper=most)
        return [(self._held[terms, last], 1.0)]

    def _is_open(self, last: RegionGroup) -> int:
        """Return the column that is 1 if a group from `last` on has given its gradient."""
        if last not in self._open:
            column = self._open[last] = self.model.column(1.0)
            behind = min((place for place in self.given if place > last), default=None)
            given = [part.column for part in self.given[last]]
            for each in given if behind is None else [*given, self._is_open(behind)]:
                self.model.row(PLACES, [(each, 1.0), (column, -1.0)], upper=0.0)
        return self._open[last]


def _by_key(parts: list[_Part]) -> list[list[_Part]]:
    """Return the parts that go into the same buffer, for each buffer."""
    found: dict[tuple[Kinds, torch.dtype] | None, list[_Part]] = defaultdict(list)
    for part in parts:
        if part.is_small:
            found[part.key].append(part)
    return list(found.values())


def _largest(sizes: Iterable[tuple[_Part, float]]) -> dict[Use, float]:
    """Return the largest size among each use's parts: one of them is chosen."""
    found: dict[Use, float] = defaultdict(float)
    for part, size in sizes:
        found[part.use] = max(found[part.use], size)
    return found


def _last_region(use: Use) -> int:
    return max(use.region_class.members[member].index for member in use.members)


def _whole(parts: list[_Part]) -> Terms:
    return [(part.column, part.mib) for part in parts if part.mib]


def _not_copied_out(parts: list[_Part], position: float) -> Terms:
    """Return the terms of what one collective gathers, up to the group that reads the last of it."""
    joined = [part for part in parts if part.is_small]
    return _whole(joined) if any(part.position >= position for part in joined) else []
