"""Adds up the memory that is held while a region reruns its groups, before its backward."""

from __future__ import annotations

from collections.abc import Iterator

from tests.planner_oracle.fates import Fate
from tests.planner_oracle.pieces import Piece
from tests.planner_oracle.sharding import Part, before, of_the_sharding
from trainwright.planner.model.sharding import has_one_want
from trainwright.planner.problem.problem import Decision, Use, Want


class Reruns(Part):
    """Sums over a moment of the reruns."""

    def held(self, fate: Fate, of_class: list[Decision], is_last: bool) -> Iterator[tuple[float, float, Use | None]]:
        """Yield (moment of a rerun, bytes that it holds for a moment, what it converts).

        The first of several instances is rerun if any is. Of it a tensor that is converted counts too if nothing keeps it.
        """
        for other in of_class:
            sizes = other.remade_bytes if is_last else other.rerun_bytes
            num = fate.reruns.get(other, 0)
            share = num / other.count if is_last else min(1, num)
            if share or is_last:
                yield other.group.index, share * sizes[self.options[other]], None
        held: dict[Use, float] = {}
        for (use, want), num in fate.converts.items():
            is_here = use.region_class is of_class[-1].region_class and (is_last or 0 in use.members)
            if is_here:
                share = num / use.count if is_last or not has_one_want(use) else min(1, num)
                held[use] = held.get(use, 0.0) + share * self._converted_bytes(use, want, is_last)
        for use, size in held.items():
            if size or is_last:
                yield before(min(demand.until for demand in use.demands), 2), size, use

    @of_the_sharding
    def _converted_bytes(self, use: Use, want: Want, is_last: bool) -> float:
        stored = self.sharding.stored_of.get(use)
        size = self.costs.change_bytes(use.source.tensor, self.sharding.native(use), want[0])
        is_kept = is_last or stored is None or not use.inside or stored.own_saved or stored.boundary or stored.held
        return size if is_kept else size + self.sharding.size_of(use)

    def beside(self, _: Fate, pieces: list[Piece], decision: Decision, moment: float, use: Use | None) -> float:
        """Return what the last instance has beside a rerun, less what the last group's backward begins with."""
        own = [piece for piece in pieces if piece.owner.region_class is decision.region_class and not piece.passed_on]
        position, count = decision.group.index, decision.count
        return sum(piece.beside(moment, position, count, piece.owner is use) for piece in own)

    def not_yet_made(
        self, fate: Fate, pieces: list[Piece], decision: Decision, moment: float, use: Use | None
    ) -> float:
        """Return the negative bytes of what the first instance makes again at a moment of its reruns, or later."""
        if use is not None and not has_one_want(use):
            return 0.0
        total, position = 0.0, decision.group.index
        for piece in pieces:
            is_own = piece.owner.region_class is decision.region_class and not piece.passed_on and 0 in piece.members
            if is_own and piece.last <= position and (moment <= piece.made_at or piece.owner is use):
                again = self._num_again(fate, piece.owner)
                total -= piece.own_bytes(0, position, decision.count) if again else 0.0
        return total

    def _num_again(self, fate: Fate, owner: Decision | Use) -> float:
        if isinstance(owner, Decision):
            return fate.reruns.get(owner, 0)
        return sum(num for (use, _), num in fate.converts.items() if use is owner)
