"""Adds up the memory that is held while a group runs backward."""

from __future__ import annotations

from collections.abc import Iterator

from tests.planner_oracle.fates import Fate
from tests.planner_oracle.gradients import Gradients
from tests.planner_oracle.pieces import Piece
from tests.planner_oracle.reruns import Reruns
from tests.planner_oracle.sharding import Part, Sharding, of_the_sharding
from trainwright.planner.problem.problem import Decision, Stored, Use


class Backward(Part):
    """Sums over a moment of the backward."""

    def __init__(self, sharding: Sharding) -> None:
        super().__init__(sharding)
        self.gradients, self.reruns = Gradients(sharding), Reruns(sharding)

    def moment_bytes(self, fate: Fate, pieces: list[Piece], decision: Decision, member: int) -> float:
        position, own = decision.group.index, decision.region_class
        region = own.members[member].index
        total = self._momentary_bytes(fate, pieces, decision, member) + self.sharding.sums_bytes()
        for piece in pieces:
            if piece.owner.region_class is own and not piece.passed_on:
                total += piece.own_bytes(member, position, own.multiplicity)
            else:
                members = piece.owner.region_class.members
                num = sum(other.index <= region for other in members)
                num -= piece.owner.region_class is own and piece.last > position
                num = len(members) if piece.last < 0 else num
                total += piece.kept_bytes * num / len(members)
        total += self.sharding.in_flight_bytes(fate, decision) + self._back_again_bytes(fate, decision, region)
        total += sum(self.sharding.size_of(use) for use in self._waiting(decision))
        total += self._summed_bytes(region, position)
        loss = self.problem.program.loss
        if not any(loss in op.outputs for op in decision.group.ops):
            total += loss.dtype.itemsize  # the gradient at which the backward begins
        return total + self._grads_in(region, position)

    def _momentary_bytes(self, fate: Fate, pieces: list[Piece], decision: Decision, member: int) -> float:
        """Return the most that kernels, changes of their gradients' layouts, or the reruns before them hold."""
        option = self.options[decision]
        moments = [0.0]
        for op in decision.backwards:
            before = self.gradients.brought_before(decision, op.place)
            kernels = before - self.gradients.given_too(decision, op.place)
            kernels -= self._released_bytes(pieces, decision, op.place + 1)
            moments.append(op.running_bytes[option] + kernels)
            read = [piece for piece in self._read_last(pieces, decision) if piece.freed_by[1] == op.place]
            rerun = [max(0.0, piece.needed_bytes - piece.kept_bytes) for piece in read]
            moments.append(op.ending_bytes[option] + kernels - (sum(rerun) if decision.count == 1 else 0.0))
            if brought_back := self.gradients.brought_back_bytes(decision, op.place):
                released = self._released_bytes(pieces, decision, op.place)
                moments.append(op.made_bytes[option] + before + brought_back - released)
        of_class = [other for other in self.problem.groups if other.region_class is decision.region_class]
        if decision is of_class[-1]:
            is_last = member == decision.count - 1
            for moment, held, use in self.reruns.held(fate, of_class, is_last):
                beside = self.reruns.beside if is_last else self.reruns.not_yet_made
                moments.append(decision.given_bytes[option] + held + beside(fate, pieces, decision, moment, use))
        return float(max(moments))

    @of_the_sharding
    def _grads_in(self, region: int, position: int) -> float:
        """Return the bytes of the parameters' gradients that are there already."""
        total = 0.0
        for param in self.problem.params:
            if param.tied[0].requires_grad:
                readers = [use for use in self.problem.uses if use.source.decision is param]
                places = [
                    (use.region_class.members[index].index, max(demand.position for demand in use.demands))
                    for use in readers
                    for index in use.members
                ]
                num = min(param.count, sum(place > (region, position) for place in places))
                total += num * param.rest_bytes[self.options[param]]
        return total

    def _released_bytes(self, pieces: list[Piece], decision: Decision, place: int) -> float:
        """Return the bytes that a group saved and has released once its ops from `place` on have run backward."""
        option = self.options[decision]
        total = sum(sizes[option] for at, sizes in decision.inner_freed.items() if at >= place)
        read = self._read_last(pieces, decision)
        return total + sum(piece.needed_bytes for piece in read if piece.freed_by[1] >= place)

    def _read_last(self, pieces: list[Piece], decision: Decision) -> list[Piece]:
        """Return the pieces of all instances that the group's backward is the last to read."""
        ends = {0, decision.region_class.multiplicity - 1}
        return [
            piece
            for piece in pieces
            if piece.owner.region_class is decision.region_class and not piece.passed_on and piece.freed_by is not None
            if piece.freed_by[0] is decision and ends <= {*piece.members}
        ]

    def _back_again_bytes(self, fate: Fate, decision: Decision, region: int) -> float:
        """Return the offloaded bytes that other regions read and that this region's backward has fetched."""
        total = 0.0
        for stored, num in fate.leaves.items():
            if not isinstance(stored, Stored) or not stored.boundary:
                continue
            maker = stored.source.decision
            for member in maker.region_class.members:
                needing = [member.index] if stored.own_saved else []
                needing += [
                    reader for use in stored.uses for made, reader in self._made_and_read(use) if made == member.index
                ]
                released = member.index == region and stored.position > decision.group.index
                there = min(needing, default=member.index) <= region <= max(needing, default=member.index)
                if member.index <= region and there and not released:
                    total += self.sharding.size(stored) * num / maker.count
        return total

    def _made_and_read(self, use: Use) -> Iterator[tuple[int, int]]:
        """Yield the region that made the tensor, and the region that reads it, for each reading region."""
        for place in use.members:
            reader = use.region_class.members[place]
            found = dict(zip(use.region_class.representative.externals, reader.externals)).get(use.tensor)
            yield (reader.index if use.inside else found.producer.region.index), reader.index

    @of_the_sharding
    def _waiting(self, decision: Decision) -> list[Use]:
        """Return the uses whose tensor has part of its gradient and waits for the rest, each tensor once."""
        found: dict[object, Use] = {}
        for use in self.problem.uses:
            if use.region_class is decision.region_class and not use.source.is_param and use.tensor.requires_grad:
                made = use.source.decision.group.index if use.inside else -1
                later = any(demand.position > decision.group.index for demand in use.demands)
                if made < decision.group.index and later:
                    found.setdefault(use.tensor, use)
        return list(found.values())

    @of_the_sharding
    def _summed_bytes(self, region: int, position: int) -> float:
        """Return the bytes that sums waiting for another reader take beyond the gradients at rest."""
        costs, total = self.costs, 0.0
        for source, want in self.shared:
            readings, rest = self.sharding.readings(source), self.sharding.native(self.sharding.uses_of(source)[0])
            if source.tensor.requires_grad and min(readings) <= (region, position) < max(readings):
                total += costs.block_bytes(source.tensor, want[1]) - costs.block_bytes(source.tensor, rest)
        return total
