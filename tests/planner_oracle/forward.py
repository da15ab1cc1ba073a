"""Adds up the memory that is held while a group runs forward."""

from __future__ import annotations

import math

from tests.planner_oracle.fates import Fate
from tests.planner_oracle.pieces import Piece
from tests.planner_oracle.sharding import Part, of_the_sharding
from trainwright.planner.problem.problem import Decision, Stored, Use


class Forward(Part):
    """Sums over a moment of the forward."""

    def moment_bytes(self, fate: Fate, pieces: list[Piece], decision: Decision) -> float:
        own, position = decision.region_class, decision.group.index
        region = own.members[-1].index
        total = 0.0
        for piece in pieces:
            members = piece.owner.region_class.members
            num = sum(member.index < region for member in members)
            here = piece.owner.region_class is own
            made = sum((num + (here and first <= position)) * size for first, size in piece.made.items())
            total += made / len(members)
        for stored in self._passing(decision):
            staying = fate.kept[stored] - fate.leaves.get(stored, 0)
            total += self.sharding.size(stored) * (1 - staying / stored.source.decision.count)
        total += self.sharding.in_flight_bytes(fate, decision)
        return total + self._asked_bytes(decision) + self._copies_bytes(decision)

    @of_the_sharding
    def _asked_bytes(self, decision: Decision) -> float:
        """Return the most that the group holds while what it reads is brought to other layouts, one after the other, or runs."""
        costs, most = self.costs, 0.0
        for member in (0, decision.count - 1):
            made = 0.0
            for use in sorted(self.sharding.read_by(decision), key=lambda use: _first_read(use, decision)):
                native = self.sharding.native(use)
                own = [w for w in self.wants[use] if (use.source, w) not in self.shared and w[0] != native]
                if own and member in use.members:
                    most = max(most, made + sum(costs.change_bytes(use.source.tensor, native, w[0]) for w in own))
                    made += sum(costs.copy_bytes(use.source.tensor, native, w[0]) for w in own)
            most = max(most, made + decision.workspace_bytes[self.options[decision]])
        return most

    @of_the_sharding
    def _passing(self, decision: Decision) -> set[Stored]:
        """Return what is made by the group or before it and still to be read in the forward, or to be summed for the caller."""
        own, position = decision.region_class, decision.group.index
        found = set()
        for stored in self.problem.stored:
            maker = stored.source.decision
            made = maker.group.index if maker.region_class is own else math.inf
            if made == position or (made < position and (stored.boundary or stored.held)):
                found.add(stored)
            for use in stored.uses:
                here = use.region_class is own and any(demand.position >= position for demand in use.demands)
                if here and (not use.inside or made <= position):
                    found.add(stored)
        return found

    @of_the_sharding
    def _copies_bytes(self, decision: Decision) -> float:
        """Return the bytes that shared copies hold while the group runs forward, in any instance."""
        costs, total = self.costs, 0.0
        for source, want in self.shared:
            native, readings = self.sharding.native(self.sharding.uses_of(source)[0]), self.sharding.readings(source)
            places = [(member.index, decision.group.index) for member in decision.region_class.members]
            if min(readings) in places:
                total += costs.change_bytes(source.tensor, native, want[0])
            elif native != want[0] and any(min(readings) < place <= max(readings) for place in places):
                total += costs.block_bytes(source.tensor, want[0])
        return total


def _first_read(use: Use, decision: Decision) -> tuple[float, int]:
    return min((demand.until, demand.place) for demand in use.demands if demand.decision is decision)
