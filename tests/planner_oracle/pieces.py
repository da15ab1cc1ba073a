"""Lists the memory that is kept for the backward: by which instances, between which groups, how much of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tests.planner_oracle.fates import Fate
from tests.planner_oracle.sharding import Part, before, moment_of, of_the_sharding
from trainwright.planner.problem.problem import Decision, Stored, Use, Want, readers_end


@dataclass(frozen=True)
class Piece:
    """Memory that may be kept: its instances, the groups between which it is there, its bytes, and one instance's need."""

    owner: Decision | Use
    members: Collection[int]
    made: Mapping[int, float]
    """From which group on how many bytes are there."""
    last: int
    needed_bytes: float
    passed_on: bool = False
    first: int = -1
    """The group whose backward is the first to need it."""
    away_bytes: float = 0.0
    """Of one instance's need, what comes back only then."""
    made_at: float = 0.0
    """The moment of the region's reruns at which it is made: that of group i is i, what is converted for it comes before."""
    read_until: float = 0.0
    """The last moment before whose end it is still to be read."""
    again_bytes: float = 0.0
    """What is made again, of one instance."""
    freed_by: tuple[Decision, int] | None = None
    """The group, and the op in it, whose backward is the last to need it."""

    @property
    def kept_bytes(self) -> float:
        return sum(self.made.values())

    def own_bytes(self, member: int, position: int, count: int) -> float:
        """Return what the instances of the class hold while `member` runs the backward of the group at `position`."""
        is_last, is_done = member == count - 1, self.last > position
        needed = max(0.0, self.needed_bytes - (self.away_bytes if self.first < position else 0.0))
        if member not in self.members:
            return self.kept_bytes if is_last else 0.0
        if is_last:
            return max(self.kept_bytes, needed) - (self.needed_bytes if is_done else 0.0)
        return 0.0 if is_done else needed

    def beside(self, moment: float, position: int, count: int, is_result: bool) -> float:
        """Return what the last instance has at a moment of its reruns, less what it has where the group at `position` begins."""
        if moment > self.read_until:
            return 0.0
        found = 0.0 if moment <= self.made_at or is_result else self.again_bytes
        if count - 1 in self.members and self.last <= position:
            found += self.kept_bytes - self.own_bytes(count - 1, position, count)
            found += 0.0 if self.first < position else self.away_bytes
        return found


class Pieces(Part):
    """Lists all that a fate keeps."""

    def of(self, fate: Fate) -> Iterator[Piece]:
        """Yield all that is kept, and what a backward waits for."""
        for stored, count in fate.kept.items():
            decision = stored.source.decision
            last = -1 if stored.is_result(self.sharding.native_of(stored)) else stored.position
            away = self.sharding.size(stored) * fate.leaves.get(stored, 0)
            made = {decision.group.index: self.sharding.size(stored) * count - away}
            needed, passed_on = self._present_bytes(stored), self.sharding.is_passed_on(stored)
            if decision.count == 1:
                # What is only derived from is released too; of several, others may still need theirs.
                needed = max(needed, *made.values())
            first = self._first_reader(stored)
            members = range(decision.count)
            again = self.sharding.size(stored) * fate.reruns.get(decision, 0) / decision.count
            yield Piece(
                decision, members, made, last, needed, passed_on, first, away / decision.count,
                *self._when_remade(stored), again, stored.freed_by,
            )  # fmt: skip
        for decision in self.problem.groups:
            inner = decision.inner_bytes[self.options[decision]]
            if inner:
                here, away = decision.group.index, fate.leaves.get(decision, 0)
                num = decision.count - fate.reruns.get(decision, 0) - away
                members = range(decision.count)
                moments = [decision.inner_until, *(moment_of(decision, tensor) for tensor in decision.inner_tensors)]
                share, when = inner * away / len(members), before(min(moments), 1)
                yield Piece(decision, members, {here: inner * num}, here, inner, False, here, share, when, when)
        for use in dict.fromkeys(use for use, _ in self.sharding.changed):
            yield self._copies(fate, use)

    def _copies(self, fate: Fate, use: Use) -> Piece:
        converted = self._converted(use)
        made: dict[int, float] = {}
        away = 0.0
        for want, (size, first) in converted.items():
            leaving = fate.leaves.get((use, want), 0)
            made[first] = made.get(first, 0.0) + size * (fate.copies.get((use, want), 0) - leaving)
            away += size * leaving / use.count
        readers = [d.position for d in use.demands if any(d.saves)] or [0]
        needed = sum(size for want, (size, _) in converted.items() if is_saved(use, want))
        again = sum(size * fate.converts.get((use, want), 0) / use.count for want, (size, _) in converted.items())
        when = before(min(d.until for d in use.demands), 3), max(d.position for d in use.demands) - 0.5
        end = readers_end([d for d in use.demands if any(d.saves)] or use.demands)
        return Piece(use, use.members, made, min(readers), needed, False, max(readers), away, *when, again, end)

    @of_the_sharding
    def _when_remade(self, stored: Stored) -> tuple[float, float]:
        """Return the moment of the reruns that makes an output again, and until when it is still to be read."""
        own = moment_of(stored.source.decision, stored.source.tensor)
        readers = [demand.position for use in stored.uses if use.inside for demand in use.demands]
        return own, max([own, *(position - 0.5 for position in readers)])

    @of_the_sharding
    def _converted(self, use: Use) -> dict[Want, tuple[int, int]]:
        """Return each want that asks for another layout, with the size of a copy and from which group on it is there."""
        return {
            want: (
                self.costs.block_bytes(use.source.tensor, want[0]),
                min(d.position for d in use.demands if any(want in found for found in d.wants)) + 1,
            )
            for other, want in self.sharding.changed
            if other is use
        }

    @of_the_sharding
    def _first_reader(self, stored: Stored) -> int:
        inside = [d.position for use in stored.uses if use.inside for d in use.demands if any(d.saves)]
        own = [stored.source.decision.group.index] if stored.own_saved else []
        return max([*inside, *own], default=stored.position)

    @of_the_sharding
    def _present_bytes(self, stored: Stored) -> int:
        """Return the bytes of one instance, where the backward needs it as it was made."""
        needed = self.sharding.size(stored) if stored.own_saved else 0
        for use in stored.uses:
            native = self.sharding.native(use)
            if any(want[0] == native and is_saved(use, want) for want in self.wants[use]):
                needed = max(needed, self.sharding.size_of(use))
        return needed


def is_saved(use: Use, want: Want) -> bool:
    """Return whether a group saves what a use reads as it is wanted."""
    return any(want in saves for demand in use.demands for saves in demand.saves)
