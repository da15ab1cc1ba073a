"""The row budget: the search for the bound on the memory rows whose answer, once simulated, just fits the true budget."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .effort import GAP, NEAR, Effort

if TYPE_CHECKING:
    from .answer import Answer
    from .progress import ProgressLine


class Search:
    """Looks for the rows' budget whose answer just fits the true one, by what the simulations say."""

    def __init__(
        self, budget: float, effort: Effort, aim: float | None = None, progress: ProgressLine | None = None
    ) -> None:
        self.budget, self.aim, self.effort = budget, float(budget if aim is None else aim), effort
        self.low: float | None = None
        """The largest aim whose answer fitted."""
        self.high: float | None = None
        """The smallest aim whose answer did not, or what the rows count of that answer: below it they let in others."""
        self._empty = -math.inf
        """The largest aim that let in nothing that is wanted."""
        self.best: Answer | None = None
        self._misses = 0
        self._fitted_s = self._missed_s = math.nan
        """The objectives of the last answer that fitted its aim, and of the one at `high`, which did not fit."""
        self._progress = progress
        self.is_full = False
        """True once an answer leaves little of the true budget."""

    @property
    def is_narrow(self) -> bool:
        """True once the next aim would be nearly one of those before."""
        return self._is_within(self.effort.narrow)

    @property
    def is_spent(self) -> bool:
        """True once aims are as near one another as sizes of values are."""
        return self._is_within(self.effort.spent)

    @property
    def is_flat(self) -> bool:
        """True where what did not fit is no faster than the best that does: no aim between the two lets in what is."""
        return self.best is not None and self.best.objective_s <= (1 + GAP) * self._missed_s

    @property
    def is_closed(self) -> bool:
        """True once the smallest aim whose answer did not fit is near one that let in what fits, or nothing that is wanted."""
        return self.high is not None and self.high - self._below < self.effort.narrow * self.budget

    @property
    def _below(self) -> float:
        """The largest aim whose answer fitted, or that let in nothing that is wanted; -∞ where there is none."""
        return self._empty if self.low is None else max(self.low, self._empty)

    def _is_within(self, share: float) -> bool:
        return self.low is not None and self.high is not None and self.high - self.low < share * self.budget

    def note_nothing(self) -> bool:
        """Move on from an aim that let in nothing that is wanted; False where no larger one is left to try."""
        self._empty = max(self._empty, self.aim)
        if self.high is None or self.high - self.aim < self.effort.spent * self.budget:
            return False
        self.aim = (self.aim + self.high) / 2
        return True

    def offer(self, answer: Answer) -> None:
        """Take an answer that fits where it is faster than the best so far, or as fast and nearer to what is proven."""
        if self.best is None or _rank(answer) < _rank(self.best):
            self.best = answer
            if self._progress is not None:
                self._progress.fits(answer.objective_s)

    def note(self, answer: Answer, rows_peak: float = math.inf) -> None:
        """Take in the answer to the present aim, of which the rows count `rows_peak`, and move on."""
        left = self.budget - answer.simulation.peak_bytes
        is_known = False
        if left >= 0:
            is_known = math.isclose(answer.objective_s, self._fitted_s, rel_tol=GAP)
            self.low, self._fitted_s = self.aim, answer.objective_s
            self.offer(answer)
            self.is_full = left <= NEAR * self.budget
            self.aim += self.effort.step_up * left
        else:
            self.high = self.aim = min(self.aim, rows_peak)
            self._missed_s = answer.objective_s
            self._misses += 1
            # where less in the rows is not as much less in truth, larger steps
            self.aim += (self.effort.step_down + self._misses) * left + max(left, -self.effort.most_again * self.budget)
        if (
            self.high is not None
            and math.isfinite(self._below)
            and (is_known or not self._below < self.aim < self.high)
        ):
            # where more in the rows let in nothing faster, there may be nothing up to what did not fit: that is asked at once
            middle = (self._below + self.high) / 2
            self.aim = max(middle, self.high - self.effort.spent * self.budget / 2) if is_known else middle


def _rank(answer: Answer) -> tuple[float, float]:
    gap = math.inf if answer.gap is None else answer.gap
    return float(f"{answer.objective_s:.9g}"), gap
