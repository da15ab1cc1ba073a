"""Simulates the time of a step with pipeline stages: discrete events over the actions that the ranks will run.

Each stage runs its own actions in order. Forwards, backwards and postponed weight gradients take the seconds of their piece.
`take` waits for a receive, `sent` for a send; a transfer starts when both sides have issued it and its link is free.

    GPU         transfers overlap with computation
    CPU (gloo)  no overlap: the sender's cores copy, so a transfer takes the sender's time

After its last backward a stage sums gradients over its own ranks, then sums those of tied parameters with the other stages
that read them, for which these wait for one another, and updates. The step ends when the last stage has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from ...rank.stage_actions import Action, Schedule, action_lists, check_order

Kind = Literal["begin", "forward", "backward", "weight", "reduce", "tied", "update", "send"]


@dataclass(frozen=True)
class StageSeconds:
    """The seconds of one stage, or of one of its pieces, for each micro-batch and once a step."""

    forward_s: float
    backward_s: float
    """The seconds of the backward, reruns included."""
    begin_s: float = 0.0
    """The seconds once a step, before the first forward."""
    reduce_s: float = 0.0
    """The seconds once a step, after the last backward."""
    update_s: float = 0.0
    hand_s: float = 0.0
    """The seconds of one transfer to the next stage."""
    return_s: float = 0.0
    """The seconds of one transfer back from the next stage."""
    weight_s: float = 0.0
    """The part of `backward_s` that computes weight gradients which may be postponed."""

    @property
    def micro_s(self) -> float:
        """Return the seconds of one micro-batch, without transfers."""
        return self.forward_s + self.backward_s

    @property
    def once_s(self) -> float:
        """Return the seconds that a step takes once, beside its micro-batches."""
        return self.begin_s + self.reduce_s + self.update_s


@dataclass(frozen=True)
class Tied:
    """The sum of the gradients of parameters that the same stages read."""

    stages: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Span:
    """One activity of one stage, with its start and end."""

    stage: int
    kind: Kind
    micro: int
    start_s: float
    end_s: float


@dataclass(eq=False)
class StepTimeline:
    """A simulated step: its seconds, and the activities of each stage over time."""

    step_s: float
    ends_s: list[float]
    """The time at which each stage ends."""
    busy_s: list[float]
    """The seconds in which each stage computes or sends by itself; the rest of the step is its bubble."""
    spans: list[Span] = field(default_factory=list)


def one_f_one_b(num_stages: int, num_micro_batches: int, more: int = 0) -> tuple[int, ...]:
    """Return the depths of 1F1B, P-s on stage s, plus `more` on all but the last stage; at most all micro-batches.

    >>> one_f_one_b(4, 8), one_f_one_b(4, 8, more=1), one_f_one_b(4, 2)
    ((4, 3, 2, 1), (5, 4, 3, 1), (2, 2, 2, 1))
    """
    last = num_stages - 1
    return tuple(min(num_micro_batches, num_stages - s + (more if s < last else 0)) for s in range(num_stages))


def simulated_step(
    schedule: Schedule,
    stages: Sequence[StageSeconds],
    tied: Sequence[Tied] = (),
    *,
    overlaps: bool = True,
    keep_spans: bool = False,
) -> StepTimeline:
    """Return the simulated step.

    stages: the seconds of each stage, or of each piece if stages have several. overlaps: whether transfers overlap with
    computation, as between GPUs. keep_spans: whether the activities over time are kept too, for a picture.

    >>> even = [StageSeconds(1.0, 2.0)] * 2
    >>> simulated_step(Schedule(4, (2, 1)), even).step_s   # (m + P - 1) (f + b)
    15.0
    """
    run = _Run(schedule, stages, overlaps, keep_spans)
    for action in ordered(schedule):
        run.carry_out(action)
    return run.finished(tied)


def least_step_s(schedule: Schedule, stages: Sequence[StageSeconds], *, overlaps: bool = True) -> float:
    """Return seconds that `simulated_step` of the same is not below, without any events.

    A stage does nothing before the first micro-batch has come through the pieces ahead of its first one, and does all its work
    itself. What it does last is a backward of that first piece, whose gradient then goes back through the pieces ahead; only
    gradients of weights of a split backward may come later. Of pieces q that take f forward and b backward (w of it for weights),
    transfers h there and g back, u once a step, and with T the seconds of all pieces of stage s, it is the most over s of

        Σ_{q<s} (f_q + h_q) + m T_s + u_s
        Σ_{q<s} (f_q + h_q + g_q + b_q) + m T_s + u_0
        Σ_{q<s} (f_q + h_q + g_q + b_q - w_q) + m (T_s - w_s) + w_0 + u_0          of a split backward, in place of the second

    Where nothing overlaps, a transfer is a part of its sender's f or b.

    >>> least_step_s(Schedule(4, (2, 1)), [StageSeconds(1.0, 2.0)] * 2)   # as long as the step itself
    15.0
    """
    num, m = schedule.num_stages, schedule.num_micro_batches
    forward, backward, hops = _with_sends(stages, overlaps)
    weight = [stage.weight_s if schedule.splits_backward else 0.0 for stage in stages]
    once = [sum(own.reduce_s + own.update_s for own in stages[stage::num]) for stage in range(num)]
    there = back = most = 0.0
    for stage in range(num):
        own = range(stage, len(stages), num)
        busy_s = m * sum(forward[piece] + backward[piece] for piece in own)
        late_s = m * sum(weight[piece] for piece in own) - weight[0]
        most = max(most, there + busy_s + once[stage], there + busy_s - late_s + back + once[0])
        there += forward[stage] + hops[stage][0]
        back += backward[stage] - weight[stage] + hops[stage][1]
    return most


def _with_sends(
    stages: Sequence[StageSeconds], overlaps: bool
) -> tuple[list[float], list[float], list[tuple[float, float]]]:
    """Return forwards, backwards and transfers, which are parts of their senders' work where nothing overlaps."""
    if overlaps:
        return (
            [stage.forward_s for stage in stages],
            [stage.backward_s for stage in stages],
            [(stage.hand_s, stage.return_s) for stage in stages],
        )
    before = [0.0, *(stage.return_s for stage in stages[:-1])]
    forward = [stage.forward_s + stage.hand_s for stage in stages]
    return forward, [stage.backward_s + own for stage, own in zip(stages, before)], [(0.0, 0.0)] * len(stages)


@lru_cache(maxsize=64)
def ordered(schedule: Schedule) -> tuple[Action, ...]:
    """Return all stages' actions in one order in which no action waits for a later one."""
    lists = action_lists(
        schedule.num_stages,
        schedule.num_micro_batches,
        schedule.in_flight,
        schedule.virtual,
        schedule.splits_backward,
    )
    return tuple(check_order(lists))


class _Run:
    """Keeps the clocks of all stages and links while actions are simulated."""

    def __init__(self, schedule: Schedule, stages: Sequence[StageSeconds], overlaps: bool, keep_spans: bool) -> None:
        self.stages, self.overlaps, self.keep_spans = stages, overlaps, keep_spans
        self.splits_backward = schedule.splits_backward
        self.num = num = schedule.num_stages
        self.now = [0.0] * num
        self.busy = [0.0] * num
        self.spans: list[Span] = []
        self.posted: dict[_Transfer, float] = {}
        """The time at which each receive was posted."""
        self.sending: dict[_Transfer, float] = {}
        self.arrived: dict[_Transfer, float] = {}
        self.free: dict[tuple[str, int], float] = {}
        """The time at which each link is free again, by what it carries and the stage before it."""
        for stage in range(num):
            self._work(stage, "begin", -1, self._once(stage, "begin_s"))

    def _once(self, stage: int, what: str) -> float:
        """Return the seconds `what` that a stage takes once a step, summed over its pieces."""
        return sum(getattr(piece, what) for piece in self.stages[stage :: self.num])

    def carry_out(self, action: Action) -> None:
        stage, micro = action.stage, action.micro
        piece = self.stages[action.chunk * self.num + (action.lower if action.what else stage)]
        key = action.what, micro, action.chunk, action.lower
        match action.kind:
            case "forward":
                self._work(stage, "forward", micro, piece.forward_s)
            case "backward":
                self._work(
                    stage, "backward", micro, piece.backward_s - (piece.weight_s if self.splits_backward else 0.0)
                )
            case "weight":
                self._work(stage, "weight", micro, piece.weight_s)
            case "post":
                self.posted[key] = self.now[stage]
                self._begin(key, piece)
            case "send":
                if not self.overlaps:
                    self._work(stage, "send", micro, _transfer_s(action.what, piece))
                self.sending[key] = self.now[stage]
                self._begin(key, piece)
            case "take" | "sent":
                self.now[stage] = max(self.now[stage], self.arrived[key])

    def _begin(self, key: _Transfer, piece: StageSeconds) -> None:
        """Start a transfer if both sides have issued it, and compute its arrival."""
        if key not in self.posted or key not in self.sending:
            return
        what, link = key[0], (key[0], key[-1])
        start = max(self.posted[key], self.sending[key], self.free.get(link, 0.0))
        self.arrived[key] = start + (_transfer_s(what, piece) if self.overlaps else 0.0)
        self.free[link] = self.arrived[key]

    def _work(self, stage: int, kind: Kind, micro: int, seconds: float) -> None:
        start = self.now[stage]
        self.now[stage] = start + seconds
        self.busy[stage] += seconds
        if self.keep_spans and seconds > 0:
            self.spans.append(Span(stage, kind, micro, start, self.now[stage]))

    def finished(self, tied: Sequence[Tied]) -> StepTimeline:
        """Simulate the work after the last backward, and return the step."""
        for stage in range(self.num):
            self._work(stage, "reduce", -1, self._once(stage, "reduce_s"))
        for group in tied:
            together = max(self.now[stage] for stage in group.stages)
            for stage in group.stages:
                self.now[stage] = together
                self._work(stage, "tied", -1, group.seconds)
        for stage in range(self.num):
            self._work(stage, "update", -1, self._once(stage, "update_s"))
        return StepTimeline(max(self.now), self.now, self.busy, self.spans)


_Transfer = tuple[str, int, int, int]
"""Identifies a transfer: what it carries, the micro-batch, and the chunk and stage that send the activation."""


def _transfer_s(what: str, piece: StageSeconds) -> float:
    """Return the seconds of a transfer: of an activation from `piece`, or of a gradient back to it."""
    return piece.hand_s if what == "activation" else piece.return_s
