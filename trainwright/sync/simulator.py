"""Runs programs of any number of workers in one process, on a simulated clock, over links with latency and bytes/s.

    a message      leaves when the sender's link is free, takes bytes / bytes_per_s, and arrives latency_s later
    a collective   starts when its last member has asked for it; all-to-all and all-gather take n − 1 messages of one part, in
                   rounds of one message, or of several small ones; a broadcast takes those of a binomial tree, an all-reduce both
                   of its halves
    `Compute`      takes the seconds that `compute_s` gives for the worker and its number of computations so far

Results equal those of real ranks bit for bit; only the engine differs.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from torch import Tensor

from ..artifacts import UserError
from .network import Network
from .requests import (
    Absent,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Compute,
    Count,
    Exchange,
    Form,
    Identify,
    Letter,
    Members,
    Now,
    RankAndSize,
    Receive,
    Request,
    Send,
    Steps,
    T,
)
from .sums import ordered_sum
from .traffic import Traffic

Seconds = float | Callable[[int], float]
"""The seconds of one gradient: a number, or a function of the number that the worker has computed before."""
_EXCHANGE = -1


@dataclass(frozen=True)
class Simulation(Generic[T]):
    """The outcome of a run: each worker's result, its end on the simulated clock, and its traffic."""

    results: list[T]
    ended_s: list[float]
    traffic: list[Traffic]

    @property
    def seconds(self) -> float:
        """Return the time at which the last worker ended."""
        return max(self.ended_s)

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that all workers sent."""
        return sum(each.sent_bytes for each in self.traffic)


def simulate(
    programs: Sequence[Steps[T]], network: Network | None = None, compute_s: Seconds | Sequence[Seconds] = 0.0
) -> Simulation[T]:
    """Run one program for each worker, together, on one simulated clock.

    compute_s: the seconds of a gradient, one for all or one for each worker; an entry may be a function of the number of
    gradients that the worker has computed, such as a `trainwright.federated.Speeds`.

    Raises `UserError` for a wrong number of entries, `RuntimeError` if workers wait for ever, and the error of a worker, with
    its rank.

    >>> import torch
    >>> def program(rank):
    ...     yield Compute()
    ...     return (yield AllReduce(torch.tensor([float(rank)])))
    >>> done = simulate([program(rank) for rank in range(3)], Network(latency_s=0.25), compute_s=[1.0, 1.0, 5.0])
    >>> done.results[0], done.seconds
    (tensor([3.]), 5.5)
    """
    paces = list(compute_s) if isinstance(compute_s, Sequence) else [compute_s] * len(programs)
    if len(paces) != len(programs) or not programs:
        raise UserError(
            f"a time a worker is needed, and a worker at least; got {len(paces)} for {len(programs)}; give one number for all"
        )
    return _Run(programs, network or Network(), paces).until_all_end()


@dataclass
class _Worker(Generic[T]):
    program: Steps[T]
    pace: Seconds
    traffic: Traffic = field(default_factory=Traffic)
    num_computed: int = 0
    paid_s: float = -math.inf
    """The time until which its link is booked; see `Network.paid_s`."""
    collectives: Counter[Members] = field(default_factory=Counter)
    letters: dict[int, deque[Letter]] = field(default_factory=lambda: defaultdict(deque))
    """The messages received, by tag, in the order of arrival."""
    waits: Request | None = None
    wait_number: int = 0
    result: Any = None
    ended_s: float | None = None

    def takes_s(self, amount: float) -> float:
        one_s = self.pace(self.num_computed) if callable(self.pace) else self.pace
        self.num_computed += 1
        return amount * one_s


class _Run(Generic[T]):
    def __init__(self, programs: Sequence[Steps[T]], network: Network, paces: list[Seconds]) -> None:
        self.workers = [_Worker(program, pace) for program, pace in zip(programs, paces)]
        self.everyone = tuple(range(len(programs)))
        self.network = network
        self.queue: list[tuple[float, int, Callable[[float], None]]] = []
        self.num_entries = 0
        self.gathered: dict[tuple[Members, int], dict[int, tuple[Any, float]]] = defaultdict(dict)
        self.counters: Counter[str] = Counter()

    def until_all_end(self) -> Simulation[T]:
        for rank in self.everyone:
            self._resume(rank, None, 0.0)
        while self.queue:
            due_s, _, act = heapq.heappop(self.queue)
            act(due_s)
        stuck = {rank: worker.waits for rank, worker in enumerate(self.workers) if worker.ended_s is None}
        if stuck:
            rank, waits = next(iter(stuck.items()))
            raise RuntimeError(
                f"{len(stuck)} of {len(self.workers)} workers wait for ever; worker {rank} for {type(waits).__name__}"
            )
        ended = [worker.ended_s or 0.0 for worker in self.workers]
        return Simulation([each.result for each in self.workers], ended, [each.traffic for each in self.workers])

    def _at(self, due_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self.queue, (due_s, self.num_entries, act))
        self.num_entries += 1

    def _resume(self, rank: int, answer: Any, due_s: float) -> None:
        self._at(due_s, lambda now_s: self._advance(rank, answer, now_s))

    def _advance(self, rank: int, answer: Any, now_s: float) -> None:
        """Send a worker its answer, and run it until it has to wait."""
        worker = self.workers[rank]
        worker.waits = None
        while worker.waits is None:
            try:
                request = worker.program.send(answer)
            except StopIteration as end:
                worker.result, worker.ended_s = end.value, now_s
                return
            except Exception as error:
                error.add_note(f"raised by worker {rank} at {now_s:g} s on the clock")
                raise
            answer = self._answer(rank, worker, request, now_s)

    def _answer(self, rank: int, worker: _Worker[T], request: Request, now_s: float) -> Any:
        """Return the answer to a request without a wait; for others, set `waits` and schedule the worker's resumption."""
        match request:
            case Identify():
                return RankAndSize(rank, len(self.workers))
            case Absent():
                return {}
            case Form():
                return None
            case Now():
                return now_s
            case Count(name, added):
                self.counters[name] += added
                return self.counters[name]
            case Send(tensor, to, tag):
                self._send(rank, to, tag, tensor, now_s)
                return None
        worker.waits = request
        worker.wait_number += 1
        match request:
            case Compute(amount):
                self._resume(rank, None, now_s + worker.takes_s(amount))
            case Exchange(tensor, peers):
                for peer in sorted(peers):
                    self._send(rank, peer, _EXCHANGE - rank, tensor, now_s)
                self._look(rank, now_s)
            case Receive(within_s=within_s):
                if within_s is not None:
                    number = worker.wait_number
                    self._at(now_s + within_s, lambda at_s: self._give_up(rank, number, at_s))
                self._look(rank, now_s)
            case AllReduce() | AllGather() | AllToAll() | Broadcast():
                self._meet(rank, worker, request, now_s)
        return None

    def _send(self, rank: int, to: int, tag: int, tensor: Tensor, now_s: float) -> None:
        worker = self.workers[rank]
        worker.traffic.count("send", tensor)
        latency_s, bytes_per_s = self.network.link(rank, to)
        num_bytes = tensor.numel() * tensor.element_size()
        worker.paid_s = self.network.paid_s(worker.paid_s, now_s, num_bytes, bytes_per_s)
        letter = Letter(rank, tensor.clone())
        self._at(max(now_s, worker.paid_s) + latency_s, lambda at_s: self._arrive(to, tag, letter, at_s))

    def _arrive(self, rank: int, tag: int, letter: Letter, now_s: float) -> None:
        self.workers[rank].letters[tag].append(letter)
        self._look(rank, now_s)

    def _look(self, rank: int, now_s: float) -> None:
        """Resume a worker if the message that it waits for has arrived."""
        worker = self.workers[rank]
        match worker.waits:
            case Exchange(_, peers) if all(worker.letters[_EXCHANGE - peer] for peer in peers):
                came = {peer: worker.letters[_EXCHANGE - peer].popleft().tensor for peer in sorted(peers)}
                self._settle(rank, came, now_s)
            case Receive(_, source, tag):
                box = worker.letters[tag]
                found = next((letter for letter in box if source in (None, letter.source)), None)
                if found is not None:
                    box.remove(found)
                    self._settle(rank, found, now_s)

    def _settle(self, rank: int, answer: Any, now_s: float) -> None:
        self.workers[rank].waits = Now()
        self._resume(rank, answer, now_s)

    def _give_up(self, rank: int, number: int, now_s: float) -> None:
        worker = self.workers[rank]
        if worker.wait_number == number and isinstance(worker.waits, Receive):
            self._settle(rank, None, now_s)

    def _meet(self, rank: int, worker: _Worker[T], request: Any, now_s: float) -> None:
        members = request.members or self.everyone
        key = (members, worker.collectives[members])
        worker.collectives[members] += 1
        there = self.gathered[key]
        there[rank] = (request, now_s)
        if len(there) < len(members):
            return
        del self.gathered[key]
        requests = {member: there[member][0] for member in members}
        _check_alike(requests)
        begin_s = max(at_s for _, at_s in there.values())
        end_s = self._collective_ends_s(requests, members, begin_s)
        for member, answer in _answers(requests, members).items():
            self._resume(member, answer, end_s)

    def _collective_ends_s(self, requests: Mapping[int, Any], members: Members, begin_s: float) -> float:
        """Count the bytes that each member sends in a collective, and return the time of its end."""
        parts = []
        for kind, of_member in _calls(requests[members[0]], len(members)):
            for member, request in requests.items():
                is_root = not isinstance(request, Broadcast) or request.root == member
                if len(members) > 1:
                    self.workers[member].traffic.count(kind, of_member, len(members), is_root)
            part = of_member.numel() * of_member.element_size() // (len(members) if kind == "all_to_all" else 1)
            parts.append((kind, part))
        if len(members) == 1:
            return begin_s
        latency_s, load, bytes_per_s = self.network.collective(parts, members)
        before_s = min(begin_s, max(self.workers[each].paid_s for each in members))
        paid_s = self.network.paid_s(before_s, begin_s, load, bytes_per_s)
        for each in members:
            self.workers[each].paid_s = max(self.workers[each].paid_s, paid_s)
        return max(begin_s, paid_s) + latency_s


def _calls(request: Any, num_members: int) -> list[tuple[str, Tensor]]:
    """Return the calls of torch.distributed by which real ranks answer the request, with tensors of the same size."""
    match request:
        case AllReduce(tensor):
            part = tensor.new_empty(-(-tensor.numel() // num_members), device="meta")
            return [("all_to_all", part.repeat(num_members)), ("all_gather", part)]
        case AllGather(tensor):
            return [("all_gather", tensor)]
        case AllToAll(tensor):
            return [("all_to_all", tensor)]
    return [("broadcast", request.tensor)]


def _check_alike(requests: Mapping[int, Any]) -> None:
    seen = {
        (type(each), each.tensor.shape, each.tensor.dtype, getattr(each, "root", None)) for each in requests.values()
    }
    if len(seen) > 1:
        told = "; ".join(sorted(f"{kind.__name__} of {tuple(shape)}" for kind, shape, _, _ in seen))
        raise RuntimeError(f"workers that meet in a collective have to ask for the same; they ask for {told}")


def _answers(requests: Mapping[int, Any], members: Members) -> dict[int, Tensor]:
    """Return each member's answer; equal answers are one tensor, to which methods do not write."""
    tensors = [requests[member].tensor for member in members]
    match requests[members[0]]:
        case AllReduce():
            return dict.fromkeys(members, ordered_sum(tensors))
        case AllGather():
            return dict.fromkeys(members, torch.stack(tensors))
        case Broadcast(root=root):
            return dict.fromkeys(members, requests[root].tensor.clone())
    return {member: torch.stack([tensor[k] for tensor in tensors]) for k, member in enumerate(members)}
