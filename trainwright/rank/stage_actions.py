"""Lists the actions of each stage of a pipeline in order, and proves that they do not deadlock.

    forward i, backward i     of micro-batch i, on one stage
    weight i                  the weight gradients that backward i postponed, if the backward is split
    post i                    issue the receive; its buffer is allocated from here on
    take i                    wait for the receive
    send i                    issue the send; the tensor stays in memory
    sent i                    wait for the send; the tensor's memory is freed

The last four move an `activation` to the next stage or its `gradient` back. A receive is posted one computation ahead of its
use. In each direction one send may be in flight, or as many as a stage needs to run its forwards ahead of a next stage of much
less depth; before a further send the oldest is waited for. So memory depends only on the order of the actions, not on the
transport.

    1F1B          a stage of depth w runs w forwards, then backward and forward in turn: w = P - s on stage s of P; GPipe
                  with w = all micro-batches
    interleaved   a stage has v chunks of the model, every P-th piece, and runs its chunks' forwards and backwards in groups of
                  P micro-batches, w forwards ahead; w counts chunks. A bubble is as long as a chunk, not as a stage
    zero bubble   the backward is split: the gradients for the previous stage come first, and weight gradients fill the time that
                  would be idle. At most w micro-batches wait for their weight gradients
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from ..artifacts import Pipeline, UserError

Kind = Literal["forward", "backward", "weight", "post", "take", "send", "sent"]
What = Literal["activation", "gradient", ""]


@dataclass(frozen=True)
class Action:
    """One step of a stage's schedule, for one micro-batch."""

    kind: Kind
    stage: int
    micro: int
    what: What = ""
    chunk: int = 0
    """The stage's chunk that computes; for a transfer, the chunk that sends the activation."""
    wraps: int = 0
    """The number of stages, if the transfer is between the last stage and the next chunk of the first; else 0."""

    @property
    def peer(self) -> int:
        """Return the stage at the other end of a transfer, or the action's own stage if it transfers nothing."""
        if not self.what:
            return self.stage
        goes_on = (self.what == "activation") == (self.kind in ("send", "sent"))
        return self.stage + (1 - self.wraps if goes_on else self.wraps - 1)

    @property
    def lower(self) -> int:
        """Return the stage that sends the activation, for a transfer of that activation or of its gradient."""
        return self.stage if (self.what == "activation") == (self.kind in ("send", "sent")) else self.peer

    def __str__(self) -> str:
        """Name the action, as in `take activation 3`, with the chunk where that is not the first."""
        named = f"{self.kind} {self.what} {self.micro}" if self.what else f"{self.kind} {self.micro}"
        return f"{named} of chunk {self.chunk}" if self.chunk else named


@dataclass(frozen=True)
class Schedule:
    """The schedule of a step: the number of micro-batches, and the number of forwards in flight on each stage.

    virtual: the number of chunks of a stage. splits_backward: whether weight gradients are separate from the backward.
    """

    num_micro_batches: int
    in_flight: tuple[int, ...]
    virtual: int = 1
    splits_backward: bool = False

    @classmethod
    def of(cls, pipeline: Pipeline, num_micro_batches: int) -> Schedule:
        """Return the schedule of a plan."""
        return cls(num_micro_batches, pipeline.in_flight, pipeline.virtual, pipeline.split_backward)

    @property
    def num_stages(self) -> int:
        return len(self.in_flight)


def default_in_flight(num_stages: int) -> tuple[int, ...]:
    """Return the depths of 1F1B: on each stage, the number of stages from it to the last.

    >>> default_in_flight(3)
    (3, 2, 1)
    """
    return tuple(range(num_stages, 0, -1))


def interleaved_in_flight(num_stages: int, virtual: int, num_micro_batches: int) -> tuple[int, ...]:
    """Return the depths of interleaved stages, in chunks' forwards: 2 (P - s - 1) + (v - 1) P + 1 on stage s.

    >>> interleaved_in_flight(2, 2, 8)
    (5, 3)
    """
    return tuple(
        min(virtual * num_micro_batches, 2 * (num_stages - s - 1) + (virtual - 1) * num_stages + 1)
        for s in range(num_stages)
    )


def action_lists(
    num_stages: int, num_micro_batches: int, in_flight: Sequence[int], virtual: int = 1, splits_backward: bool = False
) -> list[list[Action]]:
    """Return each stage's actions of one step.

    in_flight: for each stage, the most forwards before its first backward; with a split backward, the most micro-batches that
    wait for their weight gradients. virtual: the number of chunks of a stage.

    >>> [str(action) for action in action_lists(2, 1, (1, 1))[1]]
    ['post activation 0', 'take activation 0', 'forward 0', 'backward 0', 'send gradient 0', 'sent gradient 0']
    """
    if len(in_flight) != num_stages or min(in_flight) < 1 or num_micro_batches < 1:
        raise UserError(
            f"a depth of 1 or more for each of {num_stages} stages, and a micro-batch or more, are needed; got "
            f"{list(in_flight)} and {num_micro_batches}; try {list(default_in_flight(num_stages))}"
        )
    if virtual > 1 and splits_backward:
        raise UserError("a split backward or several chunks a stage are needed, not both; leave one of the two out")
    schedule = Schedule(num_micro_batches, tuple(in_flight), virtual, splits_backward)
    return [stage_actions(stage, schedule) for stage in range(num_stages)]


def stage_actions(stage: int, schedule: Schedule) -> list[Action]:
    """Return the actions of one stage; they depend on its depth and the next one's, with a split backward on all depths."""
    num, virtual, num_stages = schedule.num_micro_batches, schedule.virtual, schedule.num_stages
    depths = [min(depth, virtual * num) for depth in schedule.in_flight]
    deeper = depths[stage] - depths[stage + 1] if stage + 1 < len(depths) else 0
    ahead = max(1, deeper - 1)
    if schedule.splits_backward:
        return _with_transfers(_split_computations(num, tuple(depths))[stage], num_stages, 1, num_stages)
    if virtual > 1:
        found = _interleaved(stage, num_stages, num, virtual, depths[stage])
        return _with_transfers(found, num_stages, virtual, max(ahead, num_stages))
    return _with_transfers(_computations(stage, num, depths[stage]), num_stages, 1, ahead)


def forward_actions(stage: int, num_stages: int, num_micro_batches: int, virtual: int = 1) -> list[Action]:
    """Return the actions of a stage in evaluation: forwards alone."""
    order = _in_groups(num_stages, num_micro_batches, range(virtual)) if virtual > 1 else None
    found = [(micro, chunk) for micro, chunk in order] if order else [(micro, 0) for micro in range(num_micro_batches)]
    forwards = [Action("forward", stage, micro, chunk=chunk) for micro, chunk in found]
    return _with_transfers(forwards, num_stages, virtual, num_stages if virtual > 1 else 1)


@lru_cache(maxsize=64)
def most_in_flight(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return, for each stage and each of its chunks, the most forwards that are in flight at once.

    >>> most_in_flight(Schedule(4, (5, 3), virtual=2))
    ((4, 2), (3, 1))
    """
    ends = "weight" if schedule.splits_backward else "backward"
    found = []
    for stage in range(schedule.num_stages):
        held, most = Counter[int](), Counter[int]()
        for action in stage_actions(stage, schedule):
            held[action.chunk] += (action.kind == "forward") - (action.kind == ends)
            most[action.chunk] = max(most[action.chunk], held[action.chunk])
        found.append(tuple(most[chunk] for chunk in range(schedule.virtual)))
    return tuple(found)


def _computations(stage: int, num_micro_batches: int, depth: int) -> list[Action]:
    found = [Action("forward", stage, micro) for micro in range(depth)]
    for micro in range(num_micro_batches):
        found.append(Action("backward", stage, micro))
        if micro + depth < num_micro_batches:
            found.append(Action("forward", stage, micro + depth))
    return found


def _in_groups(size: int, num_micro_batches: int, chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Return all pairs (micro-batch, chunk), in groups of `size` micro-batches that go through `chunks` one after the other."""
    firsts = range(0, num_micro_batches, size)
    return [(m, c) for first in firsts for c in chunks for m in range(first, min(first + size, num_micro_batches))]


def _interleaved(stage: int, num_stages: int, num_micro_batches: int, virtual: int, depth: int) -> list[Action]:
    """Return the forwards and backwards of a stage with several chunks, with `depth` forwards ahead."""
    there = [Action("forward", stage, m, chunk=c) for m, c in _in_groups(num_stages, num_micro_batches, range(virtual))]
    back = [
        Action("backward", stage, m, chunk=c)
        for m, c in _in_groups(num_stages, num_micro_batches, range(virtual - 1, -1, -1))
    ]
    found = there[:depth]
    for place, action in enumerate(back):
        found += [action, *there[place + depth : place + depth + 1]]
    return found


@lru_cache(maxsize=64)
def _split_computations(num_micro_batches: int, depths: tuple[int, ...]) -> list[list[Action]]:
    """Return each stage's forwards, backwards and weight gradients, in the order of stages for which all three take equally long.

    A stage runs a forward while fewer are in flight than in 1F1B, else a backward if it can, else a further forward if its depth
    allows, else weight gradients. With depth P on all stages such a step takes 3 m + P - 1 units of time, the minimum, since the
    last stage waits P - 1 units for its first micro-batch (ZB-H1 of Qi et al., 2024).
    """
    num_stages = len(depths)
    done = [dict.fromkeys(("forward", "backward", "weight"), 0) for _ in depths]
    found: list[list[Action]] = [[] for _ in depths]
    while any(own["weight"] < num_micro_batches for own in done):
        before = [dict(own) for own in done]
        for stage, own in enumerate(before):
            given = num_micro_batches if stage == 0 else before[stage - 1]["forward"]
            returned = own["forward"] if stage == num_stages - 1 else before[stage + 1]["backward"]
            kind: Kind
            goes_on = own["forward"] < given and own["forward"] - own["weight"] < depths[stage]
            if goes_on and own["forward"] - own["backward"] < num_stages - stage:
                kind = "forward"
            elif own["backward"] < min(own["forward"], returned):
                kind = "backward"
            elif goes_on:
                kind = "forward"
            elif own["weight"] < own["backward"]:
                kind = "weight"
            else:
                continue
            found[stage].append(Action(kind, stage, own[kind]))
            done[stage][kind] += 1
    return found


def _with_transfers(computations: Sequence[Action], num_stages: int, virtual: int, num_ahead: int) -> list[Action]:
    """Return the computations with their transfers: a post one computation ahead, a take before, and a send after each.

    num_ahead: the number of activations that may be in flight to the next stage.
    """
    found: list[Action] = []
    limits = {"activation": num_ahead, "gradient": 1 if virtual == 1 else num_ahead}
    under_way: dict[str, deque[Action]] = {what: deque() for what in limits}
    arrivals = [_arrival(action, num_stages, virtual) for action in computations]
    computing = [place for place, action in enumerate(computations) if action.kind != "weight"]
    following = dict(pairwise(computing))
    found += [_as("post", arrival) for arrival in arrivals[:1] if arrival]
    for place, action in enumerate(computations):
        if place in following and (arrival := arrivals[following[place]]):
            found.append(_as("post", arrival))
        if arrival := arrivals[place]:
            found.append(arrival)
        found.append(action)
        if departure := _departure(action, num_stages, virtual):
            leaving = under_way[departure.what]
            if len(leaving) == limits[departure.what]:
                found.append(_as("sent", leaving.popleft()))
            found.append(departure)
            leaving.append(departure)
    return found + [_as("sent", departure) for leaving in under_way.values() for departure in leaving]


def _arrival(action: Action, num_stages: int, virtual: int) -> Action | None:
    """Return the `take` that a computation waits for, or None if it receives nothing."""
    if action.kind == "forward":
        return _over_the_boundary("take", "activation", action, action.stage - 1, num_stages, virtual)
    if action.kind == "backward":
        return _over_the_boundary("take", "gradient", action, action.stage, num_stages, virtual)
    return None


def _departure(action: Action, num_stages: int, virtual: int) -> Action | None:
    """Return the `send` of a computation's result, or None if the stage sends nothing."""
    if action.kind == "forward":
        return _over_the_boundary("send", "activation", action, action.stage, num_stages, virtual)
    if action.kind == "backward":
        return _over_the_boundary("send", "gradient", action, action.stage - 1, num_stages, virtual)
    return None


def _over_the_boundary(
    kind: Kind, what: What, action: Action, lower: int, num_stages: int, virtual: int
) -> Action | None:
    """Return the transfer over the boundary after stage `lower` of the action's chunk; -1: the last stage of the chunk before."""
    chunk = action.chunk - 1 if lower < 0 else action.chunk
    wraps = num_stages if lower % num_stages == num_stages - 1 else 0
    if chunk < 0 or (wraps and chunk == virtual - 1):
        return None
    return Action(kind, action.stage, action.micro, what, chunk, wraps)


def _as(kind: Kind, action: Action) -> Action:
    return Action(kind, action.stage, action.micro, action.what, action.chunk, action.wraps)


def check_order(lists: Sequence[Sequence[Action]]) -> list[Action]:
    """Return an order of all actions in which none waits for a later one, which proves that there is no deadlock.

    It assumes the strictest transport, a rendezvous: `take` waits for the other side's `send`, `sent` for its `post`. Posts and
    sends wait for nothing. If there is no such order, it raises `UserError`, which names the stages that wait for one another.

    >>> check_order([[Action("take", 0, 0, "gradient")], [Action("take", 1, 0, "activation")]])
    Traceback (most recent call last):
    trainwright.artifacts.record.UserError: stages that wait for one another never end: stage 0 in take gradient 0 waits for
    send gradient 0 of stage 1, which is in take activation 0; stage 1 in take activation 0 waits for send activation 0 of
    stage 0, which is in take gradient 0; try depths (in_flight) that fall from stage to stage
    """
    place = [0] * len(lists)
    done: set[Action] = set()
    order: list[Action] = []
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(lists):
            while place[stage] < len(actions) and _may_go_on(actions[place[stage]], done):
                done.add(actions[place[stage]])
                order.append(actions[place[stage]])
                place[stage] += 1
                moved = True
    stuck = {s: actions[place[s]] for s, actions in enumerate(lists) if place[s] < len(actions)}
    if stuck:
        raise UserError(
            f"stages that wait for one another never end: {_waits(stuck)}; try depths (in_flight) that fall from stage to stage"
        )
    return order


def awaited(action: Action) -> Action | None:
    """Return the action of the other side that `action` waits for; None if it waits for none."""
    if action.kind == "take":
        return Action("send", action.peer, action.micro, action.what, action.chunk, action.wraps)
    if action.kind == "sent":
        return Action("post", action.peer, action.micro, action.what, action.chunk, action.wraps)
    return None


def _may_go_on(action: Action, done: set[Action]) -> bool:
    wanted = awaited(action)
    return wanted is None or wanted in done


def _waits(stuck: dict[int, Action]) -> str:
    """Describe which stage waits for which, from the first stuck stage until a stage repeats or has ended."""
    stage, lines = next(iter(stuck)), list[str]()
    seen: set[int] = set()
    while stage in stuck and stage not in seen:
        seen.add(stage)
        wanted = awaited(stuck[stage])
        assert wanted is not None
        where = f"which is in {stuck[wanted.stage]}" if wanted.stage in stuck else "which has ended without it"
        lines.append(f"stage {stage} in {stuck[stage]} waits for {wanted.kind} {wanted.what} {wanted.micro} of stage "
                     f"{wanted.stage}, {where}")  # fmt: skip
        stage = wanted.stage
    return "; ".join(lines)
