"""What updates hold while the backward goes on, where parameters or optimizer states rest on a tier.

    W[d, k] ∈ {0, 1}   whether the states of any instance of a parameter are away       S[d, k] ≤ M · W[d, k]
    one     U  =  Σ gradient · x[d, k] + Σ states · W[d, k]
    all     Σ gradient · n · x[d, k] + Σ states · (n · W[d, k] or S[d, k])      n instances whose gradients are complete
    F ∈ {0, 1}         whether `all` of all parameters is more than half of the window
    held    H ≥ F · window / 2,  H ≥ U of each of these,  H ≥ all − (the most that it may be) · F

Updates begin as their gradients are complete, while they have room in half of the window; one that is larger runs alone. So a
row counts `all` where that fits in whatever is chosen, and else `held`. Of which instances the states are away no column says:
those of n instances are no more than n · W and no more than S, and a row has the one that is exact where all are away, or where
n are most of the instances the one that is exact where few are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from ..problem.problem import Decision, Problem
from .milp import MIB, Model, Terms
from .offload_states import STATE_EPSILON_S
from .recompute import Recompute
from .sharding import Sharding

HELD = "updates have room in half of the window"


class UpdateMemory:
    """The terms of updates in the memory rows; none where nothing rests on a tier."""

    def __init__(self, model: Model, problem: Problem, sharding: Sharding, recompute: Recompute) -> None:
        self.model, self.sharding, self.recompute = model, sharding, recompute
        resting = problem.costs.resting
        self.window_bytes = 0 if resting is None else resting.window_bytes // 2
        self.trained = [d for d in problem.params if d.tied[0].requires_grad] if resting is not None else []
        self._any_away: dict[tuple[Decision, int], int] = {}
        self._held: dict[frozenset[tuple[Decision, int]], int] = {}

    def held(self, nums: dict[Decision, int]) -> Terms:
        """Return what updates of so many instances hold; any of the states that are away may be theirs."""
        largest = {d: max(map(sum, zip(d.rest_bytes, d.leaving_state_bytes))) for d in nums}
        if sum(num * largest[decision] for decision, num in nums.items()) <= max(
            [self.window_bytes, *largest.values()]
        ):
            return self._all(nums)
        key = frozenset(nums.items())
        if key not in self._held:
            held = self._held[key] = self.model.column()
            self.model.row(HELD, [(self._fills, self.window_bytes / MIB), (held, -1.0)], upper=0.0)
            for decision in nums:
                self.model.row(HELD, [*self._one(decision), (held, -1.0)], upper=0.0)
            if self.model.lower[self._fills] == 0.0:
                most = sum(num * largest[decision] for decision, num in nums.items()) / MIB
                self.model.row(HELD, [*self._all(nums), (self._fills, -most), (held, -1.0)], upper=0.0)
        return [(self._held[key], 1.0)]

    @cached_property
    def _fills(self) -> int:
        """The column that is 1 where updates of all parameters are more than half of the window, in some plans or in all."""
        counts = {decision: decision.count for decision in self.trained}
        least = sum(num * min(decision.rest_bytes) for decision, num in counts.items())
        if least > self.window_bytes:
            return self.model.one()
        fills = self.model.column(1.0, integer=True)
        most = sum(num * max(map(sum, zip(d.rest_bytes, d.leaving_state_bytes))) for d, num in counts.items())
        self.model.row(
            HELD, [*self._all(counts), (fills, (self.window_bytes - most) / MIB)], upper=self.window_bytes / MIB
        )
        return fills

    def _all(self, nums: dict[Decision, int]) -> Terms:
        gradients = [
            (column, num * size)
            for decision, num in nums.items()
            for column, size in self.sharding.chosen_mib(decision, decision.rest_bytes)
        ]
        return [*gradients, *(term for decision, num in nums.items() for term in self._states_of(decision, num))]

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
            self.model.row(HELD, [(self.recompute.states[key], 1.0), (column, -float(decision.count))], upper=0.0)
        return self._any_away[key]
