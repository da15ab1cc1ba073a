"""Simulates the time of a step with pipeline stages: discrete events over the actions that the ranks will run.

Each stage runs its own actions in order. Forwards, backwards and postponed weight gradients take the seconds of their piece.
`take` waits for a receive, `sent` for a send; a transfer starts when both sides have issued it and its link is free.

    GPU         transfers overlap with computation
    CPU (gloo)  no overlap: the sender's cores copy, so a transfer takes the sender's time

After its last backward a stage sums gradients over its own ranks, then sums those of tied parameters with the other stages
that read them, for which these wait for one another, and updates. The step ends when the last stage has ended.
"""

from __future__ import annotations

from collections import Counter
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
    run.carry_out(events_of(schedule, overlaps))
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


@dataclass(frozen=True)
class Events:
    """The actions of a step as rows of numbers, in an order in which none waits for a later one.

    A row is (code, stage, a, b, slot, micro). `slot` is the place of its seconds in `_Run.seconds`: a piece's, of `_SLOTS`.
    """

    rows: tuple[tuple[int, int, int, int, int, int], ...]
    num_transfers: int
    num_links: int
    counts: tuple[tuple[tuple[int, int], ...], ...]
    """For each stage, how often it takes the seconds of which slots by itself."""


_WORK, _ISSUE, _BEGIN, _WAIT = range(4)
"""A stage works; issues its side of transfer a first; issues the second side of transfer a over link b; waits for transfer a."""
_SLOTS: tuple[Kind | Literal["hand", "return"], ...] = ("forward", "backward", "weight", "hand", "return")


@lru_cache(maxsize=64)
def events_of(schedule: Schedule, overlaps: bool = True) -> Events:
    """Return the actions of a schedule as rows; where nothing overlaps, a send is its stage's work and takes no further time."""
    rows: list[tuple[int, int, int, int, int, int]] = []
    transfers: dict[_Transfer, int] = {}
    links: dict[tuple[str, int], int] = {}
    issued: set[int] = set()
    counts = [Counter[int]() for _ in range(schedule.num_stages)]

    def work(stage: int, slot: int, micro: int) -> None:
        rows.append((_WORK, stage, 0, 0, slot, micro))
        counts[stage][slot] += 1

    for action in ordered(schedule):
        stage, micro, what = action.stage, action.micro, action.what
        piece = action.chunk * schedule.num_stages + (action.lower if what else stage)
        first = piece * len(_SLOTS)
        if not what:
            work(stage, first + _SLOTS.index(action.kind), micro)  # type: ignore[arg-type]
            continue
        slot = first + _SLOTS.index("hand" if what == "activation" else "return")
        key = transfers.setdefault((what, micro, action.chunk, action.lower), len(transfers))
        if action.kind in ("take", "sent"):
            rows.append((_WAIT, stage, key, 0, 0, micro))
            continue
        if action.kind == "send" and not overlaps:
            work(stage, slot, micro)
        link = links.setdefault((what, action.lower), len(links))
        rows.append((_BEGIN if key in issued else _ISSUE, stage, key, link, slot, micro))
        issued.add(key)
    return Events(tuple(rows), len(transfers), len(links), tuple(tuple(own.items()) for own in counts))


class _Run:
    """Keeps the clocks of all stages and links while actions are simulated."""

    def __init__(self, schedule: Schedule, stages: Sequence[StageSeconds], overlaps: bool, keep_spans: bool) -> None:
        self.stages, self.overlaps, self.keep_spans = stages, overlaps, keep_spans
        self.num = num = schedule.num_stages
        splits = schedule.splits_backward
        self.seconds = [
            seconds
            for piece in stages
            for seconds in (
                piece.forward_s,
                piece.backward_s - (piece.weight_s if splits else 0.0),
                piece.weight_s,
                piece.hand_s,
                piece.return_s,
            )
        ]
        self.now = [0.0] * num
        self.busy = [0.0] * num
        self.spans: list[Span] = []
        for stage in range(num):
            self._work(stage, "begin", self._once(stage, "begin_s"))

    def _once(self, stage: int, what: str) -> float:
        """Return the seconds `what` that a stage takes once a step, summed over its pieces."""
        return sum(getattr(piece, what) for piece in self.stages[stage :: self.num])

    def carry_out(self, events: Events) -> None:
        """Simulate all actions.

        A transfer begins when both sides have issued it and its link is free; the later side is known from the order.
        """
        now, seconds = self.now, self.seconds
        at = [0.0] * events.num_transfers  # when the first side issued it, then when it arrives
        free = [0.0] * events.num_links
        for code, stage, key, link, slot, micro in events.rows:
            if code == _WORK:
                start = now[stage]
                now[stage] = start + seconds[slot]
                if self.keep_spans:
                    self._keep(stage, _kind_of(slot), micro, start)
            elif code == _WAIT:
                if at[key] > now[stage]:
                    now[stage] = at[key]
            elif code == _ISSUE:
                at[key] = now[stage]
            else:
                start = max(at[key], now[stage], free[link])
                at[key] = free[link] = start + seconds[slot] if self.overlaps else start
        for stage, counts in enumerate(events.counts):
            self.busy[stage] += sum(num * seconds[slot] for slot, num in counts)

    def _keep(self, stage: int, kind: Kind, micro: int, start: float) -> None:
        if self.keep_spans and self.now[stage] > start:
            self.spans.append(Span(stage, kind, micro, start, self.now[stage]))

    def _work(self, stage: int, kind: Kind, seconds: float) -> None:
        start = self.now[stage]
        self.now[stage] = start + seconds
        self.busy[stage] += seconds
        self._keep(stage, kind, -1, start)

    def finished(self, tied: Sequence[Tied]) -> StepTimeline:
        """Simulate the work after the last backward, and return the step."""
        for stage in range(self.num):
            self._work(stage, "reduce", self._once(stage, "reduce_s"))
        for group in tied:
            together = max(self.now[stage] for stage in group.stages)
            for stage in group.stages:
                self.now[stage] = together
                self._work(stage, "tied", group.seconds)
        for stage in range(self.num):
            self._work(stage, "update", self._once(stage, "update_s"))
        return StepTimeline(max(self.now), self.now, self.busy, self.spans)


_Transfer = tuple[str, int, int, int]
"""Identifies a transfer: what it carries, the micro-batch, and the chunk and stage that send the activation."""


def _kind_of(slot: int) -> Kind:
    """Return what a stage does in the seconds of a slot."""
    kind = _SLOTS[slot % len(_SLOTS)]
    return "send" if kind == "hand" or kind == "return" else kind
