"""Lists the actions of each stage of a pipeline in order, and proves that they do not deadlock.

    forward i, backward i     computes micro-batch i on one stage
    post i                    begins to receive; the buffer is allocated here
    take i                    waits until the transfer has arrived
    send i                    begins to send; the tensors stay in memory
    sent i                    waits until the other side has them, and releases them

The last four move an `activation` to the next stage or its `gradient` back. A stage of depth w runs w forwards, then
backward and forward in turn: 1F1B has w = P - s on stage s of P, GPipe w = all micro-batches. A receive is posted one
computation ahead of its use. At most one send in each direction is in flight; a stage that is deeper than the next one
by more than two may have more activations in flight. Beyond that the oldest is waited for. So memory depends on the
order of actions alone, and on no transport.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..artifacts import UserError

Kind = Literal["forward", "backward", "post", "take", "send", "sent"]
What = Literal["activation", "gradient", ""]


@dataclass(frozen=True)
class Action:
    """One step of a stage's schedule, for one micro-batch."""

    kind: Kind
    stage: int
    micro: int
    what: What = ""

    @property
    def peer(self) -> int:
        """Return the stage at the other end of a transfer, or the action's own stage if it transfers nothing."""
        if not self.what:
            return self.stage
        return self.stage + (1 if (self.what == "activation") == (self.kind in ("send", "sent")) else -1)

    def __str__(self) -> str:
        """Name the action, as in `take activation 3`."""
        return f"{self.kind} {self.what} {self.micro}" if self.what else f"{self.kind} {self.micro}"


def default_in_flight(num_stages: int) -> tuple[int, ...]:
    """Return the depths of 1F1B: on each stage, the number of stages from it to the last.

    >>> default_in_flight(3)
    (3, 2, 1)
    """
    return tuple(range(num_stages, 0, -1))


def action_lists(num_stages: int, num_micro_batches: int, in_flight: Sequence[int]) -> list[list[Action]]:
    """Return each stage's actions of one step.

    in_flight: for each stage, how many forwards precede its first backward, at most.

    >>> [str(action) for action in action_lists(2, 1, (1, 1))[1]]
    ['post activation 0', 'take activation 0', 'forward 0', 'backward 0', 'send gradient 0', 'sent gradient 0']
    """
    if len(in_flight) != num_stages or min(in_flight) < 1 or num_micro_batches < 1:
        raise UserError(
            f"a depth of 1 or more for each of {num_stages} stages, and a micro-batch or more, are needed; got "
            f"{list(in_flight)} and {num_micro_batches}; try {list(default_in_flight(num_stages))}"
        )
    return [stage_actions(stage, num_micro_batches, in_flight) for stage in range(num_stages)]


def stage_actions(stage: int, num_micro_batches: int, in_flight: Sequence[int]) -> list[Action]:
    """Return the actions of one stage, which depend on its own depth and the next one's."""
    depths = [min(depth, num_micro_batches) for depth in in_flight]
    deeper = depths[stage] - depths[stage + 1] if stage + 1 < len(depths) else 0
    return _with_transfers(_computations(stage, num_micro_batches, depths[stage]), len(depths), max(1, deeper - 1))


def forward_actions(stage: int, num_stages: int, num_micro_batches: int) -> list[Action]:
    """Return the actions of a stage in evaluation: forwards alone."""
    return _with_transfers([Action("forward", stage, micro) for micro in range(num_micro_batches)], num_stages, 1)


def _computations(stage: int, num_micro_batches: int, depth: int) -> list[Action]:
    found = [Action("forward", stage, micro) for micro in range(depth)]
    for micro in range(num_micro_batches):
        found.append(Action("backward", stage, micro))
        if micro + depth < num_micro_batches:
            found.append(Action("forward", stage, micro + depth))
    return found


def _with_transfers(computations: Sequence[Action], num_stages: int, num_ahead: int) -> list[Action]:
    """Return the computations with their transfers: receives, posted one computation ahead, and sends.

    num_ahead: the number of activations that may be in flight to the next stage.
    """
    found: list[Action] = []
    limits = {"activation": num_ahead, "gradient": 1}
    under_way: dict[str, deque[Action]] = {what: deque() for what in limits}
    arrivals = [_arrival(action, num_stages) for action in computations]
    found += [_as("post", arrival) for arrival in arrivals[:1] if arrival]
    for place, action in enumerate(computations):
        found += [_as("post", arrival) for arrival in arrivals[place + 1 : place + 2] if arrival]
        if arrival := arrivals[place]:
            found.append(arrival)
        found.append(action)
        if departure := _departure(action, num_stages):
            leaving = under_way[departure.what]
            if len(leaving) == limits[departure.what]:
                found.append(_as("sent", leaving.popleft()))
            found.append(departure)
            leaving.append(departure)
    return found + [_as("sent", departure) for leaving in under_way.values() for departure in leaving]


def _arrival(action: Action, num_stages: int) -> Action | None:
    """Return the `take` that a computation waits for, or None if it receives nothing."""
    if action.kind == "forward":
        return Action("take", action.stage, action.micro, "activation") if action.stage > 0 else None
    return Action("take", action.stage, action.micro, "gradient") if action.stage < num_stages - 1 else None


def _departure(action: Action, num_stages: int) -> Action | None:
    """Return the `send` of a computation's result, or None if the stage sends nothing."""
    if action.kind == "forward":
        return Action("send", action.stage, action.micro, "activation") if action.stage < num_stages - 1 else None
    return Action("send", action.stage, action.micro, "gradient") if action.stage > 0 else None


def _as(kind: Kind, action: Action) -> Action:
    return Action(kind, action.stage, action.micro, action.what)


def check_order(lists: Sequence[Sequence[Action]]) -> list[Action]:
    """Return an order of all actions in which none waits for a later one, which proves that all of them end.

    The strictest transport is assumed, in which both sides meet: `take` waits for the other side's `send`, `sent` for
    its `post`. Posts and sends wait for nothing. Raises `UserError` that names the stages that wait for one another if
    there is no order.

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
        return Action("send", action.peer, action.micro, action.what)
    if action.kind == "sent":
        return Action("post", action.peer, action.micro, action.what)
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
