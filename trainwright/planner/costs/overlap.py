"""The communication of parameters in buckets: what it costs, and how much of it computation hides.

Collectives that are joined share one latency and add up their bytes; each of the others pays its own. A reshard along
several axes issues its first collective early (`rank.travel.issued_step`); its other steps run when it is waited for.
`Timeline` replays the forward and the backward on a clock of computation, t, and one clock of each link, c:

    compute d      t ← t + d
    issue d        c ← max(c, t) + d
    wait           t ← max(t, c when the awaited collective ends), then the remaining steps
    exchange d     t ← c ← max(c, t) + d

Communication is exposed by as much as waits and exchanges add to t; the rest of it is hidden. Mesh axes over the same link
share its clock; axes over different links have process groups, hence queues, of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...program.transition import ReshardStep
from ...rank.buckets import Bucket
from ...rank.instructions import Borrow, Close, Compute, Instruction, Open, Reshard
from ...rank.reshard import Route
from ...rank.travel import issued_step
from .costs import CostModel

Seconds = tuple[float, float]
"""The seconds of the forward and of the backward."""


@dataclass(frozen=True)
class Trip:
    """The seconds of each step of a reshard, and the index of the step that is issued early."""

    steps: tuple[tuple[int | None, float], ...]
    """The axis and the seconds of each step; a slice has no axis, since it communicates nothing."""
    issued: int | None

    @property
    def seconds(self) -> float:
        """Return the seconds of all steps."""
        return sum(seconds for _, seconds in self.steps)


def bucket_s(instruction: Open | Close, costs: CostModel) -> Seconds:
    """Return the seconds that a bucket communicates: its reductions when it opens, one parameter's gather when it closes."""
    match instruction:
        case Close(bucket=bucket, place=place):
            return gather(bucket, place, costs).seconds, 0.0
        case Open(bucket=bucket):
            return 0.0, sum(trip.seconds for trip in reductions(bucket, costs).values())


def gather(bucket: Bucket, index: int, costs: CostModel, among: Sequence[int] | None = None) -> Trip:
    """Return the gather of one parameter of a bucket, beside those of the members `among` (by default all)."""
    member = bucket.members[index]
    joined = next((found for found in bucket.joined_gathers(among) if index in found), ())
    return _trip([(member.there, member.dtype.itemsize)], costs, index in joined[1:])


def reductions(bucket: Bucket, costs: CostModel) -> dict[Any, Trip]:
    """Return every reduction of a bucket: by buffer where gradients share one, by index where a gradient goes alone."""
    found: dict[Any, Trip] = {}
    ways = [(member.back, member.dtype.itemsize) for member in bucket.members]
    for reduction in bucket.reductions:
        found[reduction] = _trip([ways[index] for index in reduction.members], costs)
    for index in bucket.trained:
        if index not in bucket.reduction_of:
            found[index] = _trip([ways[index]], costs)
    return found


def _trip(members: Sequence[tuple[Route, int]], costs: CostModel, joins: bool = False) -> Trip:
    """Return the seconds of tensors that go the same steps together; `joins`: another tensor pays their latency."""
    first = members[0][0]
    steps = []
    for number, step in enumerate(first.steps):
        alone = sum(costs.step_s(route.steps[number], route.slots, itemsize) for route, itemsize in members)
        paid = len(members) if joins else len(members) - 1
        steps.append((_axis(step), alone - paid * costs.step_s(step, first.slots, 0)))
    return Trip(tuple(steps), issued_step(first.steps))


def _axis(step: ReshardStep) -> int | None:
    return None if step.kind == "slice" else step.axis


class Timeline:
    """Replays the instructions of one training step on the clocks."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.moments: list[tuple[Instruction, Seconds, Seconds]] = []

    def add(self, instruction: Instruction, compute: Seconds, comm: Seconds) -> None:
        """Append the next instruction of the forward."""
        self.moments.append((instruction, compute, comm))

    def hidden_s(self) -> Seconds:
        """Return the seconds of communication that computation hides in the forward, and in the backward."""
        forward, backward = _Clocks(self.costs.links), _Clocks(self.costs.links)
        for instruction, compute, comm in self.moments:
            self._forward(forward, instruction, compute[0], comm[0])
        for instruction, compute, comm in reversed(self.moments):
            self._backward(backward, instruction, compute[1], comm[1])
        return forward.hidden_s, backward.hidden_s

    def shown_s(self, hidden: Seconds) -> list[tuple[Instruction, float, float]]:
        """Return each instruction's seconds of forward and backward, where computation hides `hidden` of each.

        What is hidden is spread evenly over the communication of its phase: transfers beside a phase need its length.
        """
        comm_s = [sum(comm[phase] for _, _, comm in self.moments) for phase in (0, 1)]
        there, back = (1 - each_s / all_s if all_s else 1.0 for each_s, all_s in zip(hidden, comm_s, strict=True))
        return [
            (each, compute[0] + there * comm[0], compute[1] + back * comm[1]) for each, compute, comm in self.moments
        ]

    def _forward(self, clocks: _Clocks, instruction: Instruction, compute_s: float, comm_s: float) -> None:
        match instruction:
            case Open(bucket=bucket):
                for place in range(len(bucket.members)):
                    clocks.issue((bucket, place), gather(bucket, place, self.costs))
            case Close(bucket=bucket, place=place):
                clocks.wait([(bucket, place)])
            case Reshard(there=there):
                clocks.run(compute_s, comm_s, map(_axis, there.steps))
            case Compute() | Borrow():
                clocks.run(compute_s, comm_s, self._all_axes)

    def _backward(self, clocks: _Clocks, instruction: Instruction, compute_s: float, comm_s: float) -> None:
        match instruction:
            case Open(bucket=bucket):
                clocks.wait([(bucket, key) for key in reductions(bucket, self.costs)])
            case Close(bucket=bucket, place=place):
                self._hand_in(clocks, bucket, place)
            case Reshard(back=back):
                clocks.run(compute_s, comm_s, map(_axis, back.steps))
            case Compute() | Borrow():
                clocks.run(compute_s, comm_s, self._all_axes)

    def _hand_in(self, clocks: _Clocks, bucket: Bucket, place: int) -> None:
        """Issue the reduction that the gradient of member `place` completes, if any.

        Gradients arrive in the reverse order of the members, so the first member of a buffer completes it.
        """
        found, reduction = reductions(bucket, self.costs), bucket.reduction_of.get(place)
        if reduction is None and place in found:
            clocks.issue((bucket, place), found[place])
        elif reduction is not None and place == min(reduction.members):
            clocks.issue((bucket, reduction), found[reduction])

    @property
    def _all_axes(self) -> Iterable[int]:
        """Return all axes: an op whose local form communicates may use any of them."""
        return range(len(self.costs.axes))


class _Clocks:
    """Holds the clock of computation, and one clock for each link."""

    def __init__(self, links: Sequence[int]) -> None:
        self.links = links
        self.compute_s = self.hidden_s = 0.0
        self.comm_s: dict[int, float] = defaultdict(float)
        self.under_way: dict[Any, tuple[float, Trip]] = {}
        """The collectives in flight, by the key that is waited for: when the early step ends, and the whole trip."""

    def run(self, compute_s: float, comm_s: float, axes: Iterable[int | None]) -> None:
        """Compute, then communicate on `axes` with nothing to hide it."""
        self.compute_s += compute_s
        if comm_s:
            links = {self.links[axis] for axis in axes if axis is not None}
            before_s = self.compute_s
            self.compute_s = max([before_s, *(self.comm_s[link] for link in links)]) + comm_s
            self.comm_s.update(dict.fromkeys(links, self.compute_s))
            self.hidden_s -= self.compute_s - before_s - comm_s

    def issue(self, key: Any, trip: Trip) -> None:
        end_s = 0.0
        if trip.issued is not None:
            axis, seconds = trip.steps[trip.issued]
            assert axis is not None
            link = self.links[axis]
            end_s = self.comm_s[link] = max(self.comm_s[link], self.compute_s) + seconds
            self.hidden_s += seconds
        self.under_way[key] = end_s, trip

    def wait(self, keys: Iterable[Any]) -> None:
        for key in keys:
            end_s, trip = self.under_way.pop(key, (0.0, None))
            exposed_s = max(0.0, end_s - self.compute_s)
            self.hidden_s -= exposed_s
            self.compute_s += exposed_s
            if trip is None:
                continue
            for number, (axis, seconds) in enumerate(trip.steps):
                if number != trip.issued:
                    self.run(0.0, seconds, [axis])
