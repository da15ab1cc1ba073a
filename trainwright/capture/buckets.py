"""Parameters on their way: gathered before they are read, their gradients reduced together while the backward goes on.

A region's parameters whose layout changes travel as one `Bucket`. Two instructions stand for it, and each has a mirror in
the backward, since autograd runs backwards what was made last:

    open     forward   issues the gathers                         backward  waits for the reductions
    close    forward   waits for one parameter's gather           backward  puts its gradient into a flat buffer;
                                                                            the last one to arrive issues the reduction

Where a bucket is opened says how far ahead its gathers are issued and how late its reductions are waited for: `schedule`.

So what is issued early is part of the program that is priced, simulated and run. Gradients that take the same steps share
a buffer of at most `BUFFER_BYTES` and one collective; a parameter's gradient is then a view of what was reduced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .layout import chunk, local_shape, local_sizes
from .reshard import Pending, Route
from .transition import Step

BUFFER_BYTES = 25 * 2**20
"""A reduction begins when so much has gathered: large enough for the bandwidth, small enough to begin early."""

ENOUGH_BYTES = 4 * 2**20
"""A buffer that holds so much takes no gradient of another region: beyond it a collective's latency is little."""

SMALL_BYTES = 64 * 2**10
"""Parameters no larger are gathered together, which takes a copy of each; larger ones go alone, without."""


@dataclass(eq=False)
class Member:
    """One parameter of a bucket: the ways there and back, and the region that reads it."""

    there: Route
    back: Route
    trained: bool
    dtype: torch.dtype
    num_bytes: int
    """Of the gradient before it is reduced."""
    region: int = 0


class Bucket:
    """Parameters that change their layout, of one region or of several; made once, run every step.

    ahead: whether it is opened one region ahead, and what the backward gathers again is gathered so too.
    """

    def __init__(self, members: Sequence[Member], ahead: bool) -> None:
        self.members, self.ahead = tuple(members), ahead
        self.trained = [index for index, member in enumerate(members) if member.trained]
        self.reductions = _reductions(members)
        self.reduction_of = {index: found for found in self.reductions for index in found.members}

    def open(self, flights: Flights, *params: Tensor) -> list[Tensor]:
        """Return what `close` takes, and issue the gathers."""
        flight = flights[self] = Flight(self)
        flight.gather(dict(enumerate(params)))
        tokens = list(params)
        if self.trained and torch.is_grad_enabled():
            opened = _Open.apply(flight, *(params[index] for index in self.trained))
            for index, token in zip(self.trained, opened):
                tokens[index] = token
        return tokens

    def joined_gathers(self, indices: Sequence[int] | None = None) -> list[tuple[int, ...]]:
        """Return which of the parameters `indices` (by default all) are gathered by one collective: small ones."""
        groups: dict[Any, list[int]] = {}
        for index in range(len(self.members)) if indices is None else indices:
            member = self.members[index]
            steps = member.there.steps
            if is_small_gather(steps, member.num_bytes):
                groups.setdefault((steps[0].axis, member.dtype), []).append(index)
        return [tuple(found) for found in groups.values() if len(found) > 1]

    def close(self, flights: Flights, index: int, token: Tensor) -> Tensor:
        """Return the parameter `index` in the layout that is wanted."""
        return _Close.apply(token, flights[self], index)  # type: ignore[no-any-return]


class Flight:
    """What of one bucket is under way in one run of a program."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.gathers: dict[int, Pending] = {}
        self.buffers: dict[_Reduction, _Buffer] = {}
        self.alone: dict[int, Pending] = {}

    def gather(self, params: Mapping[int, Tensor]) -> None:
        """Issue the gathers of these parameters, by index, that are not under way."""
        missing = [index for index in params if index not in self.gathers and self.bucket.members[index].there.moves]
        for joined in self.bucket.joined_gathers(missing):
            parts = [params[index].detach() for index in joined]
            shared = _JoinedGather([self.bucket.members[index].there for index in joined], parts)
            self.gathers.update((index, shared.of(place)) for place, index in enumerate(joined))
        for index in missing:
            if index not in self.gathers:
                self.gathers[index] = self.bucket.members[index].there.start(params[index].detach())

    def take(self, index: int, param: Tensor) -> Tensor:
        """Return a parameter in its wanted layout: wait for it if it is on its way, else fetch it now."""
        route = self.bucket.members[index].there
        if not route.steps:
            return param.view_as(param)
        pending = self.gathers.pop(index, None)
        return route.run(param) if pending is None else pending.wait()

    def put(self, index: int, gradient: Tensor) -> None:
        """Take in one parameter's gradient; the last one of a buffer sends it on its way."""
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
        parts = self.gathered.narrow(1, start, self.lengths[place]).contiguous().view(len(self.gathered), *shape)
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
"""What is under way in one run, by bucket."""


class _Open(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        ctx.set_materialize_grads(False)
        return tuple(param.view_as(param) for param in params)

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        return None, *ctx.flight.gradients()


class _Close(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: Flight, index: int) -> Tensor:
        ctx.flight, ctx.index = flight, index
        return flight.take(index, token)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.flight.put(ctx.index, grads[0])
        return None, None, None


@dataclass(eq=False)
class _Reduction:
    """Gradients that are reduced together: a place for each in a flat buffer."""

    steps: tuple[Step, ...]
    route: Route
    num_parts: int
    """1 for sums that stay whole; else the ranks that the buffer is scattered over, one row each."""
    members: dict[int, tuple[int, int, Route]] = field(default_factory=dict)
    """Index → where it begins in a row, its length there, its way back."""
    row: int = 0
    num_bytes: int = 0
    region: int = 0
    """Of the last member."""

    def takes(self, member: Member) -> bool:
        """Whether there is room for one more gradient."""
        enough = BUFFER_BYTES if member.region == self.region else min(BUFFER_BYTES, ENOUGH_BYTES + member.num_bytes)
        return self.num_bytes + member.num_bytes <= enough


def _reductions(members: Sequence[Member]) -> list[_Reduction]:
    """Share out the gradients that may be joined, in the order in which the backward makes them: the last read first."""
    done: list[_Reduction] = []
    filling: dict[Any, _Reduction] = {}
    for index in reversed(range(len(members))):
        member = members[index]
        kinds = joined_kinds(member.back.steps)
        if not member.trained or kinds is None:
            continue
        key = (*kinds, member.dtype)
        found = filling.get(key)
        if found is None or not found.takes(member):
            parts = member.back.communicator.mesh[kinds[0][1]] if kinds[0][0] == "reduce_scatter" else 1
            found = filling[key] = _Reduction(member.back.steps, member.back, parts)
            done.append(found)
        length = _row_length(member.back, found.num_parts)
        found.members[index] = (found.row, length, member.back)
        found.row += length
        found.num_bytes += member.num_bytes
        found.region = member.region
    return done


def is_small_gather(steps: Sequence[Step], num_bytes: int) -> bool:
    """Whether a parameter's way to where it is read, `num_bytes` there, is a gather that others of its region may join."""
    return [step.kind for step in steps] == ["all_gather"] and num_bytes <= SMALL_BYTES


def only_sums(steps: Sequence[Step]) -> bool:
    """Whether a gradient stays whole on its way back: what it is joined in is reduced in place, and then holds it."""
    return bool(steps) and all(step.kind == "all_reduce" for step in steps)


def joined_kinds(steps: Sequence[Step]) -> tuple[tuple[str, int], ...] | None:
    """The collectives of a way back whose tensors may be joined: sums along axes, or one scattered sum."""
    kinds = tuple((step.kind, step.axis) for step in steps)
    if only_sums(steps):
        return kinds
    return kinds if len(kinds) == 1 and kinds[0][0] == "reduce_scatter" else None


def _row_length(route: Route, num_parts: int) -> int:
    """How many elements of a row one tensor takes: all, or the padded part of one rank."""
    sizes = local_sizes(route.slots, route.steps[0].before, route.communicator.mesh, route.communicator.coords)
    if num_parts == 1:
        return math.prod(sizes)
    slot = route.steps[0].slot
    return math.prod(sizes) // max(1, sizes[slot]) * -(-sizes[slot] // num_parts)


class _Buffer:
    """One reduction in the making: gradients come in one by one, and leave together."""

    def __init__(self, reduction: _Reduction, like: Tensor) -> None:
        self.reduction = reduction
        self.flat: Tensor | None = like.new_empty(reduction.num_parts, reduction.row)
        self.missing = set(reduction.members)
        self.pending: Pending | None = None

    def put(self, index: int, gradient: Tensor) -> None:
        start, length, route = self.reduction.members[index]
        assert self.flat is not None
        place = self.flat.narrow(1, start, length)
        if self.reduction.num_parts == 1:
            place.view(gradient.shape).copy_(gradient)
        else:
            _put_parts(place, gradient, route)
        self.missing.discard(index)
        if not self.missing:
            self._issue()

    def _issue(self) -> None:
        assert self.flat is not None
        first = self.reduction.steps[0]
        communicator = self.reduction.route.communicator
        if self.reduction.num_parts == 1:
            self.pending = communicator.issue("all_reduce", first.axis, self.flat)
        else:
            self.pending = communicator.issue("reduce_scatter", first.axis, self.flat)
        self.flat = None

    def wait(self) -> dict[int, Tensor]:
        """Return the reduced gradients. One that never came counts as zero, so that no other rank waits in vain."""
        if self.pending is None:
            assert self.flat is not None
            for index in self.missing:
                start, length, _ = self.reduction.members[index]
                self.flat.narrow(1, start, length).zero_()
            self._issue()
        assert self.pending is not None
        reduced = self.pending.wait().view(-1)
        communicator = self.reduction.route.communicator
        for step in self.reduction.steps[1:]:
            reduced = communicator.all_reduce(step.axis, reduced)
        found = {}
        for index, (start, length, route) in self.reduction.members.items():
            if index not in self.missing:
                found[index] = _own(reduced.narrow(0, start, length), route, self.reduction.num_parts)
        return found


def _put_parts(place: Tensor, gradient: Tensor, route: Route) -> None:
    """Write a gradient into its columns of the rows, each rank's part into that rank's row."""
    step = route.steps[0]
    sizes = local_sizes(route.slots, step.before, route.communicator.mesh, route.communicator.coords)
    lead, whole, tail = math.prod(sizes[: step.slot]), sizes[step.slot], math.prod(sizes[step.slot + 1 :])
    num = place.shape[0]
    each = -(-whole // num)
    rows = place.view(num, lead, each, tail)
    parts = gradient.reshape(lead, whole, tail)
    if whole == num * each:
        rows.copy_(parts.view(lead, num, each, tail).transpose(0, 1))
        return
    rows.zero_()
    for rank in range(num):
        start, stop = chunk(whole, num, rank)
        rows[rank, :, : stop - start].copy_(parts[:, start:stop])


def _own(flat: Tensor, route: Route, num_parts: int) -> Tensor:
    """Return one gradient's reduced elements in the shape of the rank's part."""
    mesh, coords = route.communicator.mesh, route.communicator.coords
    step = route.steps[-1]
    shape = local_shape(route.shape, route.slots, step.after, mesh, coords)
    if num_parts == 1:
        return flat.view(shape)
    before, after = (local_sizes(route.slots, layout, mesh, coords) for layout in (step.before, step.after))
    lead, tail = math.prod(before[: step.slot]), math.prod(before[step.slot + 1 :])
    each = -(-before[step.slot] // num_parts)
    return flat.view(lead, each, tail)[:, : after[step.slot]].reshape(shape)
