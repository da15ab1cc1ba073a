"""Predicts a step with a tier: the bytes that it moves in each direction, and its seconds, with overlap.

    reads     forward    Σ p, except what stayed since the last update       backward   Σ p + Σ s, except what stayed
    writes    backward   Σ p + Σ s                                           (p: bytes of a parameter, s: of its states)

    forward   F = max(compute, reads / read rate)                                              `bound_s`
    backward  B = max(compute, reads / read rate, writes / write rate, update)
    step      F + B + reads before the first op + updates and writes after the last one        `simulate`

`bound_s` is a lower bound for any order of transfers. `simulate` follows the runtime's order: reads one after the other, as far
ahead as the window allows; updates in the order of the gradients; writes one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..artifacts import check_range
from .buffers import padded

SECONDS_A_DAY = 86_400


@dataclass(frozen=True)
class Layer:
    """The sizes and seconds of one parameter, or of several that are used and updated together.

    param_bytes: the bytes of its values. states: those of each optimizer state. grad_bytes: those of its gradient. forward_s,
    backward_s, update_s: the seconds of computation.
    """

    param_bytes: int
    states: tuple[int, ...] = ()
    grad_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    is_trained: bool = True

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the states in memory."""
        return sum(self.states)

    @property
    def state_pages(self) -> int:
        """Return the bytes of the states in whole pages, as they are transferred."""
        return sum(map(padded, self.states))

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the layer in memory if it is kept there."""
        return self.param_bytes + self.state_bytes


@dataclass(frozen=True)
class Rates:
    """The disks' read and write rates in bytes a second; the directions do not share them."""

    read: float
    write: float

    def __post_init__(self) -> None:
        positive = "more than 0 bytes a second"
        check_range(
            "a tier", read=(self.read, positive, lambda n: n > 0), write=(self.write, positive, lambda n: n > 0)
        )


@dataclass(frozen=True)
class Policy:
    """The settings that decide what stays in memory and when updates run; the fields are those of `TierOptions`."""

    window_bytes: int
    keep_bytes: int = 0
    update: str = "during"
    commit_every: int = 1


@dataclass(frozen=True)
class StepTraffic:
    """The bytes that one step moves, in whole pages; `kept_bytes` are those that a commit adds for layers kept in memory."""

    forward_read: int
    backward_read: int
    written: int
    kept_bytes: int = 0
    commit_every: int = 1

    @property
    def read_bytes(self) -> int:
        """Return the bytes read in a step."""
        return self.forward_read + self.backward_read

    @property
    def written_bytes(self) -> float:
        """Return the bytes written in a step, with those of commits averaged over steps."""
        return self.written + self.kept_bytes / self.commit_every

    def written_a_day(self, step_s: float) -> float:
        """Return the bytes written in a day of steps of `step_s` seconds, by which drives' endurance is rated."""
        return self.written_bytes * SECONDS_A_DAY / step_s


@dataclass(frozen=True)
class StepTime:
    """The seconds of one step, and of its computation alone."""

    step_s: float
    compute_s: float

    @property
    def exposed_s(self) -> float:
        """Return the seconds of transfers and updates that the computation does not hide."""
        return self.step_s - self.compute_s


def kept(layers: Sequence[Layer], policy: Policy) -> set[int]:
    """Return the layers kept in memory: the last ones first, as long as they fit into `keep_bytes`."""
    found, left = set(), policy.keep_bytes
    for index in reversed(range(len(layers))):
        if layers[index].is_trained and layers[index].held_bytes <= left:
            found.add(index)
            left -= layers[index].held_bytes
    return found


def stays(layers: Sequence[Layer], policy: Policy, away: Sequence[int]) -> tuple[set[int], set[int]]:
    """Return which layers of `away` stay in memory after the update, and which after the forward.

    These are the first and the last ones in order, as many as fit into a quarter of the window.
    """

    def fitting(order: Sequence[int]) -> set[int]:
        found, left = set(), policy.window_bytes // 4
        for index in order:
            left -= layers[index].param_bytes
            if left < 0:
                break
            found.add(index)
        return found

    return {each for each in fitting(away) if layers[each].is_trained}, fitting(away[::-1])


def traffic(layers: Sequence[Layer], policy: Policy) -> StepTraffic:
    """Return the bytes that a step moves; the first one, which has no states to read, moves fewer.

    >>> layers = [Layer(param_bytes=4096, states=(4096, 4096), grad_bytes=4096)] * 4
    >>> traffic(layers, Policy(window_bytes=4096))
    StepTraffic(forward_read=16384, backward_read=49152, written=49152, kept_bytes=0, commit_every=1)
    >>> traffic(layers, Policy(window_bytes=16384, keep_bytes=12288))  # one is kept, one stays at each end
    StepTraffic(forward_read=8192, backward_read=32768, written=36864, kept_bytes=12288, commit_every=1)
    """
    held = kept(layers, policy)
    away = [index for index in range(len(layers)) if index not in held]
    after_update, after_forward = stays(layers, policy, away)
    states = sum(layers[index].state_pages for index in away)
    gives = [index for index in away if layers[index].is_trained and policy.update == "after"]
    grads = sum(padded(layers[index].grad_bytes) for index in gives)
    params = {index: padded(layers[index].param_bytes) for index in away}
    trained = sum(size for index, size in params.items() if layers[index].is_trained)
    backward = sum(size for index, size in params.items() if index not in after_forward)
    if policy.update == "after":  # once for the gradients, once more for the update
        backward += sum(
            size for index, size in params.items() if layers[index].is_trained and index not in after_update
        )
    return StepTraffic(
        forward_read=sum(size for index, size in params.items() if index not in after_update),
        backward_read=backward + states + grads,
        written=trained + states + grads,
        kept_bytes=sum(padded(layers[index].param_bytes) + layers[index].state_pages for index in held),
        commit_every=policy.commit_every,
    )


def bound_s(layers: Sequence[Layer], policy: Policy, rates: Rates) -> float:
    """Return a lower bound on a step's seconds: the busiest resource's in the forward plus those in the backward.

    >>> layers = [Layer(4096, (4096, 4096), 4096, forward_s=1.0, backward_s=2.0)] * 4
    >>> bound_s(layers, Policy(window_bytes=4096), Rates(read=4096.0, write=40960.0))
    16.0
    """
    moved = traffic(layers, policy)
    compute = (sum(each.forward_s for each in layers), sum(each.backward_s for each in layers))
    update = sum(each.update_s for each in layers)
    forward = max(compute[0], moved.forward_read / rates.read)
    backward = max(compute[1], moved.backward_read / rates.read, moved.written_bytes / rates.write, update)
    return forward + backward


def simulate(layers: Sequence[Layer], policy: Policy, rates: Rates) -> StepTime:
    """Return the seconds of a step in the runtime's order of transfers and updates.

    >>> layers = [Layer(100, (100, 100), 100, forward_s=1.0, backward_s=2.0)] * 8
    >>> simulate(layers, Policy(window_bytes=800), Rates(read=1e6, write=1e6)).exposed_s < 0.1
    True
    """
    return _Run(layers, policy, rates).step()


class _Run:
    """Simulates one step event by event; `reading` and `writing` are the end times of the last transfers issued."""

    def __init__(self, layers: Sequence[Layer], policy: Policy, rates: Rates) -> None:
        self.layers, self.policy, self.rates = layers, policy, rates
        self.held = kept(layers, policy)
        self.away = [index for index in range(len(layers)) if index not in self.held]
        self.after_update, self.after_forward = stays(layers, policy, self.away)
        self.here = {*self.held, *self.after_update}
        self.here_bytes = sum(layers[index].param_bytes for index in self.after_update)
        self.arrives: dict[int, float] = dict.fromkeys(self.here, 0.0)
        self.now = self.reading = self.writing = self.updating = 0.0
        self.pending: deque[tuple[int, float, int]] = deque()
        self.pending_bytes = 0

    def step(self) -> StepTime:
        layers = self.layers
        order = list(range(len(layers)))
        for place, index in enumerate(order):
            self._need(index, order[place + 1 :])
            self.now += layers[index].forward_s
            if index not in self.after_forward:
                self._let_go(index)
        for index in reversed(order):
            self._need(index, order[:index][::-1])
            self.now += layers[index].backward_s
            self._take(index)
        for index in reversed(order) if self.policy.update == "after" else ():
            if layers[index].is_trained:
                self._send_for(index)
                self._update(index, from_disk=True)
        while self.pending:
            self._finish_oldest()
        return StepTime(self.now, sum(each.forward_s + each.backward_s for each in layers))

    def _need(self, index: int, ahead: Sequence[int]) -> None:
        self._send_for(index)
        self.now = max(self.now, self.arrives[index])
        for further in ahead:
            if further not in self.here:
                if self.here_bytes + self.layers[further].param_bytes > self.policy.window_bytes // 2:
                    break
                self._send_for(further)

    def _send_for(self, index: int) -> None:
        if index not in self.here:
            self.here.add(index)
            self.here_bytes += self.layers[index].param_bytes
            self.arrives[index] = self._read(padded(self.layers[index].param_bytes))

    def _read(self, num_bytes: int) -> float:
        self.reading = max(self.reading, self.now) + num_bytes / self.rates.read
        return self.reading

    def _let_go(self, index: int) -> None:
        if index in self.here and index not in self.held:
            self.here.remove(index)
            self.here_bytes -= self.layers[index].param_bytes

    def _take(self, index: int) -> None:
        """Start a layer's update from its gradient, or write the gradient to the disk for a later one."""
        if not self.layers[index].is_trained:
            self._let_go(index)
        elif self.policy.update == "during":
            self._update(index)
        else:
            if index not in self.held:
                self.writing = max(self.writing, self.now) + padded(self.layers[index].grad_bytes) / self.rates.write
                self.now = self.writing
            if index not in self.after_update:
                self._let_go(index)

    def _update(self, index: int, from_disk: bool = False) -> None:
        layer = self.layers[index]
        size = layer.grad_bytes + layer.state_bytes
        while self.pending and self.pending_bytes + size > self.policy.window_bytes // 2:
            self._finish_oldest()
        ready = max(self.now, self.arrives[index])
        if index not in self.held:
            ready = max(ready, self._read(layer.state_pages + (padded(layer.grad_bytes) if from_disk else 0)))
        self.updating = max(self.updating, ready) + layer.update_s
        done = self.updating
        written = padded(layer.param_bytes) + layer.state_pages
        if index not in self.held or self.policy.commit_every == 1:
            done = self.writing = max(self.writing, done) + written / self.rates.write
        self.pending.append((index, done, size))
        self.pending_bytes += size
        while self.pending and self.pending[0][1] <= self.now:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        index, done, size = self.pending.popleft()
        self.now = max(self.now, done)
        self.pending_bytes -= size
        if index not in self.after_update:
            self._let_go(index)
