"""The settings of a solve and its two results: an answer, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ...program.decisions import Decisions, Overlap, wider
from ..costs.simulate import Simulation
from ..model.deadline import Deadline
from ..model.decode import Choice
from ..model.milp import Model
from ..model.outcome import Outcome
from ..model.recompute import Recompute
from ..model.sharding import Sharding
from ..problem.problem import Decision
from ..problem.recipes import Restriction
from .effort import Effort
from .progress import ProgressLine
from .stages import Stages, Starts

Simulate = Callable[[Decisions], Simulation]


@dataclass
class Answer:
    """A solved problem: what was chosen, what it costs by the model, and what the simulation says it holds."""

    choice: Choice
    decisions: Decisions
    simulation: Simulation
    gap: float | None
    objective_s: float
    solve_s: float = 0.0
    """Seconds of work, as the deadline counts it."""
    notes: list[str] = field(default_factory=list)
    row_budget: float | None = None
    """The rows' budget under which the answer fits the true one; None where it fits without rows."""
    floor_s: float = 0.0
    """Seconds that no answer of this search beats, whatever the memory."""

    @property
    def binds(self) -> bool:
        """True where the memory budget bound the search; else the answer is the fastest under any budget."""
        return self.row_budget is not None

    @property
    def bound_s(self) -> float:
        """The lower bound on the objective that the gap states."""
        return 0.0 if self.gap is None else self.objective_s * (1 - min(1.0, self.gap))

    def bounded(self, bound_s: float) -> Answer:
        """Return the answer with the gap that another bound gives it."""
        return replace(self, gap=max(0.0, 1 - bound_s / self.objective_s))

    def overlapped(self, simulate: Simulate, budget_bytes: int | None, furthest: Overlap) -> Answer:
        """Return the answer with its parameters travelling as far ahead as the budget allows (`rank.travel`)."""
        for overlap in wider(furthest):
            if overlap == self.decisions.overlap:
                break
            decisions = replace(self.decisions, overlap=overlap)
            simulation = simulate(decisions)
            if budget_bytes is None or simulation.peak_bytes <= budget_bytes:
                return replace(self, decisions=decisions, simulation=simulation)
        return self


@dataclass
class Infeasible:
    """No answer within the budget: why, what binds, and the least that would do."""

    outcome: Outcome
    binding: tuple[str, ...] = ()
    smallest: Answer | None = None
    floor_s: float = 0.0
    """Seconds that no answer of this search beats, whatever the memory."""
    bound_s: float = 0.0
    """Seconds that no answer beats which the memory rows let in; ∞ where they are proven to let nothing in."""
    least_bytes: float = 0.0
    """What no plan is below by the rows, as far as that is proven."""
    seek: Callable[[Deadline], Infeasible] | None = None
    """Finds `smallest` until a deadline; where the rows let nothing into a far larger budget, the search has not."""


def refused(outcome: Outcome) -> Infeasible:
    """Return why there is no answer where none is known that holds least."""
    if outcome is Outcome.INFEASIBLE:
        return Infeasible(outcome, ("the restrictions contradict one another",))
    return Infeasible(Outcome.STOPPED)


@dataclass(frozen=True)
class Least:
    """The answer that holds least by the rows: their peak, the bytes below which no plan is by a proof, the fullest of them."""

    answer: Answer
    rows_peak: float
    rows_bound: float
    binding: tuple[str, ...]
    slower: Answer | None = None
    """The same sharding with more recomputed, where a budget was asked for that `answer` does not fit: no row is fuller than it
    must be."""


@dataclass(eq=False)
class Settings:
    """The settings of a solve besides its problem."""

    budget_bytes: int | None
    time_limit_s: float = 30.0
    restriction: Restriction = field(default_factory=Restriction)
    progress: ProgressLine | None = None
    cutoff_s: float = math.inf
    """An answer that takes as long as this is not wanted: a plan is known that does not."""
    deadline: Deadline = field(default_factory=Deadline)
    """The deadline of the whole question; `time_limit_s` limits one search."""
    effort: Effort = field(default_factory=Effort)
    floor_s: float = 0.0
    """Seconds that no answer beats, whatever the memory; known once the fastest one is."""
    row_budget: float = 0.0
    """The row budget under which the answer of another way to travel fits: these rows count as much too much."""
    seeks_least: bool = True
    """True if what holds least is looked for where the rows let nothing into the budget; not where a search has found a plan."""

    def held_to(self, options: Mapping[Decision, int]) -> Settings:
        """Return the question with one sharding alone allowed."""
        allowed = {decision: frozenset([option]) for decision, option in options.items()}
        return replace(self, restriction=replace(self.restriction, allowed=allowed))

    def stages(
        self,
        model: Model,
        sharding: Sharding,
        recompute: Recompute | None = None,
        starts: Starts | None = None,
        time_limit_s: float | None = None,
    ) -> Stages:
        """Return what `solve_in_stages` takes."""
        limit = self.time_limit_s if time_limit_s is None else time_limit_s
        left_s = self.deadline.limited(limit)
        patience = self.effort.patience_in_buckets if sharding.joined.is_weak else self.effort.patience
        told = None if self.progress is None else self.progress.goes_on
        return Stages(
            model, sharding, self.restriction, recompute, starts, told, left_s, effort=self.effort, patience=patience,
            deadline=self.deadline,
        )  # fmt: skip
