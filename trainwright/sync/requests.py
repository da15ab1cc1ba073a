"""Requests that a method may make: those that a generator yields, and what it gets in return.

    mean = (yield AllReduce(x)) / size          the sum over all workers, in the order of their ranks
    rows = yield AllGather(x)                   [size, *x.shape]
    best = yield Broadcast(x, root)             x of `root`
    given = yield AllToAll(parts)               part `rank` of each worker's `parts`; both [size, …]
    others = yield Exchange(x, peers)           {peer: its x}, from each of the peers, which ask the same of us
    yield Send(x, to, tag);  message = yield Receive(like, source, tag)

A method does not know who answers: `ranks.Ranks` does by torch.distributed, `simulator.simulate` in one process. Tensors
that are handed over belong to the engine until the answer is there, and are not written to by it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

Members = tuple[int, ...]
"""Ranks of the workers of a group, ascending; `None` in a request: all of them."""


@dataclass(frozen=True, eq=False)
class Identify:
    """Ask for this worker's place; answered by a `Place`."""


@dataclass(frozen=True)
class Place:
    """Which of how many workers this one is."""

    rank: int
    size: int


@dataclass(frozen=True, eq=False)
class Form:
    """Have groups made, by all workers alike, before their first collective; answered by `None`."""

    groups: tuple[Members, ...]


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Sum over the members, added in the order of their ranks, so that the bits do not hang on the engine."""

    tensor: Tensor
    members: Members | None = None


@dataclass(frozen=True, eq=False)
class AllGather:
    """Gather the members' tensors, which are of one shape, stacked in front in the order of their ranks."""

    tensor: Tensor
    members: Members | None = None


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Give part k of `tensor` ([size, …]) to member k; the answer holds what the members gave this one."""

    tensor: Tensor
    members: Members | None = None


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Take over the tensor of `root`, a rank; the others' tensors say its shape and type."""

    tensor: Tensor
    root: int
    members: Members | None = None


@dataclass(frozen=True, eq=False)
class Exchange:
    """Send `tensor` to each of `peers` and take theirs; answered by a dict, when all have come."""

    tensor: Tensor
    peers: Members


@dataclass(frozen=True, eq=False)
class Send:
    """Send `tensor` to the worker `to`, which receives it under `tag`; goes on at once."""

    tensor: Tensor
    to: int
    tag: int = 0


@dataclass(frozen=True, eq=False)
class Receive:
    """Wait for a message of `source`, or of anyone (`None`), under `tag`; answered by a `Letter`.

    like: says shape and type. within_s: seconds after which `None` is the answer; the message may still come, to a later
    `Receive`. Where workers come and go, the answer may be a `Gone`.
    """

    like: Tensor
    source: int | None = None
    tag: int = 0
    within_s: float | None = None


@dataclass(frozen=True, eq=False)
class Letter:
    """A message that was received, and from whom."""

    source: int
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Compute:
    """Say that this worker computes, `amount` gradients of its batch long: a simulated clock goes on, a real one has."""

    amount: float = 1.0


@dataclass(frozen=True, eq=False)
class Now:
    """Ask for the seconds since the run began."""


@dataclass(frozen=True, eq=False)
class Count:
    """Add to the counter `name` that all workers share; answered by its new value, at once and waiting for nobody."""

    name: str
    amount: int = 1


@dataclass(frozen=True, eq=False)
class Absent:
    """Ask who is gone; answered by a dict, {rank: name}. Nobody is, but where workers come and go."""


@dataclass(frozen=True, eq=False)
class Gone:
    """The answer to a `Receive` whose sender, or for one from anyone some worker, is gone: its rank, and its name."""

    source: int
    name: str


class MembersChanged(Exception):
    """Raised in place of an answer where workers come and go: some were gone before all had it, and nobody has.

    place: this worker's, among those who are left. gone: the names of the others. A program that goes on asks again.
    """

    def __init__(self, place: Place, gone: list[str]) -> None:
        super().__init__(f"{', '.join(gone)} gone; {place.size} workers are left")
        self.place, self.gone = place, gone


Request = (
    Identify
    | Form
    | AllReduce
    | AllGather
    | AllToAll
    | Broadcast
    | Exchange
    | Send
    | Receive
    | Compute
    | Now
    | Count
    | Absent
)
T = TypeVar("T")
Steps = Generator[Request, Any, T]
"""The form of a method: a generator that yields requests, is sent the answers, returns a `T`."""
