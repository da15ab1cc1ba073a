"""Bounds the seconds of a program's units on one stage's ranks from below, whatever the layouts, cuts and orders.

    f, b     the arithmetic of a unit for a micro-batch, each group under its best split
    both_s   arithmetic and reshards of a micro-batch: the relaxation of the sharding with the costs of the unit's own columns
             alone, of which those of a class of regions are shared evenly by its members
    all_s    the same of all micro-batches, with the sums of gradients and the updates, once a step
    whole_s  the same of the whole program: the relaxation as it is

Reshards that some members of a class do and others do not are in `whole_s` alone, as are parameters that several units read, but
for those of both ends (`add_tied`), of which each end has half. With more micro-batches than the program has, each does its share
of the arithmetic and launches every call once more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...program.blocks import Region, RegionClass
from ...program.layout import Layout
from ...program.program import Tensor
from ..model.milp import Vertex
from ..problem.problem import Decision, Problem, Use, Want
from ..search.solve import Solver
from .measure import Outline, params_of
from .program import Least
from .table import Hop, tied_sums


@dataclass(eq=False)
class Floors:
    """The least seconds of one program on one mesh; more micro-batches than the program's never take less."""

    problem: Problem
    outline: Outline
    solver: Solver

    def least(self, num: int) -> list[Least]:
        """Return the least of each unit in a step of `num` micro-batches, by its arithmetic alone."""
        runs = self.problem.costs.num_runs
        forward: dict[RegionClass, float] = defaultdict(float)
        backward: dict[RegionClass, float] = defaultdict(float)
        for decision in self.problem.groups:
            if decision.region_class is not None:
                launch_f, launch_b = self._launches_s(decision)
                there = min(decision.forward_s) / runs
                both = min(a + b for a, b in zip(decision.forward_s, decision.backward_s)) / runs
                there, both = (
                    (taken - launch) * runs / num + launch
                    for taken, launch in ((there, launch_f), (both, launch_f + launch_b))
                )
                forward[decision.region_class] += there
                backward[decision.region_class] += both - there
        return [
            Least(sum(forward[r.region_class] for r in own), sum(backward[r.region_class] for r in own), kind=kind)
            for own, kind in zip(self.outline.regions, self.outline.kinds)
        ]

    def whole_s(self, num: int) -> float:
        """Return the least of the whole program in a step of `num` micro-batches."""
        more = num - self.problem.costs.num_runs
        launches = (decision.count * sum(self._launches_s(decision)) for decision in self.problem.groups)
        return self.solver.lower_bound_s() + more * sum(launches)

    def nearer(self, num: int) -> list[Least]:
        """Return the least of each unit with what it communicates too."""
        more = num - self.problem.costs.num_runs
        launch: dict[RegionClass, float] = defaultdict(float)
        for decision in self.problem.groups:
            if decision.region_class is not None:
                launch[decision.region_class] += sum(self._launches_s(decision))
        found = []
        for each, own in zip(self.least(num), self.outline.regions):
            micro_s, all_s = self._relaxed_s[each.kind]
            launches_s = more * sum(launch[region.region_class] for region in own)
            found.append(replace(each, both_s=(micro_s + launches_s) / num, all_s=all_s + launches_s))
        return found

    def _launches_s(self, decision: Decision) -> tuple[float, float]:
        """Return what of a micro-batch's forward and backward its launches take."""
        assert decision.group is not None
        found = [self.problem.costs.launches_s(op) for op in decision.group.ops]
        runs = self.problem.costs.num_runs
        return sum(there for there, _ in found) / runs, sum(back for _, back in found) / runs

    @cached_property
    def _relaxed_s(self) -> dict[int, tuple[float, float]]:
        """Return, by kind of unit, the relaxations of what all micro-batches take, and of that with what is done once a step."""
        relaxation = self.solver.plain()[0].relaxation({})
        columns = range(self.solver.plain()[0].num_columns)
        known: dict[int, tuple[float, float]] = {}
        basis = None
        for kind, own in zip(self.outline.kinds, self.outline.regions):
            if kind not in known:
                found = []
                for costs in self._costs(own):
                    relaxation.charge(dict.fromkeys(columns, 0.0) | costs)
                    vertex = relaxation.solve(basis)
                    found.append(max(0.0, vertex.objective) if isinstance(vertex, Vertex) else 0.0)
                    basis = vertex.basis if isinstance(vertex, Vertex) else None
                known[kind] = found[0], max(found)
        return known

    def _costs(self, regions: Sequence[Region]) -> tuple[dict[int, float], dict[int, float]]:
        """Return, by column, the costs of what one unit does with each micro-batch, and of that and what it does once a step."""
        model, sharding = self.solver.plain()
        shares: dict[RegionClass, float] = defaultdict(float)
        for region in regions:
            shares[region.region_class] += 1 / region.region_class.multiplicity
        held = self._held(regions)
        micro: dict[int, float] = {}
        once: dict[int, float] = {}
        for decision, columns in sharding.choice.items():
            is_group = decision.region_class is not None
            if is_group:
                share = shares.get(decision.region_class, 0.0)  # type: ignore[arg-type]
            else:
                share = sum(held.get(tensor, 0.0) for tensor in decision.tied) / decision.count
            if share:
                own = {column: share * decision.option_s(k) for k, column in enumerate(columns)}
                (micro if is_group else once).update(own)
        for (use, native, want), column in sharding.flow.items():
            if use.count == use.region_class.multiplicity and (share := shares.get(use.region_class, 0.0)):
                once[column] = share * model.cost[column]
                micro[column] = once[column] - share * self._summed_s(use, native, want)
        return micro, micro | once

    def _summed_s(self, use: Use, native: Layout, want: Want) -> float:
        """Return the seconds of the sum over ranks, once a step, of the gradient of a parameter that is read as it rests."""
        if not use.source.is_param or native != want[0]:
            return 0.0
        times = self.problem.costs.edge_s(use.source.tensor, native, *want)
        return 0.0 if times is None else use.count * times[1]

    def _held(self, regions: Sequence[Region]) -> dict[Tensor, float]:
        """Return the shares of parameters' costs that are sure to be a unit's: all, or a half where both ends read them."""
        ends = [set(params_of(own)) for own in (self.outline.regions[0], self.outline.regions[-1])]
        read = Counter(tensor for own in self.outline.regions for tensor in set(params_of(own)))
        own = set(params_of(regions))
        found = {tensor: 1.0 for tensor in own if read[tensor] == 1}
        if own in ends:
            found.update({tensor: 0.5 for tensor in ends[0] & ends[1] if tensor.requires_grad})
        return found


def add_tied(problem: Problem, outline: Outline, hops: Sequence[Hop]) -> None:
    """Let each layout of a parameter that the first and the last unit read cost what it does to two stages at least.

    Both hold it: they sum its gradient, and update it each by itself.
    """
    first, last = ({tensor for tensor in params_of(outline.regions[end]) if tensor.requires_grad} for end in (0, -1))
    for decision in problem.params:
        if num := len(first & last & set(decision.tied)):
            for option, layout in enumerate(decision.options):
                size = float(problem.costs.local_bytes(decision.tied[0], layout))
                (tied,) = tied_sums({"": (0, len(hops))}, {"": size}, hops)
                update_s = problem.costs.optimizer_s(decision.tied[0], layout, problem.optimizer)
                decision.backward_s[option] += (2 * tied.seconds + update_s) * num / decision.count
