"""Answers what depends on the sharding alone: which copies readers ask for, their sizes, and who pays for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tests.planner_oracle.fates import Fate, Kept
from trainwright.planner.model.offload import IN_FLIGHT
from trainwright.planner.problem.problem import Decision, Problem, Source, Stored, Use, Want
from trainwright.program.layout import Layout
from trainwright.program.program import Tensor

Options = Mapping[Decision, int]


def of_the_sharding(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method whose result depends on the sharding alone; each oracle calls it once for the same arguments."""
    method.is_of_the_sharding = True  # type: ignore[attr-defined]
    return method


class Caching:
    """Keeps the results of the methods that are marked as of the sharding."""

    def __init__(self) -> None:
        for name, member in vars(type(self)).items():
            if getattr(member, "is_of_the_sharding", False):
                setattr(self, name, functools.cache(getattr(self, name)))


class Sharding(Caching):
    """One layout of every value, and the copies of parameters that serve several regions."""

    def __init__(self, problem: Problem, options: Options, shared: Collection[tuple[Source, Want]] = ()) -> None:
        super().__init__()
        self.problem, self.options, self.costs = problem, options, problem.costs
        self.stored_of = {use: stored for stored in problem.stored for use in stored.uses}
        self.wants = {use: self._wants(use) for use in problem.uses}
        self.shared = {
            *shared,
            *(key for key in self.read_twice() if self.native(self.uses_of(key[0])[0]) == key[1][0]),
        }
        self.changed = [(use, want) for use in problem.uses for want in self.wants[use] if self.native(use) != want[0]]

    def read_twice(self) -> list[tuple[Source, Want]]:
        """Return the parameters, with what is wanted of them, that one copy may serve for several regions."""
        sources = dict.fromkeys(use.source for use in self.problem.uses if use.source.is_param)
        asked = [
            (source, want)
            for source in sources
            for want in dict.fromkeys(want for use in self.uses_of(source) for want in self.wants[use])
        ]
        return [key for key in asked if key[0].decision.count == 1 and len(self._regions(*key)) > 1]

    def may_share(self) -> list[tuple[Source, Want]]:
        """Return those that it costs a gathered copy to share; the others are."""
        return [key for key in self.read_twice() if key not in self.shared]

    def uses_of(self, source: Source) -> list[Use]:
        return [use for use in self.problem.uses if use.source is source]

    def readings(self, source: Source) -> list[tuple[int, int]]:
        """Return the regions and groups that read `source`, whatever they want of it."""
        return [
            (use.region_class.members[member].index, demand.position)
            for use in self.uses_of(source)
            for member in use.members
            for demand in use.demands
        ]

    def _regions(self, source: Source, want: Want) -> set[int]:
        asking = [use for use in self.uses_of(source) if want in self.wants[use]]
        return {use.region_class.members[member].index for use in asking for member in use.members}

    def native(self, use: Use):
        return use.source.natives[self.options[use.source.decision]]

    def _wants(self, use: Use) -> dict[Want, None]:
        return {want: None for demand in use.demands for want in demand.wants[self.options[demand.decision]]}

    @of_the_sharding
    def read_by(self, decision: Decision) -> list[Use]:
        return [use for use in self.problem.uses if any(demand.decision is decision for demand in use.demands)]

    def is_possible(self, use: Use, want: Want) -> bool:
        native = self.native(use)
        back = want[1] if use.tensor.requires_grad else native
        return self.costs.edge_s(use.source.tensor, native, want[0], back) is not None

    @of_the_sharding
    def num_paid(self, use: Use, want: Want) -> int:
        """Return how often a use pays for a want; of what is shared, the first reader pays, once."""
        if (use.source, want) not in self.shared:
            return use.count
        first = min(self._regions(use.source, want))
        return int(any(use.region_class.members[member].index == first for member in use.members))

    def is_passed_on(self, stored: Stored) -> bool:
        return stored.boundary or stored.held

    def native_of(self, stored: Stored) -> Layout:
        return stored.source.natives[self.options[stored.source.decision]]

    @of_the_sharding
    def size(self, stored: Stored) -> int:
        source = stored.source
        return self.costs.block_bytes(source.tensor, source.natives[self.options[source.decision]])

    @of_the_sharding
    def size_of(self, use: Use) -> int:
        return self.costs.block_bytes(use.source.tensor, self.native(use))

    def state_bytes(self, param: Decision) -> int:
        return param.leaving_state_bytes[self.options[param]]

    def leaving_bytes(self, key: Kept) -> int:
        """Return the bytes of one instance of what may be offloaded."""
        if isinstance(key, tuple):
            return self.costs.block_bytes(key[0].source.tensor, key[1][0])
        return self.size(key) if isinstance(key, Stored) else key.inner_bytes[self.options[key]]

    def in_flight_bytes(self, fate: Fate, decision: Decision) -> float:
        """Return the bytes that may be on their way while the class of a group runs."""
        most = 0.0
        for key, num in fate.leaves.items():
            owner = key[0] if isinstance(key, tuple) else key.source.decision if isinstance(key, Stored) else key
            if owner.region_class is decision.region_class:
                most = max(most, IN_FLIGHT * self.leaving_bytes(key) * num / owner.count)
        return most

    @of_the_sharding
    def sums_bytes(self) -> int:
        """Return what the caller holds beside outputs that are partial."""
        return sum(decision.result_bytes[self.options[decision]] for decision in self.problem.groups)


class Part(Caching):
    """A sum over a sharding, with the sharding's fields at hand."""

    def __init__(self, sharding: Sharding) -> None:
        super().__init__()
        self.sharding, self.problem, self.costs = sharding, sharding.problem, sharding.costs
        self.options, self.wants, self.shared = sharding.options, sharding.wants, sharding.shared


def moment_of(decision: Decision, tensor: Tensor) -> float:
    """Return when, among the groups of its region, the op of a group that makes a tensor runs."""
    return decision.group.moment(tensor.producer, decision.region_class.groups)


def before(moment: float, num: int) -> float:
    """Return what comes `num` steps before ops that run at a moment: half as long ones before those that run between two groups."""
    return moment - num * (0.25 if moment % 1 == 0 else 0.125)
