r"""Sequential gradient codes: jobs may end T rounds after their start, so that stragglers are tolerated with less work.

    GC(n, s)           T = 0         load (s + 1)/n                                        at most s stragglers a round
    SR-SGC(n; B, W, λ)  T = B         load (s + 1)/n, s = ⌈Bλ/(W − 1 + B)⌉, B | W − 1       bursts, or at most s a round
    M-SGC(n; B, W, λ)   T = W − 2 + B  load (λ + 1)(W − 1 + B) / (n (B + (W − 1)(λ + 1)))    bursts

A (B, W, λ)-bursty pattern has, in any W rounds, at most λ workers that straggle, each within B consecutive rounds. A
scheme decides what each worker does in a round, is told who answered, and knows which jobs are done. With one model, a job
needs the outcome of the previous one: train T + 1 models in turn, or accept gradients that are T rounds old.

Source: Krishnan, Ebrahimi & Khisti 2023, Sequential Gradient Coding For Straggler Mitigation (ICLR).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from ..artifacts import UserError, check_range
from .codes import GradientCode

Pattern = Sequence[frozenset[int]]
"""The stragglers of each round."""


@dataclass(frozen=True)
class Task:
    """A part of a job that one worker computes: the `part` of `kind`, as its scheme numbers them; jobs below 1 are idle."""

    job: int
    kind: Literal["coded", "own"]
    part: int


def is_bursty(pattern: Pattern, burst: int, window: int, most: int) -> bool:
    """Tell whether a pattern of stragglers is within the (B, W, λ)-bursty model.

    >>> is_bursty([frozenset({0}), frozenset({0}), frozenset()], burst=1, window=2, most=1)
    False
    """
    for begin in range(max(1, len(pattern) - window + 1)):
        rounds = pattern[begin : begin + window]
        who = frozenset().union(*rounds) if rounds else frozenset()
        spans = [[t for t, late in enumerate(rounds) if worker in late] for worker in who]
        if len(who) > most or any(span[-1] - span[0] >= burst for span in spans):
            return False
    return True


@dataclass
class SRSGC:
    """Selective repetition: if too few workers answered for a job, just enough of the others repeat it B rounds later.

    >>> scheme = SRSGC(8, burst=1, window=2, most=3)
    >>> scheme.code.stragglers, scheme.load, scheme.delay
    (2, 0.375, 1)
    """

    num_workers: int
    burst: int
    window: int
    most: int
    answered: dict[int, set[int]] = field(default_factory=dict)
    """The workers whose sum has arrived, by job."""
    gone: frozenset[int] = frozenset()
    """The workers that are gone, and are not asked again."""

    def __post_init__(self) -> None:
        _check_model("sr-sgc", self.num_workers, self.burst, self.window, self.most)
        if (self.window - 1) % self.burst:
            raise UserError(
                f"sr-sgc needs a burst that divides the window less 1; got {self.burst} and {self.window}; change one of them"
            )

    @cached_property
    def code(self) -> GradientCode:
        """Return the code of each job: a cyclic one, for which only the number of answers counts."""
        stragglers = -(-self.burst * self.most // (self.window - 1 + self.burst))
        return GradientCode(self.num_workers, min(stragglers, self.num_workers - 1), cyclic=True)

    @property
    def delay(self) -> int:
        """Return T, the number of rounds after its own in which a job may still end."""
        return self.burst

    @property
    def load(self) -> float:
        """Return the share of a job's data that a worker computes in a round."""
        return self.code.load

    def tasks(self, turn: int) -> list[list[Task]]:
        """Return the tasks of each worker in round `turn`, counted from 1."""
        old = turn - self.burst
        again = self.still_needed(old) if old >= 1 else []
        return [[Task(old if worker in again else turn, "coded", 0)] for worker in range(self.num_workers)]

    def still_needed(self, job: int) -> list[int]:
        """Return the present workers whose sums, with those that have arrived, would complete a job."""
        answered = self.answered.get(job, set())
        missing = self.num_workers - self.code.stragglers - len(answered)
        late = [worker for worker in range(self.num_workers) if worker not in answered | self.gone]
        return late[: max(0, missing)]

    def receive(self, turn: int, tasks: list[list[Task]], stragglers: frozenset[int]) -> None:
        """Record who answered in round `turn`."""
        for worker, own in enumerate(tasks):
            if worker not in stragglers:
                for task in own:
                    self.answered.setdefault(task.job, set()).add(worker)

    @property
    def num_slots(self) -> int:
        """Return the number of tasks of a worker in a round."""
        return 1

    @property
    def num_units(self) -> int:
        """Return the number of pieces of the data."""
        return self.num_workers

    @property
    def num_groups(self) -> int:
        """Return the number of codes of a job."""
        return 1

    def units(self, worker: int, task: Task) -> dict[int, float]:
        """Return the pieces of the data, with weights, over which a task sums gradients."""
        return {piece: float(self.code.matrix[worker, piece]) for piece in self.code.chunks(worker)}

    def in_group(self, job: int, group: int) -> set[int]:
        """Return the workers whose coded sum of the group has arrived."""
        return self.answered.get(job, set())

    def is_done(self, job: int) -> bool:
        """Tell whether a job's gradient can be decoded."""
        return self.code.decodes(self.answered.get(job, set()))

    def flags(self, job: int) -> list[bool]:
        """Return the arrived parts of a job as flags, for `set_flags`."""
        return [worker in self.answered.get(job, set()) for worker in range(self.num_workers)]

    def set_flags(self, job: int, flags: Sequence[bool]) -> None:
        """Set the arrived parts of a job from `flags`; to none if it is empty."""
        self.answered[job] = {worker for worker, flag in enumerate(flags) if flag}

    def tolerates(self, pattern: Pattern) -> bool:
        """Tell whether all jobs end in time under a pattern; if not, the master has to wait for more answers."""
        few = all(len(late) <= self.code.stragglers for late in pattern)
        return few or is_bursty(pattern, self.burst, self.window, self.most)


@dataclass
class MSGC:
    """Multiplexing: a worker does a small part of each of W − 1 + B jobs in a round, first of its own data, then of coded data.

    >>> scheme = MSGC(8, burst=2, window=3, most=3)
    >>> scheme.load, scheme.delay, scheme.num_units
    (0.2, 3, 80)
    """

    num_workers: int
    burst: int
    window: int
    most: int
    own: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """The finished parts (worker, part) of the data that one worker alone has, by job."""
    coded: dict[int, dict[int, set[int]]] = field(default_factory=dict)
    """The workers whose sum has arrived, by job and group."""

    def __post_init__(self) -> None:
        _check_model("m-sgc", self.num_workers, self.burst, self.window, self.most)
        if self.burst >= self.window:
            raise UserError(
                f"m-sgc needs a burst below its window; got {self.burst} and {self.window}; lengthen the window"
            )

    @property
    def has_coded(self) -> bool:
        """Tell whether there is coded data; there is none if all workers may straggle."""
        return self.most < self.num_workers

    @cached_property
    def code(self) -> GradientCode:
        """Return the code of each of a job's B groups."""
        return GradientCode(self.num_workers, min(self.most, self.num_workers - 1), cyclic=True)

    @property
    def num_slots(self) -> int:
        """Return the number of tasks of a worker in a round, each for another job."""
        return self.window - 1 + self.burst

    @property
    def delay(self) -> int:
        """Return T, the number of rounds after its own in which a job may still end."""
        return self.window - 2 + self.burst

    @property
    def num_units(self) -> int:
        """Return the number of pieces of the data: an own part takes λ + 1 of them, a coded chunk one."""
        own = (self.window - 1) * self.num_workers
        return own * (self.most + 1) + self.burst * self.num_workers if self.has_coded else own

    @property
    def load(self) -> float:
        """Return the share of a job's data that a worker computes in a round."""
        return self.num_slots * (self.most + 1 if self.has_coded else 1) / self.num_units

    def tasks(self, turn: int) -> list[list[Task]]:
        """Return the tasks of each worker in round `turn`, counted from 1, one for each slot."""
        return [
            [self._task(worker, turn - slot, slot) for slot in range(self.num_slots)]
            for worker in range(self.num_workers)
        ]

    def _task(self, worker: int, job: int, slot: int) -> Task:
        if slot < self.window - 1:
            return Task(job, "own", slot)
        done = self.own.get(job, set())
        left = next((part for part in range(self.window - 1) if (worker, part) not in done), None)
        if left is not None:
            return Task(job, "own", left)
        return Task(job if self.has_coded else 0, "coded", slot - (self.window - 1))

    def receive(self, turn: int, tasks: list[list[Task]], stragglers: frozenset[int]) -> None:
        """Record who answered in round `turn`."""
        for worker, own in enumerate(tasks):
            for task in own if worker not in stragglers else ():
                if task.kind == "own":
                    self.own.setdefault(task.job, set()).add((worker, task.part))
                else:
                    self.coded.setdefault(task.job, {}).setdefault(task.part, set()).add(worker)

    @property
    def num_groups(self) -> int:
        """Return the number of codes of a job, each over n chunks."""
        return self.burst if self.has_coded else 0

    def units(self, worker: int, task: Task) -> dict[int, float]:
        """Return the pieces of the data, with weights, over which a task sums gradients."""
        width = self.most + 1 if self.has_coded else 1
        if task.kind == "own":
            first = (worker * (self.window - 1) + task.part) * width
            return dict.fromkeys(range(first, first + width), 1.0)
        begin = self.num_workers * ((self.window - 1) * width + task.part)
        return {begin + piece: float(self.code.matrix[worker, piece]) for piece in self.code.chunks(worker)}

    def in_group(self, job: int, group: int) -> set[int]:
        """Return the workers whose coded sum of the group has arrived."""
        return self.coded.get(job, {}).get(group, set())

    def flags(self, job: int) -> list[bool]:
        """Return the arrived parts of a job as flags, for `set_flags`."""
        n, own = self.num_workers, self.own.get(job, set())
        private = [(worker, part) in own for part in range(self.window - 1) for worker in range(n)]
        return private + [
            worker in self.in_group(job, group) for group in range(self.num_groups) for worker in range(n)
        ]

    def set_flags(self, job: int, flags: Sequence[bool]) -> None:
        """Set the arrived parts of a job from `flags`; to none if it is empty."""
        there = [divmod(index, self.num_workers) for index, flag in enumerate(flags) if flag]
        parts = self.window - 1
        self.own[job] = {(worker, part) for part, worker in there if part < parts}
        self.coded[job] = {
            group: {worker for row, worker in there if row == parts + group} for group in range(self.num_groups)
        }

    def is_done(self, job: int) -> bool:
        """Tell whether a job's gradient can be decoded."""
        if len(self.own.get(job, set())) < (self.window - 1) * self.num_workers:
            return False
        groups = self.coded.get(job, {})
        return not self.has_coded or all(self.code.decodes(groups.get(group, set())) for group in range(self.burst))

    def tolerates(self, pattern: Pattern) -> bool:
        """Tell whether all jobs end in time under a pattern; if not, the master has to wait for more answers."""
        return is_bursty(pattern, self.burst, self.window, self.most)


def _check_model(owner: str, num_workers: int, burst: int, window: int, most: int) -> None:
    check_range(
        owner,
        burst=(burst, "of at least 1 round", lambda value: value >= 1),
        window=(window, "of at least 2 rounds", lambda value: value >= 2),
        most=(most, f"from 0 to {num_workers} workers", lambda value: 0 <= value <= num_workers),
    )
