"""Adds up what gradients hold beside the op of the backward that makes or reads them."""

from __future__ import annotations

from collections.abc import Iterator

from tests.planner_oracle.sharding import Part, of_the_sharding
from trainwright.planner.model.sharding import has_one_want
from trainwright.planner.problem.problem import Decision, Source, Use
from trainwright.program.transition import gradient_layout


class Gradients(Part):
    """Gradients that change layout, and those that a sum hands to two terms in one memory."""

    @of_the_sharding
    def brought_back_bytes(self, decision: Decision, place: int) -> int:
        """Return the most that bringing back a gradient holds, of those that the group's op at `place` completes."""
        most = 0
        for member in (0, decision.count - 1):
            waiting = 0
            for use in reversed([use for use in self._brought_by(decision, place) if member in use.members]):
                if back := self._back_bytes(use):
                    most = max(most, back + waiting)
                if use.demands[0].decision is decision:
                    waiting += sum(more if has_one_want(use) else max(0, more) for more in self._brought_bytes(use))
        for source, want in self.shared if place == decision.backwards[-1].place else ():
            first = min(self.sharding.readings(source))
            here = any(first == (member.index, decision.group.index) for member in decision.region_class.members)
            if here and source.tensor.requires_grad:
                due = gradient_layout(self.sharding.native(self.sharding.uses_of(source)[0]))
                most = max(most, self.costs.change_bytes(source.tensor, want[1], due))
        return most

    def _brought_by(self, decision: Decision, place: int) -> list[Use]:
        """Return what the group reads of which no op of a later group, or before `place` in it, still gives a part."""
        found = []
        for use in self.sharding.read_by(decision):
            [own] = [demand for demand in use.demands if demand.decision is decision]
            if own.place == place and (own is use.demands[0] or not has_one_want(use)):
                found.append(use)
        return found

    @of_the_sharding
    def brought_before(self, decision: Decision, place: int) -> int:
        """Return what gradients that ops behind `place` made hold more since they were brought back."""
        total, ends = 0, {0, decision.count - 1}
        for use in self.sharding.read_by(decision):
            [own] = [demand for demand in use.demands if demand.decision is decision]
            if own.place > place and own is use.demands[0]:
                is_known = has_one_want(use) and ends <= {*use.members}
                total += sum(more if is_known else max(0, more) for more in self._brought_bytes(use))
        return total

    def _brought_bytes(self, use: Use) -> Iterator[int]:
        """Yield, for each want, the bytes that a gradient takes, once brought back, beyond those that the backward made of it."""
        due, costs, first = gradient_layout(self.sharding.native(use)), self.costs, use.demands[0]
        stays = any(use.tensor in op.shares for op in first.decision.backwards if op.place == first.place)
        for want in self.wants[use] if use.tensor.requires_grad else ():
            if want[1] != due and (use.source, want) not in self.shared:
                own = 0 if stays else costs.block_bytes(use.source.tensor, want[1])
                yield costs.copy_bytes(use.source.tensor, want[1], due) - own

    def _back_bytes(self, use: Use) -> int:
        if not use.tensor.requires_grad:
            return 0
        due = gradient_layout(self.sharding.native(use))
        own = [want for want in self.wants[use] if (use.source, want) not in self.shared]
        return sum(self.costs.change_bytes(use.source.tensor, want[1], due) for want in own)

    @of_the_sharding
    def given_too(self, decision: Decision, place: int) -> float:
        """Return what the group is given that waits for another one in the same memory, handed to both by a sum."""
        sources = [
            source for source in dict.fromkeys(use.source for use in self._gradients()) if source.decision is decision
        ]
        if len(sources) != 1 or sources[0].tensor not in decision.group.ops[place].outputs:
            return 0.0
        uses: list[Use] = []
        for member in (decision.region_class.members[0], decision.region_class.members[-1]):
            own = self._reads(sources[0], member.index)
            if len(own) != 1:
                return 0.0
            here, (at, use) = (member.index, decision.group.index), own[0]
            reader = next(demand.decision for demand in use.demands if demand.position == at[1])
            shares = next((op.shares for op in reader.backwards if use.tensor in op.shares), frozenset())
            others = [
                reads[-1][1]
                for other in self._gradients()
                for made, _ in other.reaches()
                if (made, other.source.decision.group.index) < here and other.tensor in shares - {use.tensor}
                if (reads := self._reads(other.source, made))[-1][0] == at
                and all(seen <= here for seen, _ in reads[:-1])
            ]
            if not others:
                return 0.0
            uses += [use, others[0]]
        if not all(map(has_one_want, uses)):
            return 0.0
        kept = [all(want[1] == gradient_layout(self.sharding.native(use)) for want in self.wants[use]) for use in uses]
        return min(self.sharding.size_of(use) * is_kept for use, is_kept in zip(uses, kept))

    def _gradients(self) -> list[Use]:
        return [use for use in self.problem.uses if not use.source.is_param and use.tensor.requires_grad]

    def _reads(self, source: Source, made: int) -> list[tuple[tuple[int, int], Use]]:
        """Return where the instance of a tensor that a region made is read, in order, and by which use."""
        found = [
            ((region, demand.position), use)
            for use in self._gradients()
            for by, region in use.reaches()
            if use.source is source and by == made
            for demand in use.demands
        ]
        return sorted(found, key=lambda read: read[0])
