"""Buckets at run time: parameters are gathered early, and their gradients reduced together while the backward goes on.

The reshards of a region's parameters form one `Bucket`. Two instructions stand for it, and autograd mirrors each in the
backward, in reverse order:

    open     forward   issues the gathers                         backward  waits for the reductions
    close    forward   waits for one parameter's gather           backward  puts its gradient into a flat buffer;
                                                                            the last one to arrive issues the reduction

`travel` says who shares a bucket, a collective or a buffer, and where a bucket opens; so what is issued early is part of the
program that is priced, simulated and run. A gradient that shares a buffer ends as a view of it. A gradient that is alone in
its buffer, and was made for it, is the buffer itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..program.layout import chunk, local_shape, local_sizes
from ..program.transition import ReshardStep
from .reshard import Pending, Route
from .travel import Travel, has_room


class Plain:
    """Converts parameters between their form at rest and the tensors that a step reads; here the two are the same."""

    def part(self, param: Any) -> Tensor:
        """Return the rank's part as a step reads it, through which its gradient comes back."""
        return self.local(param)

    def local(self, param: Tensor) -> Tensor:
        """Return the rank's part as a step reads it, outside of autograd."""
        return param.view_as(param)

    def gradient(self, local: Tensor, param: Tensor) -> Tensor:
        """Return the gradient of that part as `param` takes it."""
        return local


@dataclass(eq=False)
class Member:
    """One parameter of a bucket: the routes there and back, and the region that reads it."""

    there: Route
    back: Route
    trained: bool
    dtype: torch.dtype
    num_bytes: int
    """The size of the gradient before it is reduced."""
    region: int = 0
    is_new: bool = False
    """True if the gradient is always a new tensor that nothing else holds, so that it may be reduced in place."""

    @cached_property
    def travel(self) -> Travel:
        """Return the `Travel` that decides which parameters share its collectives."""
        back = self.back.steps if self.trained else ()
        return Travel(self.there.steps, back, self.num_bytes, self.dtype)


class Bucket:
    """Parameters that travel together, of one region or of several; made once, run every step.

    ahead: True if the bucket opens one region ahead, in the forward and where the backward gathers again.
    """

    def __init__(self, members: Sequence[Member], ahead: bool) -> None:
        self.members, self.ahead = tuple(members), ahead
        self.trained = [index for index, member in enumerate(members) if member.trained]
        self.reductions = _reductions(members)
        self.reduction_of = {index: found for found in self.reductions for index in found.members}

    def open(self, flights: Flights, rest: Plain, *params: Tensor) -> list[Tensor]:
        """Issue the gathers, and return one token per parameter for `close`."""
        flight = flights[self] = Flight(self)
        tokens: dict[int, Tensor] = {}
        if self.trained and torch.is_grad_enabled():
            opened = _Open.apply(flight, rest, *(params[index] for index in self.trained))
            tokens.update(zip(self.trained, opened))
        with torch.no_grad():
            for index in range(len(params)):
                if index not in tokens:
                    tokens[index] = rest.local(params[index])
        flight.gather(tokens)
        return [tokens[index] for index in range(len(params))]

    def joined_gathers(self, indices: Sequence[int] | None = None) -> list[tuple[int, ...]]:
        """Return the sets of small parameters, among `indices` (by default all), that one collective gathers."""
        groups: dict[Any, list[int]] = {}
        for index in range(len(self.members)) if indices is None else indices:
            key = self.members[index].travel.gather_key
            if key is not None:
                groups.setdefault(key, []).append(index)
        return [tuple(found) for found in groups.values() if len(found) > 1]

    def close(self, flights: Flights, index: int, token: Tensor) -> Tensor:
        """Return the parameter `index` in the layout that is wanted."""
        return _Close.apply(token, flights[self], index)  # type: ignore[no-any-return]


class Flight:
    """The gathers and reductions of one bucket that are in flight in one run."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.gathers: dict[int, Pending] = {}
        self.buffers: dict[_Reduction, _Buffer] = {}
        self.alone: dict[int, Pending] = {}

    def gather(self, params: Mapping[int, Tensor]) -> None:
        """Issue the gathers of these parameters, by index, that are not in flight."""
        missing = [index for index in params if index not in self.gathers and self.bucket.members[index].there.moves]
        for joined in self.bucket.joined_gathers(missing):
            parts = [params[index].detach() for index in joined]
            shared = _JoinedGather([self.bucket.members[index].there for index in joined], parts)
            self.gathers.update((index, shared.of(place)) for place, index in enumerate(joined))
        for index in missing:
            if index not in self.gathers:
                self.gathers[index] = self.bucket.members[index].there.start(params[index].detach())

    def take(self, index: int, param: Tensor) -> Tensor:
        """Return a parameter in its wanted layout: wait for its gather if that is in flight, else gather it now."""
        route = self.bucket.members[index].there
        if not route.steps:
            return param.view_as(param)
        pending = self.gathers.pop(index, None)
        return route.run(param) if pending is None else pending.wait()

    def put(self, index: int, gradient: Tensor) -> None:
        """Take in one parameter's gradient; the last gradient of a buffer issues its reduction."""
        reduction = self.bucket.reduction_of.get(index)
        if reduction is None:
            self.alone[index] = self.bucket.members[index].back.start(gradient)
            return
        if reduction not in self.buffers:
            self.buffers[reduction] = _Buffer(reduction, gradient)
        self.buffers[reduction].put(index, gradient)

    def gradients(self) -> list[Tensor | None]:
        """Wait for the reduced gradients of all trained members; None for one that has none."""
        found: dict[int, Tensor] = {index: pending.wait() for index, pending in self.alone.items()}
        for buffer in self.buffers.values():
            found.update(buffer.wait())
        self.alone, self.buffers = {}, {}
        return [found.get(index) for index in self.bucket.trained]


class _JoinedGather:
    """One gather of several small parameters."""

    def __init__(self, routes: Sequence[Route], params: Sequence[Tensor]) -> None:
        self.routes = routes
        parts = [route.before_gather(param) for route, param in zip(routes, params)]
        self.shapes = [part.shape for part in parts]
        self.lengths = [part.numel() for part in parts]
        step = routes[0].steps[0]
        self.pending: Pending | None = routes[0].communicator.issue(
            "all_gather", step.axis, torch.cat([part.view(-1) for part in parts])
        )
        self.waiting = len(parts)
        self.gathered: Tensor | None = None

    def of(self, place: int) -> _OneOfJoined:
        return _OneOfJoined(self, place)

    def take(self, place: int) -> Tensor:
        if self.pending is not None:
            self.gathered, self.pending = self.pending.wait(), None
        assert self.gathered is not None
        start, shape = sum(self.lengths[:place]), self.shapes[place]
        parts = self.gathered.narrow(1, start, self.lengths[place]).unflatten(1, shape)
        self.waiting -= 1
        if not self.waiting:
            self.gathered = None
        return self.routes[place].after_gather(parts)


@dataclass(eq=False)
class _OneOfJoined:
    joined: _JoinedGather
    place: int

    def wait(self) -> Tensor:
        return self.joined.take(self.place)


Flights = dict[Bucket, Flight]
"""The flights of one run, by bucket."""


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, rest: Plain, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.flight, ctx.rest, ctx.params = flight, rest, params
        ctx.set_materialize_grads(False)
        return tuple(rest.local(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        found = zip(ctx.flight.gradients(), ctx.params)
        given = (None if local is None else ctx.rest.gradient(local, param) for local, param in found)
        return None, None, *given


class _Close(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: Flight, index: int) -> Tensor:
        ctx.flight, ctx.index = flight, index
        return flight.take(index, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.flight.put(ctx.index, grads[0])
        return None, None, None


class _BufferPlace:
    """The place of one gradient in a flat buffer of `num_parts` rows: `length` elements of each, from `start`."""

    def __init__(self, route: Route, num_parts: int, start: int) -> None:
        mesh, coords = route.communicator.mesh, route.communicator.coords
        step = route.steps[0]
        sizes = local_sizes(route.slots, step.before, mesh, coords)
        self.num_parts, self.start = num_parts, start
        self.shape = local_shape(route.shape, route.slots, route.steps[-1].after, mesh, coords)
        """The shape of the rank's part of the reduced gradient."""
        self.lead, self.whole, self.tail, self.each = 1, 1, math.prod(sizes), 1
        if num_parts > 1:
            self.lead, self.whole = math.prod(sizes[: step.slot]), sizes[step.slot]
            self.tail, self.each = math.prod(sizes[step.slot + 1 :]), -(-self.whole // num_parts)
            self.own = local_sizes(route.slots, step.after, mesh, coords)[step.slot]
        self.length = self.lead * self.each * self.tail

    @property
    def is_in_rows(self) -> bool:
        """True if the memory of a contiguous gradient equals its rows, one after the other."""
        return self.num_parts == 1 or (self.lead == 1 and self.whole == self.num_parts * self.each)

    def put(self, flat: Tensor, gradient: Tensor) -> None:
        """Write a gradient into its columns of the rows, each rank's part into that rank's row."""
        place = flat.narrow(1, self.start, self.length)
        if self.num_parts == 1:
            place.view(gradient.shape).copy_(gradient)
            return
        rows = place.view(self.num_parts, self.lead, self.each, self.tail)
        parts = gradient.reshape(self.lead, self.whole, self.tail)
        if self.whole == self.num_parts * self.each:
            rows.copy_(parts.view(self.lead, self.num_parts, self.each, self.tail).transpose(0, 1))
            return
        rows.zero_()
        for rank in range(self.num_parts):
            start, stop = chunk(self.whole, self.num_parts, rank)
            rows[rank, :, : stop - start].copy_(parts[:, start:stop])

    def take(self, reduced: Tensor) -> Tensor:
        """Return the reduced elements in the shape of the rank's part."""
        flat = reduced.narrow(0, self.start, self.length)
        if self.num_parts == 1:
            return flat.view(self.shape)
        return flat.view(self.lead, self.each, self.tail)[:, : self.own].reshape(self.shape)


@dataclass(eq=False)
class _Reduction:
    """Gradients that are reduced together: a place for each in a flat buffer."""

    steps: tuple[ReshardStep, ...]
    route: Route
    num_parts: int
    """The number of rows: 1 for sums that stay whole, else one for each rank that the buffer is scattered over."""
    members: dict[int, _BufferPlace] = field(default_factory=dict)
    row: int = 0
    num_bytes: int = 0
    region: int = 0
    """The region of the last member."""
    is_new: bool = False
    """True if the buffer takes a single gradient, which may itself serve as the buffer."""

    def takes(self, member: Member) -> bool:
        """Return True if the buffer has room for one more gradient."""
        return has_room(self.num_bytes, member.num_bytes, member.region == self.region)


def _reductions(members: Sequence[Member]) -> list[_Reduction]:
    """Share out the gradients that may be joined, in the order in which the backward makes them: the last read first."""
    done: list[_Reduction] = []
    filling: dict[Any, _Reduction] = {}
    for index in reversed(range(len(members))):
        member = members[index]
        key = member.travel.reduction_key
        if key is None:
            continue
        found = filling.get(key)
        if found is None or not found.takes(member):
            (kind, axis), *_ = key[0]
            parts = member.back.communicator.mesh[axis] if kind == "reduce_scatter" else 1
            found = filling[key] = _Reduction(member.back.steps, member.back, parts)
            done.append(found)
        place = found.members[index] = _BufferPlace(member.back, found.num_parts, found.row)
        found.row += place.length
        found.num_bytes += member.num_bytes
        found.region = member.region
        found.is_new = len(found.members) == 1 and member.is_new and place.is_in_rows
    return done


class _Buffer:
    """The buffer of one reduction: gradients arrive one by one, and are reduced together."""

    def __init__(self, reduction: _Reduction, like: Tensor) -> None:
        self.reduction = reduction
        self.missing = set(reduction.members)
        self.pending: Pending | None = None
        shape = (reduction.num_parts, reduction.row)
        self.is_given = reduction.is_new and like.is_contiguous() and not torch.is_grad_enabled()
        self.flat: Tensor | None = like.view(shape) if self.is_given else like.new_empty(shape)

    def put(self, index: int, gradient: Tensor) -> None:
        assert self.flat is not None
        if not self.is_given:
            self.reduction.members[index].put(self.flat, gradient)
        self.missing.discard(index)
        if not self.missing:
            self._issue()

    def _issue(self) -> None:
        assert self.flat is not None
        kind = "all_reduce" if self.reduction.num_parts == 1 else "reduce_scatter"
        self.pending = self.reduction.route.communicator.issue(kind, self.reduction.steps[0].axis, self.flat)
        self.flat = None

    def wait(self) -> dict[int, Tensor]:
        """Return the reduced gradients. A gradient that never came counts as zero, so that no other rank waits in vain."""
        if self.pending is None:
            assert self.flat is not None
            for index in self.missing:
                place = self.reduction.members[index]
                self.flat.narrow(1, place.start, place.length).zero_()
            self._issue()
        assert self.pending is not None
        reduced = self.pending.wait().view(-1)
        communicator = self.reduction.route.communicator
        for step in self.reduction.steps[1:]:
            reduced = communicator.all_reduce(step.axis, reduced)
        places = self.reduction.members.items()
        return {index: place.take(reduced) for index, place in places if index not in self.missing}
