"""Branch and bound on the sharding: one child for each option that the relaxation gives weight, one for all the others.

Where memory binds, the relaxation mixes a few whole shardings (a third of one, two thirds of another), a mixture that no
cut on single columns takes apart. Deciding one well-connected group for one of its options does: everything that exchanges
tensors with it has to follow. Its children's relaxations begin from the parent's basis and take a few dual simplex
steps. A node whose options are all whole is a leaf: what is left are counts of blocks, a small MIP of its own.

Where many groups are mixed (an encoder with a decoder on two axes) a descent takes dozens of relaxations and may end in
nothing that fits; then the MIP of the options that the root mixes, a fifth of all, finds a good answer.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..model.deadline import Deadline
from ..model.milp import Patience, Progress, Relaxation, Solution, Vertex
from ..model.outcome import Outcome
from ..model.sharding import Sharding
from ..problem.problem import Decision
from .effort import Effort

NO_WEIGHT = 1e-6
"""An option to which a relaxation gives no more is not mixed in."""
Allowed = Mapping[Decision, frozenset[int]]
Child = tuple[frozenset[int], Vertex]
"""The options that one decision is held to, and the relaxation's solution then."""
Leaf = Callable[[Mapping[Decision, int]], Solution]
"""Options → the best solution with those."""


def connections(sharding: Sharding, param_weight: float) -> dict[Decision, float]:
    """Return how many readings each group takes part in, over all blocks: deciding it decides much else."""
    found: dict[Decision, float] = defaultdict(float)
    for use in dict.fromkeys(use for use, _, _ in sharding.flow):
        weight = param_weight if use.source.is_param else 1.0
        found[use.source.decision] += use.count * len(use.demands) * weight
        for demand in use.demands:
            found[demand.decision] += use.count * weight
    return dict(found)


@dataclass(eq=False)
class Branching:
    """One search. `choice` holds the columns of each decision's options, `weight` says which to try first."""

    relaxation: Relaxation
    choice: Mapping[Decision, list[int]]
    closed: frozenset[int]
    """Columns held at zero throughout."""
    weight: Mapping[Decision, float]
    leaf: Leaf
    gap: float
    patience: Patience
    time_limit_s: float
    cutoff: float = math.inf
    """Solutions at or above this objective are not wanted."""
    progress: Progress | None = None
    narrow: Callable[[Vertex], Solution] | None = None
    """The root's relaxation → the best solution among the options that it mixes; asked once, where no proof comes soon."""
    effort: Effort = field(default_factory=Effort)
    deadline: Deadline = field(default_factory=Deadline)
    """Once it has passed, the search ends with the incumbent; it counts the work."""
    best: Solution = field(default_factory=lambda: Solution(Outcome.STOPPED, None, math.inf, -math.inf))

    def __post_init__(self) -> None:
        self._began_s = self.deadline.work_s
        self._now: dict[Decision, frozenset[int] | None] = {}
        self._gains: dict[Decision, list[float]] = {}
        self._order = itertools.count()
        self._open: list[tuple[float, int, Allowed, Vertex]] = []
        self._tried: dict[tuple[int, ...], Solution] = {}
        self._given_up = math.inf
        """The least bound of the nodes that were given up."""

    def search(self, root: Vertex) -> Solution:
        """Return the best solution, with the bound that the open nodes prove."""
        if self.best.values is None:
            self.try_options(self._heaviest(root))
        self._push(root.objective, {}, root)
        while self._open:
            bound = self._bound()
            if self._is_close(bound) or self._is_over:
                break
            _, _, allowed, vertex = heapq.heappop(self._open)
            node: tuple[Allowed, Vertex] | None = (allowed, vertex)
            while node is not None and not self._is_over:
                node = self._expand(*node)
                self._look_among_mixed(root)
            if node is not None:
                self._push(node[1].objective, *node)
        bound = min(self._bound(), self.best.objective)
        return Solution(self._outcome(bound), self.best.values, self.best.objective, bound)

    def _look_among_mixed(self, root: Vertex) -> None:
        if self.narrow is not None and self._is_to_look():
            narrow, self.narrow = self.narrow, None
            self._take(narrow(root))

    def _is_to_look(self) -> bool:
        is_late = self._spent() > self.effort.looks_among_mixed_after_s
        return is_late and not self._is_close(self._bound(), self.effort.far_gap)

    def _outcome(self, bound: float) -> Outcome:
        if self.best.values is not None:
            is_proven = self.best.objective - bound <= 1.0001 * self.gap * abs(bound)
            return Outcome.OPTIMAL if is_proven else Outcome.FEASIBLE
        return Outcome.INFEASIBLE if math.isinf(bound) else Outcome.STOPPED

    @property
    def _is_over(self) -> bool:
        return self._spent() > self.time_limit_s or self.deadline.has_passed

    def _spent(self) -> float:
        return self.deadline.work_s - self._began_s

    def _bound(self) -> float:
        nearest = self._open[0][0] if self._open else math.inf
        return min(nearest, self._given_up)

    def _is_close(self, bound: float, gap: float | None = None) -> bool:
        if self.best.values is None:
            return False
        return self.best.objective - bound <= (self._wanted_gap if gap is None else gap) * abs(self.best.objective)

    @property
    def _wanted_gap(self) -> float:
        return max(self.gap, self.patience.gap_after(self._spent()))

    @property
    def _limit(self) -> float:
        """A node is worth looking at below this."""
        if self.best.values is None:
            return self.cutoff
        return min(self.cutoff, self.best.objective - self._wanted_gap * abs(self.best.objective))

    def _push(self, objective: float, allowed: Allowed, vertex: Vertex) -> None:
        if objective < self._limit:
            heapq.heappush(self._open, (objective, next(self._order), allowed, vertex))
        else:
            self._given_up = min(self._given_up, objective)

    # One node

    def _expand(self, allowed: Allowed, vertex: Vertex) -> tuple[Allowed, Vertex] | None:
        """Branch; return the most promising child where there is no solution yet, so that one is found soon."""
        mixed = {d: 1.0 - float(vertex.values[columns].max()) for d, columns in self.choice.items()}
        mixed = {decision: share for decision, share in mixed.items() if share > NO_WEIGHT}
        if not mixed:
            self._close(vertex)
            return None
        decision, children = self._branch(allowed, vertex, mixed)
        children.sort(key=lambda child: child[1].objective)
        first = children.pop(0) if children and self.best.values is None else None
        for options, found in children:
            self._push(found.objective, {**allowed, decision: options}, found)
        return None if first is None else ({**allowed, decision: first[0]}, first[1])

    def _close(self, vertex: Vertex) -> None:
        """Solve what is left at a leaf: counts."""
        found = self.try_options(self._heaviest(vertex))
        if found.outcome is not Outcome.INFEASIBLE:
            own = found.bound if math.isfinite(found.bound) else vertex.objective
            self._given_up = min(self._given_up, max(own, vertex.objective))

    def _heaviest(self, vertex: Vertex) -> dict[Decision, int]:
        return {decision: int(np.argmax(vertex.values[columns])) for decision, columns in self.choice.items()}

    def try_options(self, options: Mapping[Decision, int]) -> Solution:
        """Take what is best with `options` where it is better than the best so far; return it."""
        key = tuple(options.values())
        if key not in self._tried:
            self._tried[key] = self.leaf(options)
            self._take(self._tried[key])
        return self._tried[key]

    def _take(self, found: Solution) -> None:
        if found.values is not None and found.objective < min(self.best.objective, self.cutoff):
            self.best = found
            self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self.best.objective, self._bound())

    def _branch(
        self, allowed: Allowed, vertex: Vertex, mixed: Mapping[Decision, float]
    ) -> tuple[Decision, list[Child]]:
        """Return the decision to branch on, with its children that may hold something better."""
        known = [d for d in mixed if d in self._gains]
        fresh = sorted((d for d in mixed if d not in self._gains), key=lambda d: -mixed[d] * self.weight.get(d, 0.0))
        best_known = max(known, key=lambda d: self._expected(d) * mixed[d], default=None)
        floor = -1.0 if best_known is None else self._expected(best_known) * mixed[best_known]
        chosen, kept = best_known, None
        for decision in fresh[: self.effort.trials if best_known is None else 1]:
            children, gain = self._children(allowed, vertex, decision)
            if gain > floor:
                floor, chosen, kept = gain, decision, children
            if gain >= 1.0:
                break
        assert chosen is not None
        return chosen, self._children(allowed, vertex, chosen)[0] if kept is None else kept

    def _expected(self, decision: Decision) -> float:
        gains = self._gains[decision]
        return sum(gains) / len(gains)

    def _children(self, allowed: Allowed, vertex: Vertex, decision: Decision) -> tuple[list[Child], float]:
        """Solve the children; return those worth keeping, and the least that branching raises the bound by, relatively."""
        columns = self.choice[decision]
        options = allowed.get(decision) or frozenset(k for k, column in enumerate(columns) if column not in self.closed)
        weighted = [k for k in options if vertex.values[columns[k]] > NO_WEIGHT]
        rest = options.difference(weighted)
        found: list[Child] = []
        rises: list[float] = []
        for part in [*(frozenset([k]) for k in weighted), *([rest] if rest else [])]:
            child = self._solve({**allowed, decision: part}, vertex)
            if child is None:
                rises.append(self.effort.gain_without)
                continue
            found.append((part, child))
            rises.append((child.objective - vertex.objective) / max(abs(vertex.objective), 1e-12))
        gain = min(rises) + self.effort.mean_weight * sum(rises) / len(rises) + (1.0 if not found else 0.0)
        self._gains.setdefault(decision, []).append(gain)
        return found, gain

    def _solve(self, allowed: Allowed, parent: Vertex) -> Vertex | None:
        columns: list[int] = []
        uppers: list[float] = []
        for decision, own in self.choice.items():
            options = allowed.get(decision)
            if self._now.get(decision) != options:
                self._now[decision] = options
                for option, column in enumerate(own):
                    columns.append(column)
                    is_open = column not in self.closed and (options is None or option in options)
                    uppers.append(float(is_open))
        self.relaxation.bound(columns, uppers)
        limit = self._limit
        found = self.relaxation.solve(parent.basis, limit, self.time_limit_s - self._spent(), self.deadline)
        if isinstance(found, Vertex):
            return found
        self._given_up = min(self._given_up, parent.objective if found is Outcome.STOPPED else limit)
        return None
