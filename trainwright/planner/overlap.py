"""What parameters that travel in buckets cost, and what of it computation hides.

Collectives that are joined share one latency and add up their bytes; all others of a bucket are paid one by one. To see
what is hidden, forward and backward are followed on two clocks, t of computation and c of communication:

    compute d      t ← t + d
    issue d        c ← max(c, t) + d
    wait           t ← max(t, c when the awaited one ends)

What the waits add to t is exposed; the rest of the seconds of communication is hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..capture.buckets import Bucket
from ..capture.local import Instruction
from ..capture.reshard import Route
from .costs import CostModel

Seconds = tuple[float, float]
"""Forward, backward."""


def bucket_s(instruction: Instruction, costs: CostModel) -> Seconds:
    """Return the seconds that opening a bucket (the reductions) or closing it for one parameter (its gather) communicates."""
    bucket = instruction.bucket
    assert bucket is not None
    place = instruction.args[0]
    if isinstance(place, int):
        return gather_s(bucket, place, costs), 0.0
    return 0.0, sum(reduction_s(bucket, costs).values())


def gather_s(bucket: Bucket, index: int, costs: CostModel, among: Sequence[int] | None = None) -> float:
    """Return the seconds to bring one parameter of a bucket into the layout that is wanted; `among` those, by default all."""
    member = bucket.members[index]
    seconds = _route_s(member.there, member.dtype.itemsize, costs)
    joined = next((found for found in bucket.joined_gathers(among) if index in found), ())
    return seconds - costs.latency_s(member.there.steps, member.there.slots) if index in joined[1:] else seconds


def reduction_s(bucket: Bucket, costs: CostModel) -> dict[Any, float]:
    """Return the seconds of every reduction of a bucket: of the joined ones, and by index of those that go alone."""
    found: dict[Any, float] = {}
    for reduction in bucket.reductions:
        alone = [
            _route_s(route, bucket.members[k].dtype.itemsize, costs) for k, (_, _, route) in reduction.members.items()
        ]
        found[reduction] = sum(alone) - (len(alone) - 1) * costs.latency_s(reduction.steps, reduction.route.slots)
    for index in bucket.trained:
        if index not in bucket.reduction_of:
            found[index] = _route_s(bucket.members[index].back, bucket.members[index].dtype.itemsize, costs)
    return found


def _route_s(route: Route, itemsize: int, costs: CostModel) -> float:
    return sum(costs.step_s(step, route.slots, itemsize) for step in route.steps)


class Timeline:
    """One step on two clocks."""

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self.moments: list[tuple[Instruction, Seconds, Seconds]] = []

    def add(self, instruction: Instruction, compute: Seconds, comm: Seconds) -> None:
        """Append the next instruction of the forward."""
        self.moments.append((instruction, compute, comm))

    def hidden_s(self) -> float:
        """Return the seconds of communication that computation hides, forward and backward."""
        forward, backward = _Clocks(), _Clocks()
        for instruction, compute, comm in self.moments:
            self._forward(forward, instruction, compute[0], comm[0])
        for instruction, compute, comm in reversed(self.moments):
            self._backward(backward, instruction, compute[1], comm[1])
        return forward.hidden_s + backward.hidden_s

    def _forward(self, clocks: _Clocks, instruction: Instruction, compute_s: float, comm_s: float) -> None:
        bucket = instruction.bucket
        if bucket is None:
            clocks.run(compute_s, comm_s)
        elif isinstance(instruction.args[0], int):
            clocks.wait([(bucket, instruction.args[0])])
        else:
            for index in range(len(bucket.members)):
                clocks.issue((bucket, index), gather_s(bucket, index, self.costs))

    def _backward(self, clocks: _Clocks, instruction: Instruction, compute_s: float, comm_s: float) -> None:
        bucket = instruction.bucket
        if bucket is None:
            clocks.run(compute_s, comm_s)
            return
        reductions = reduction_s(bucket, self.costs)
        if not isinstance(instruction.args[0], int):
            clocks.wait([(bucket, found) for found in reductions])
            return
        index = instruction.args[0]
        reduction = bucket.reduction_of.get(index)
        # Members are put in from the last read to the first: the first of a buffer completes it.
        if reduction is None and index in reductions:
            clocks.issue((bucket, index), reductions[index])
        elif reduction is not None and index == min(reduction.members):
            clocks.issue((bucket, reduction), reductions[reduction])


class _Clocks:
    def __init__(self) -> None:
        self.compute_s = self.comm_s = self.hidden_s = 0.0
        self.ends: dict[Any, float] = {}

    def run(self, compute_s: float, comm_s: float) -> None:
        """Computation, then a collective that is waited for."""
        self.compute_s += compute_s
        if comm_s:
            self.issue(None, comm_s)
            self.wait([None])

    def issue(self, key: Any, comm_s: float) -> None:
        self.comm_s = max(self.comm_s, self.compute_s) + comm_s
        self.hidden_s += comm_s
        self.ends[key] = self.comm_s

    def wait(self, keys: Iterable[Any]) -> None:
        end = max((self.ends.get(key, 0.0) for key in keys), default=0.0)
        exposed = max(0.0, end - self.compute_s)
        self.hidden_s -= exposed
        self.compute_s += exposed
