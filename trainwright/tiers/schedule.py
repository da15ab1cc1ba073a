"""Predicts a step with a tier, of disks or of the host's memory: the bytes that it moves in each direction, and its seconds.

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
from dataclasses import dataclass, replace

from ..artifacts import UserError, check_range
from .buffers import padded

SECONDS_A_DAY = 86_400
PLACES = ("disk", "host")
"""The kinds of tiers on which parameters, gradients and states may rest."""


@dataclass(frozen=True)
class Layer:
    """The sizes and seconds of one parameter, or of several that are used and updated together.

    param_bytes: the bytes of its values. states: those of each optimizer state. grad_bytes: those of its gradient. forward_s,
    backward_s, update_s: the seconds of computation. param_stays, states_stay: its values or its states stay in memory: they are
    written where a step is committed, and never read.
    """

    param_bytes: int
    states: tuple[int, ...] = ()
    grad_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    is_trained: bool = True
    param_stays: bool = False
    states_stay: bool = False

    @property
    def state_bytes(self) -> int:
        """Return the bytes of the states in memory."""
        return sum(self.states)

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the layer in memory if it is kept there."""
        return self.param_bytes + self.state_bytes

    @property
    def update_bytes(self) -> int:
        """Return the bytes that its update holds beside its values: the gradient, and states that do not stay."""
        if not self.is_trained:
            return 0
        return self.grad_bytes + (0 if self.states_stay else self.state_bytes)


@dataclass(frozen=True)
class Rates:
    """The tier's read and write rates in bytes a second, which the directions do not share, and the seconds of a commit."""

    read: float
    write: float
    commit_s: float = 0.0

    def __post_init__(self) -> None:
        positive = "more than 0 bytes a second"
        check_range(
            "a tier", read=(self.read, positive, lambda n: n > 0), write=(self.write, positive, lambda n: n > 0)
        )


@dataclass(frozen=True)
class Policy:
    """The settings that decide what stays in memory and when updates run; the fields are those of `TierOptions`.

    keep_bytes: the most that stays, for which a plan chooses what; without a plan it is the last layers of the forward, with
    their states. None: as much as a plan finds room for; without a plan nothing.
    place: `disk`, where everything is written, what stays in memory with every commit, and transfers are whole pages; or `host`,
    the memory of the device's host, which has what does not stay, once, and nothing to commit.

    >>> Policy(window_bytes=2**20).moved(5000), Policy(window_bytes=2**20, place="host").moved(5000)
    (8192, 5000)
    """

    window_bytes: int
    keep_bytes: int | None = None
    update: str = "during"
    commit_every: int = 1
    place: str = "disk"

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise UserError(f"a tier is one of {' and '.join(PLACES)}; got {self.place!r}; choose one of them")
        if self.place == "host" and self.commit_every != 1:
            raise UserError(
                f"steps are committed to disks only; got commit_every={self.commit_every} for the host's memory; leave it out, and "
                "take checkpoints"
            )

    @property
    def commits(self) -> bool:
        """Tell whether steps are committed, which writes what stays in memory too."""
        return self.place == "disk"

    @property
    def committed_share(self) -> float:
        """Return the share of the steps that write what stays in memory."""
        return 1 / self.commit_every if self.commits else 0.0

    def moved(self, num_bytes: int) -> int:
        """Return the bytes that a transfer of `num_bytes` moves."""
        return padded(num_bytes) if self.place == "disk" else num_bytes

    def moved_states(self, layer: Layer) -> int:
        """Return the bytes that a transfer of the layer's states moves."""
        return sum(map(self.moved, layer.states))

    def written(self, layer: Layer, stays: bool) -> int:
        """Return the bytes that an update writes of what stays in memory, or of what does not."""
        if not layer.is_trained:
            return 0
        param = self.moved(layer.param_bytes) if layer.param_stays == stays else 0
        return param + (self.moved_states(layer) if layer.states_stay == stays else 0)


@dataclass(frozen=True)
class StepTraffic:
    """The bytes that one step moves, to and from disks in whole pages.

    kept_bytes: those that a commit adds for what is kept in memory. forward_written: of activations, which the backward reads.
    """

    forward_read: int
    backward_read: int
    written: int
    kept_bytes: int = 0
    commit_every: int = 1
    forward_written: int = 0

    @property
    def read_bytes(self) -> int:
        """Return the bytes read in a step."""
        return self.forward_read + self.backward_read

    @property
    def written_bytes(self) -> float:
        """Return the bytes written in a step, with those of commits averaged over steps."""
        return self.forward_written + self.written + self.kept_bytes / self.commit_every

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


def placed(layers: Sequence[Layer], policy: Policy) -> list[Layer]:
    """Return the layers of a run without a plan: the last ones stay in memory, as long as they fit into `keep_bytes`."""
    found, left = list(layers), policy.keep_bytes or 0
    for index in reversed(range(len(layers))):
        if layers[index].is_trained and layers[index].held_bytes <= left:
            found[index] = replace(layers[index], param_stays=True, states_stay=True)
            left -= layers[index].held_bytes
    return found


@dataclass(frozen=True)
class Held:
    """The most bytes that a run holds beside what stays: values that were read, by phase, and updates under way."""

    forward_values: int
    backward_values: int
    updates: int


MOST_FROZEN = 4
"""The number of frozen parameters that stay in memory in the backward, where no update tells when to let them go."""


def held_beside(layers: Sequence[Layer], policy: Policy, read_at_once: int, reread_at_once: int = 0) -> Held:
    """Return the most bytes that a run holds beside what stays.

    read_at_once: the most bytes of values that have to be in memory at once, between their first and last reader.
    reread_at_once: the same where the backward runs a part of the forward again, whose values stay until their updates.

    >>> held_beside([Layer(4, (4, 4), 4)] * 3, Policy(window_bytes=8), read_at_once=4)
    Held(forward_values=8, backward_values=8, updates=12)
    """
    away = [layer.param_bytes for layer in layers if not layer.param_stays]
    updates = [layer.update_bytes for layer in layers]
    frozen = sorted(layer.param_bytes for layer in layers if not (layer.is_trained or layer.param_stays))
    ahead, standing = policy.window_bytes // 2, sum(frozen[-MOST_FROZEN:])
    waiting = max(ahead, max(away, default=0))  # values of one update may be more than what is read ahead
    return Held(
        min(ahead + read_at_once, sum(away)),
        min(standing + max(ahead + read_at_once, waiting + reread_at_once), sum(away)),
        min(max(ahead, max(updates, default=0)), sum(updates)),
    )


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
    StepTraffic(forward_read=16384, backward_read=49152, written=49152, kept_bytes=0, commit_every=1, forward_written=0)
    >>> policy = Policy(window_bytes=16384, keep_bytes=12288)
    >>> traffic(placed(layers, policy), policy)  # one is kept, one stays at each end
    StepTraffic(forward_read=8192, backward_read=32768, written=36864, kept_bytes=12288, commit_every=1, forward_written=0)
    """
    away = [index for index, layer in enumerate(layers) if not layer.param_stays]
    after_update, after_forward = stays(layers, policy, away)
    trained = [layer for layer in layers if layer.is_trained]
    states = sum(policy.moved_states(layer) for layer in trained if not layer.states_stay)
    grads = sum(policy.moved(layer.grad_bytes) for layer in trained) if policy.update == "after" else 0
    params = {index: policy.moved(layers[index].param_bytes) for index in away}
    backward = sum(size for index, size in params.items() if index not in after_forward)
    if policy.update == "after":  # once for the gradients, once more for the update
        backward += sum(
            size for index, size in params.items() if layers[index].is_trained and index not in after_update
        )
    return StepTraffic(
        forward_read=sum(size for index, size in params.items() if index not in after_update),
        backward_read=backward + states + grads,
        written=sum(policy.written(layer, stays=False) for layer in trained) + grads,
        kept_bytes=sum(policy.written(layer, stays=True) for layer in trained) if policy.commits else 0,
        commit_every=policy.commit_every,
    )


def bound_s(layers: Sequence[Layer], policy: Policy, rates: Rates, moved_bytes: int = 0) -> float:
    """Return a lower bound on a step's seconds: the busiest resource's in the forward plus those in the backward.

    moved_bytes: of activations, which the forward writes and the backward reads.

    >>> layers = [Layer(4096, (4096, 4096), 4096, forward_s=1.0, backward_s=2.0)] * 4
    >>> bound_s(layers, Policy(window_bytes=4096), Rates(read=4096.0, write=40960.0))
    16.0
    """
    moved = traffic(layers, policy)
    compute = (sum(each.forward_s for each in layers), sum(each.backward_s for each in layers))
    update = sum(each.update_s for each in layers)
    forward = max(compute[0], moved.forward_read / rates.read, moved_bytes / rates.write)
    read = moved.backward_read + moved_bytes
    backward = max(compute[1], read / rates.read, moved.written_bytes / rates.write, update)
    return forward + backward


def simulate(layers: Sequence[Layer], policy: Policy, rates: Rates) -> StepTime:
    """Return the seconds of a step in the runtime's order of transfers and updates: the mean of those to a commit and its own.

    >>> layers = [Layer(100, (100, 100), 100, forward_s=1.0, backward_s=2.0)] * 8
    >>> simulate(layers, Policy(window_bytes=800), Rates(read=1e6, write=1e6)).exposed_s < 0.1
    True
    """
    committing = _Run(layers, policy, rates, is_committing=policy.commits).step()
    if policy.commits:
        committing = replace(committing, step_s=committing.step_s + rates.commit_s)
    if policy.commit_every == 1:
        return committing
    others = _Run(layers, policy, rates, is_committing=False).step()
    share = 1 / policy.commit_every
    return replace(committing, step_s=share * committing.step_s + (1 - share) * others.step_s)


class _Run:
    """Simulates one step event by event; `reading` and `writing` are the end times of the last transfers issued."""

    def __init__(self, layers: Sequence[Layer], policy: Policy, rates: Rates, is_committing: bool) -> None:
        self.layers, self.policy, self.rates, self.is_committing = layers, policy, rates, is_committing
        self.held = {index for index, layer in enumerate(layers) if layer.param_stays}
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
            self.arrives[index] = self._read(self.policy.moved(self.layers[index].param_bytes))

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
            size = self.policy.moved(self.layers[index].grad_bytes)
            self.writing = max(self.writing, self.now) + size / self.rates.write
            self.now = self.writing
            if index not in self.after_update:
                self._let_go(index)

    def _update(self, index: int, from_disk: bool = False) -> None:
        layer, policy = self.layers[index], self.policy
        size = layer.update_bytes
        while self.pending and self.pending_bytes + size > policy.window_bytes // 2:
            self._finish_oldest()
        ready = max(self.now, self.arrives[index])
        read = 0 if layer.states_stay else policy.moved_states(layer)
        read += policy.moved(layer.grad_bytes) if from_disk else 0
        if read:
            ready = max(ready, self._read(read))
        self.updating = max(self.updating, ready) + layer.update_s
        done = self.updating
        written = policy.written(layer, stays=False)
        written += policy.written(layer, stays=True) if self.is_committing else 0
        if written:
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
