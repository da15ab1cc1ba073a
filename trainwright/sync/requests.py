"""Defines the requests that a method's generator may yield, and their answers.

    mean = (yield AllReduce(x)) / size          the sum over all workers, in the order of their ranks
    rows = yield AllGather(x)                   [size, *x.shape]
    best = yield Broadcast(x, root)             x of `root`
    given = yield AllToAll(parts)               part `rank` of each worker's `parts`; both [size, …]
    others = yield Exchange(x, peers)           {peer: its x}, from each of the peers, which yield the same
    yield Send(x, to, tag);  message = yield Receive(like, source, tag)

A method does not know which engine answers: `ranks.Ranks` by torch.distributed, or `simulator.simulate` in one process. The
tensors of a request must stay unchanged until the answer arrives; the engine does not write to them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

Members = tuple[int, ...]
"""The ranks of a group's workers, ascending; `None` in a request means all workers."""


@dataclass(frozen=True, eq=False)
class Identify:
    """Ask for this worker's rank; answered by a `RankAndSize`."""


@dataclass(frozen=True)
class RankAndSize:
    """A worker's rank, and the number of workers."""

    rank: int
    size: int


@dataclass(frozen=True, eq=False)
class Form:
    """Form groups, the same on all workers, before their first collective; answered by `None`."""

    groups: tuple[Members, ...]


@dataclass(frozen=True, eq=False)
class AllReduce:
    """Sum over the members in the order of their ranks, so that the bits do not depend on the engine."""

    tensor: Tensor
    members: Members | None = None


@dataclass(frozen=True, eq=False)
class AllGather:
    """Gather the members' tensors, all of one shape, stacked along a new leading dim in the order of their ranks."""

    tensor: Tensor
    members: Members | None = None


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Send part k of `tensor` ([size, …]) to member k; the answer has the parts that the members sent to this one."""

    tensor: Tensor
    members: Members | None = None


@dataclass(frozen=True, eq=False)
class Broadcast:
    """Receive the tensor of rank `root`; the others' tensors give its shape and dtype."""

    tensor: Tensor
    root: int
    members: Members | None = None


@dataclass(frozen=True, eq=False)
class Exchange:
    """Send `tensor` to each of `peers` and receive theirs; answered by a dict, once all have arrived."""

    tensor: Tensor
    peers: Members


@dataclass(frozen=True, eq=False)
class Send:
    """Send `tensor` to the worker `to`, which receives it under `tag`; answered at once."""

    tensor: Tensor
    to: int
    tag: int = 0


@dataclass(frozen=True, eq=False)
class Receive:
    """Wait for a message from `source`, or from any worker (`None`), under `tag`; answered by a `Letter`.

    like: a tensor of the message's shape and dtype. within_s: the seconds after which `None` is the answer; a later `Receive`
    may still get the message. Where workers come and go, the answer may be a `Gone`.
    """

    like: Tensor
    source: int | None = None
    tag: int = 0
    within_s: float | None = None


@dataclass(frozen=True, eq=False)
class Letter:
    """A received message, and its sender."""

    source: int
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Compute:
    """Advance a simulated clock by the time of `amount` batch gradients; on real ranks, where time has passed, do nothing."""

    amount: float = 1.0


@dataclass(frozen=True, eq=False)
class Now:
    """Ask for the seconds since the start of the run."""


@dataclass(frozen=True, eq=False)
class Count:
    """Add to the counter `name`, which all workers share; answered at once by its new value."""

    name: str
    amount: int = 1


@dataclass(frozen=True, eq=False)
class Absent:
    """Ask which workers are gone; answered by a dict, {rank: name}, which is empty unless workers come and go."""


@dataclass(frozen=True, eq=False)
class Gone:
    """The answer to a `Receive` if its source, or for a receive from any some worker, is gone: its rank and name."""

    source: int
    name: str


class MembersChanged(Exception):
    """Raised instead of an answer if some workers left before all had it; then nobody has it.

    place: this worker's place among those that are left. gone: the names of the others. A program that continues repeats its
    request.
    """

    def __init__(self, place: RankAndSize, gone: list[str]) -> None:
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
"""A program: a generator that yields requests, is sent the answers, and returns a `T`."""
