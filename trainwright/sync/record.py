"""Defines `SyncRecord`, which states once, beside a method's class, what it keeps, sends, promises and assumes.

Tables and documentation print it, a planner prices it, and the tests compare it with what is really sent and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .network import CommCall, Network
from .requests import Members
from .traffic import all_reduce_bytes

AGREEMENT_BYTES = 512
"""The bytes that each worker sends to all others before the first step, to agree on method and options."""


@dataclass(frozen=True)
class Size:
    """The size of a run, on which the declared numbers depend.

    shapes: the number of elements of each parameter. itemsize: the bytes of an element that is sent. options: those of the
    method, defaults included. dims: the parameters' shapes, for methods that distinguish matrices; default: all are vectors.
    """

    shapes: tuple[int, ...]
    itemsize: int
    num_workers: int
    options: Mapping[str, Any] = field(default_factory=dict)
    dims: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not self.dims:
            object.__setattr__(self, "dims", tuple((length,) for length in self.shapes))

    @property
    def num_params(self) -> int:
        return sum(self.shapes)

    @property
    def param_bytes(self) -> int:
        """Return P, the bytes of one copy of the parameters."""
        return self.num_params * self.itemsize


@dataclass(frozen=True)
class Message:
    """One kind of message or collective.

    total_bytes: the bytes that all workers together send in one occurrence. times: the number of occurrences in the first k
    steps. says: the same in words, for one worker. members: the number of workers in a broadcast; default: all. seconds: those of
    one occurrence along edges, given the computation between two, which may hide some; default: as if a worker's share were one
    message. follows: whether it directly follows the previous one in the record, and has only the rest of that one's burst.
    """

    what: str
    kind: str
    total_bytes: Callable[[Size], int]
    times: Callable[[Size, int], int]
    says: str
    members: Callable[[Size], int] = lambda size: size.num_workers
    seconds: Callable[[Size, Network, float], float] | None = None
    follows: bool = False

    def seconds_on(self, size: Size, network: Network, compute_s: float) -> float:
        """Return the seconds of one occurrence on the links of `network`, as the simulator counts them.

        compute_s: the computation between two occurrences. No worker is late.
        """
        n, total = size.num_workers, self.total_bytes(size)
        if n == 1 or not total:
            return 0.0
        if self.seconds is not None:
            return self.seconds(size, network, compute_s)
        if self.kind == "edge":
            return network.message_s(total / n)
        return network.collective_s(*self._calls(size))

    def burst_left(self, size: Size, network: Network) -> float:
        """Return the bytes of a burst that are left after one occurrence."""
        if size.num_workers == 1 or self.kind == "edge" or self.seconds is not None or not self.total_bytes(size):
            return network.burst_bytes
        return max(0.0, network.burst_bytes - network.wire * network.collective(*self._calls(size))[1])

    def _calls(self, size: Size) -> tuple[list[CommCall], Members]:
        """Return the collectives of one occurrence, and their members."""
        n, total = size.num_workers, self.total_bytes(size)
        if self.kind == "broadcast":
            members = self.members(size)
            return [(self.kind, total * members // (n * (members - 1)))], tuple(range(members))
        halves = ("all_gather",) if self.kind == "all-gather" else ("all_to_all", "all_gather")
        part = total // (len(halves) * n * (n - 1))
        return [(half, part) for half in halves], tuple(range(n))


@dataclass(frozen=True)
class StateVector:
    """One entry of the state whose size grows with the model's: the elements that one worker keeps, and their width."""

    name: str
    num_elements: Callable[[Size], int] = lambda size: size.num_params
    itemsize: int | None = None
    """The bytes of an element; `None`: as many as of an element that is sent."""

    def num_bytes(self, size: Size) -> int:
        """Return the bytes that one worker keeps."""
        return self.num_elements(size) * (self.itemsize or size.itemsize)


@dataclass(frozen=True)
class SyncRecord:
    """A method's class and what it declares; P is the bytes of one copy of the parameters, n the number of workers.

    `takes` is the argument of a step: `loss`, after its backward, or `closure`, a function that computes one.
    """

    name: str
    cls: type[Any]
    summary: str
    messages: tuple[Message, ...]
    promises: str
    assumes: str
    states: tuple[StateVector, ...] = ()
    takes: str = "loss"
    extra_passes: str = "0"
    """The forward and backward passes of a step beyond the user's own."""
    faults: str = "none: the others wait"
    """The effect of a worker that is slow or gone on the others."""
    gradients: Callable[[Size], float] = lambda size: 1.0
    """The number of batch gradients that a worker computes in a step, or whose time it takes."""
    paper: str = ""
    departs: str = ""
    """The differences from the paper."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options given to `cls` unless the user says otherwise."""

    def state_bytes(self, size: Size) -> int:
        """Return the bytes that one worker keeps between steps, beside model and optimizer."""
        return sum(state.num_bytes(size) for state in self.states)

    def sent_bytes(self, size: Size, num_steps: int) -> int:
        """Return the bytes that all workers together send from the beginning to the end of step `num_steps`."""
        n = size.num_workers
        of_steps = sum(each.total_bytes(size) * each.times(size, num_steps) for each in self.messages if n > 1)
        return n * (n - 1) * AGREEMENT_BYTES + of_steps

    def bytes_per_step(self, size: Size, over: int = 1000) -> float:
        """Return the bytes that one worker sends a step, on average over `over` steps."""
        return (self.sent_bytes(size, over) - self.sent_bytes(size, 0)) / over / size.num_workers

    def exchange_s(self, size: Size, network: Network, compute_s: float, over: int = 1000) -> float:
        """Return a worker's seconds of communication a step, on average over `over` steps with `compute_s` of computation."""
        total_s, left = 0.0, network.burst_bytes
        for each in self.messages:
            if not each.times(size, over):
                continue
            link = replace(network, burst_bytes=left) if each.follows else network
            total_s += each.seconds_on(size, link, compute_s) * each.times(size, over)
            left = each.burst_left(size, link)
        return total_s / over

    def row(self, size: Size) -> dict[str, str]:
        """Return the row of the table that lists the methods; numbers are those of `size`."""
        return {
            "name": self.name,
            "sent a step": " + ".join(each.says for each in self.messages if each.says),
            "sent B/param": f"{self.bytes_per_step(size) / size.num_params:.3g}",
            "state B/param": f"{self.state_bytes(size) / size.num_params:.3g}",
            "what it does": self.summary,
            "promises": self.promises,
            "assumes": self.assumes,
            "a worker gone or slow": self.faults + ("; at a meeting, they go on" if self.cls.bears_changes else ""),
            "extra passes": self.extra_passes,
            "paper": self.paper,
        }


def every(period: Callable[[Size], int]) -> Callable[[Size, int], int]:
    """Return the `times` of a message that occurs at the end of each `period` of steps."""
    return lambda size, num_steps: num_steps // period(size)


def each_step(size: Size, num_steps: int) -> int:
    """Return the `times` of a message that occurs in each step."""
    return num_steps


def all_reduced(size: Size) -> int:
    """Return the `total_bytes` of an all-reduce of the parameters or gradients."""
    return all_reduce_bytes(size.num_params, size.itemsize, size.num_workers)
