"""What updates hold while the backward goes on, where parameters or optimizer states rest on a tier.

    W[d, k] ∈ {0, 1}   whether the states of any instance of a parameter are away       S[d, k] ≤ M · W[d, k]
    one     U  =  Σ gradient · x[d, k] + Σ states · W[d, k]
    all     Σ gradient · n · x[d, k] + Σ states · (n · W[d, k] or S[d, k])      n instances whose gradients are complete
    most    max(half of the window, U of each of these)

Updates begin as their gradients are complete, while they have room in half of the window; one that is larger runs alone. So a
row counts `all` where that is no more than `most` whatever is chosen, and else `most`. Of which instances the states are away no
column says: those of n instances are no more than n · W and no more than S, and a row has the one that is exact where all are
away, or where n are most of the instances the one that is exact where few are.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..problem.problem import Decision, Problem
from .milp import MIB, Model, Terms
from .offload_states import STATE_EPSILON_S
from .recompute import Recompute
from .sharding import Sharding

MOST = "updates have room in half of the window"


class UpdateMemory:
    """The terms of updates in the memory rows; none where nothing rests on a tier."""

    def __init__(self, model: Model, problem: Problem, sharding: Sharding, recompute: Recompute) -> None:
        self.model, self.sharding, self.recompute = model, sharding, recompute
        resting = problem.costs.resting
        self.window_bytes = 0 if resting is None else resting.window_bytes // 2
        self.trained = [d for d in problem.params if d.tied[0].requires_grad] if resting is not None else []
        self._any_away: dict[tuple[Decision, int], int] = {}
        self._most: dict[frozenset[Decision], int] = {}

    def held(self, nums: dict[Decision, int]) -> Terms:
        """Return what updates of so many instances hold; any of the states that are away may be theirs."""
        largest = {d: max(map(sum, zip(d.rest_bytes, d.leaving_state_bytes))) for d in nums}
        if sum(num * largest[decision] for decision, num in nums.items()) > max([self.window_bytes, *largest.values()]):
            return [(self._most_of(frozenset(nums)), 1.0)]
        gradients = [
            (column, num * size)
            for decision, num in nums.items()
            for column, size in self.sharding.chosen_mib(decision, decision.rest_bytes)
        ]
        states = [term for decision, num in nums.items() for term in self._states_of(decision, num)]
        return [*gradients, *states]

    def _most_of(self, decisions: frozenset[Decision]) -> int:
        if decisions not in self._most:
            column = self._most[decisions] = self.model.column(lower=self.window_bytes / MIB)
            for decision in self.trained:
                if decision in decisions:
                    self.model.row(MOST, [*self._one(decision), (column, -1.0)], upper=0.0)
        return self._most[decisions]

    def _one(self, decision: Decision) -> Terms:
        """Return what the update of one instance holds."""
        return [*self.sharding.chosen_mib(decision, decision.rest_bytes), *self._states_of(decision, 1)]

    def _states_of(self, decision: Decision, num: int) -> Iterator[tuple[int, float]]:
        """Yield what so many updates of a parameter hold of states that came for them."""
        is_most = 2 * num > decision.count
        for option, size in enumerate(decision.leaving_state_bytes):
            if (away := self.recompute.states.get((decision, option))) is not None:
                yield (away, size / MIB) if is_most else (self._is_any_away(decision, option), num * size / MIB)

    def _is_any_away(self, decision: Decision, option: int) -> int:
        key = decision, option
        if key not in self._any_away:
            column = self._any_away[key] = self.model.column(1.0, STATE_EPSILON_S, integer=True)
            self.model.row(MOST, [(self.recompute.states[key], 1.0), (column, -float(decision.count))], upper=0.0)
        return self._any_away[key]
