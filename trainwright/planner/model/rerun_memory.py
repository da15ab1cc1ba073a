"""What reruns hold for a moment, where a region's backward begins: what they read, make and change the layout of.

    running       Σ r / M · (scratch, and what a group reads or makes there and no backward needs), and what one collective gathered
                  again and waits to be copied out
    converting    Σ C / M · (the most that the change of layout holds, its result included, and its operand if nothing keeps it),
                  and what one collective gathered again too

Each stands beside the gradients at which the backward of the region's last group begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from ...program.blocks import RegionClass
from ..problem.problem import Decision, Problem, Use
from .bucket_memory import BucketMemory
from .milp import MIB, Terms
from .recompute import Recompute
from .sharding import Sharding


class RerunMemory:
    """The terms of a region's reruns in the memory rows."""

    def __init__(self, problem: Problem, sharding: Sharding, recompute: Recompute, buckets: BucketMemory) -> None:
        self.problem, self.sharding, self.recompute, self.buckets = problem, sharding, recompute, buckets
        self._converts: dict[RegionClass, dict[Use, Terms]] = defaultdict(lambda: defaultdict(list))
        for (use, native, want), column in recompute.convert.items():
            if not use.source.is_param:
                tensor, stored = use.source.tensor, problem.stored_of[use]
                size = problem.costs.change_bytes(tensor, native, want[0])
                if use.inside and not (stored.own_saved or stored.boundary or stored.held):
                    size += problem.costs.block_bytes(tensor, native)
                self._converts[use.region_class][use].append((column, size / use.count / MIB))

    def moments(self, decisions: Sequence[Decision]) -> list[Terms]:
        """Return what each of a region's reruns holds; `decisions` are the region's groups in order."""
        given = self.sharding.chosen_mib(decisions[-1], decisions[-1].given_bytes)
        assert decisions[-1].region_class is not None
        region_class = decisions[-1].region_class
        moments = [*map(self._running, decisions)]
        for use, terms in self._converts[region_class].items():
            first = min(demand.position for demand in use.demands)
            moments.append([*terms, *self.buckets.rerun(region_class, first)])
        return [[*given, *terms] for terms in moments if terms]

    def _running(self, decision: Decision) -> Terms:
        assert decision.region_class is not None
        assert decision.group is not None
        return [
            *self._scratch(decision),
            *self.buckets.rerun(decision.region_class, decision.group.index),
        ]

    def _scratch(self, decision: Decision) -> Iterator[tuple[int, float]]:
        for option, size in enumerate(decision.rerun_bytes):
            if size and (decision, option) in self.recompute.rerun:
                yield self.recompute.rerun[decision, option], size / decision.count / MIB
