"""The memory rows of the forward, one for each group, and what changes of layout hold while they are made.

A row is that of the last instance of a class, when most is kept. It adds up

    kept        what the regions before this one, and the groups before this one in the region, keep for the backward
    passing     results that the forward still reads and nothing keeps for the backward
    a moment's  the largest of these: for each copy that the group asks for, Σ f[u, n, w] · (the most that the change from n to w
                holds, its result included) with the copies made before it; all copies, with the scratch memory of its kernels
    shared      copies of parameters that one region before and one behind read (`tied`)

The backward brings gradients back by the same changes of layout, one after the other, while those already brought back wait.
`Changes` has the terms of both directions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ...program.blocks import RegionClass
from ...program.transition import gradient_layout
from ..problem.problem import Decision, Problem, Stored, Use
from .bucket_memory import BucketMemory
from .milp import MIB, Model, Terms
from .recompute import Recompute
from .sharding import Sharding, has_one_want
from .tied import SharedCopies
from .working_set import gathered_first

CHANGING = "what a change of layout holds"


class Changes:
    """The memory of each use's changes of layout, there and back, as columns in MiB."""

    def __init__(self, model: Model, problem: Problem, sharding: Sharding, buckets: BucketMemory) -> None:
        self.model, self.sharding, self.buckets = model, sharding, buckets
        costs = problem.costs
        self.shared = SharedCopies(model, problem, sharding)
        there: dict[Use, list[tuple[int, float]]] = defaultdict(list)
        copies: dict[Use, list[tuple[int, float]]] = defaultdict(list)
        back: dict[Use, list[tuple[int, float]]] = defaultdict(list)
        brought: dict[Use, list[tuple[int, float]]] = defaultdict(list)
        for (use, native, want), column in sharding.flow.items():
            tensor, due = use.source.tensor, gradient_layout(native)
            if native != want[0]:
                there[use].append((column, costs.change_bytes(tensor, native, want[0]) / MIB))
                copies[use].append((column, costs.copy_bytes(tensor, native, want[0]) / MIB))
            if use.tensor.requires_grad:
                own = 0 if self._shares(use) else costs.block_bytes(tensor, want[1])
                if buckets.carries(column):  # it goes into the buffer
                    brought[use].append((column, -own / MIB))
                else:
                    back[use].append((column, costs.change_bytes(tensor, want[1], due) / MIB))
                    more = costs.copy_bytes(tensor, want[1], due) - own if want[1] != due else 0
                    brought[use].append((column, more / MIB))
        self._there, self._copies = there, copies
        self._back, self._brought = back, brought
        self._by_reader: dict[Decision, list[Use]] = defaultdict(list)
        for use in problem.uses:
            for demand in use.demands:
                self._by_reader[demand.decision].append(use)

    def read_by(self, decision: Decision) -> list[Use]:
        """Return the uses that `decision` reads."""
        return self._by_reader[decision]

    def forward(self, decision: Decision) -> Terms:
        """Return the most that a group holds in the forward: while the copies that it asks for are made, and while it runs."""
        assert decision.region_class is not None
        moments: dict[tuple[Use | None, ...], Terms] = {}
        uses = sorted(self.read_by(decision), key=lambda use: self._when_made(use, decision))
        for member in sorted({0, decision.region_class.multiplicity - 1}):
            made: list[Use] = []
            for use in uses:
                if member in use.members and use in self._there:
                    moments[*made, use] = [*self._there[use], *self._all_copies(made)]
                    made.append(use)
            choices = self.sharding.choice[decision]
            running = _positive([(column, size / MIB) for column, size in zip(choices, decision.workspace_bytes)])
            moments[*made, None] = [*self._all_copies(made), *running]
        return self.model.largest(CHANGING, moments.values())

    def _when_made(self, use: Use, decision: Decision) -> tuple[float, int]:
        """Return what orders the copies that a group reads as they are made: in buckets first, then op by op."""
        if gathered_first(use, self.sharding):
            return -math.inf, 0
        return min((demand.until, demand.place) for demand in use.demands if demand.decision is decision)

    def _all_copies(self, uses: Sequence[Use]) -> Terms:
        return [term for use in uses for term in self._copies[use]]

    def backward(self, decision: Decision, place: int) -> Terms:
        """Return what bringing back the gradients that a group's op completes holds beyond those: one after the other.

        place: that of the op in the group. The last operand's comes first, and stays while the others follow.
        """
        assert decision.region_class is not None
        moments: dict[tuple[Use, ...], Terms] = {}
        for member in sorted({0, decision.region_class.multiplicity - 1}):
            uses = [use for use in self._completed(decision, place) if member in use.members]
            for at, use in enumerate(uses):
                later = [other for other in uses[at + 1 :] if other.demands[0].decision is decision]
                if changing := _positive(self._back[use]):
                    stays = [term for other in later for term in self._stays(other)]
                    moments[use, *later] = [*changing, *stays]
        shared = self.shared.back(decision) if place == decision.backwards[-1].place else []
        return self.model.largest(CHANGING, [*moments.values(), *map(_positive, shared)])

    def brought(self, decision: Decision, place: int) -> Terms:
        """Return what the gradients that ops of a group behind the one at `place` brought back hold beyond what those made."""
        assert decision.region_class is not None
        ends = {0, decision.region_class.multiplicity - 1}
        terms: Terms = []
        for use in self.read_by(decision):
            first = use.demands[0]
            if first.decision is decision and first.place > place:
                terms += self._stays(use) if ends <= {*use.members} else _positive(self._brought[use])
        return terms

    def _stays(self, use: Use) -> Terms:
        """Return what a gradient holds once it is brought back, beyond what was made of it: less, if it all comes at once."""
        return self._brought[use] if has_one_want(use) else _positive(self._brought[use])

    def _completed(self, decision: Decision, place: int) -> list[Use]:
        """Return the uses whose gradients no other group, and no other op of this one, adds to once the op at `place` has run."""
        return [
            use
            for use in self.read_by(decision)
            for demand in use.demands
            if demand.decision is decision and demand.place == place
            if demand is use.demands[0] or not has_one_want(use)
        ]

    def _shares(self, use: Use) -> bool:
        """Tell whether the gradient lies in memory that stays when it has been brought back."""
        first = use.demands[0]
        ops = [op for op in first.decision.backwards if op.place == first.place]
        return any(use.tensor in op.shares for op in ops)


class ForwardMemory:
    """The left sides of the forward's rows."""

    def __init__(
        self, model: Model, problem: Problem, sharding: Sharding, recompute: Recompute, changes: Changes
    ) -> None:
        self.model, self.problem, self.sharding, self.recompute = model, problem, sharding, recompute
        self.changes = changes
        self.kept = self._kept()
        self.passing = {
            stored: self._passing(stored)
            for stored in problem.stored
            if not all(map(stored.is_result, sharding.yields(stored.source)))
        }

    def rows(self) -> Iterator[tuple[Decision, Terms]]:
        """Yield each group with what is alive while the last instance of it runs forward."""
        for region_class in self.problem.program.classes:
            region = region_class.members[-1].index
            own = [
                (column, 1 / region_class.multiplicity)
                for (owner, _), column in self.kept.items()
                if owner is region_class
            ]
            for decision in self.problem.of_class(region_class):
                assert decision.group is not None
                position = decision.group.index
                terms = self._kept_terms(region_class, region, position)
                alive = self._alive(region_class, position)
                terms += [(column, 1.0) for stored in alive if (column := self.passing.get(stored)) is not None]
                terms += self.changes.forward(decision) + self.changes.shared.forward(region_class, position)
                terms += self.changes.buckets.forward(region_class, position, own)
                terms += self.recompute.on_the_way(region_class)
                yield decision, terms
        yield from self._results()

    def _results(self) -> Iterator[tuple[Decision, Terms]]:
        """Yield each group of which the caller is given sums, with what is alive while one is made, after the forward."""
        last = self.problem.program.regions[-1]
        ends = self._kept_terms(last.region_class, last.index, math.inf)
        ends += [(column, 1.0) for stored, column in self.passing.items() if stored.held]
        for decision in self.problem.groups:
            if any(decision.summing_bytes):
                yield decision, ends + self.sharding.chosen_mib(decision, decision.summing_bytes)

    def _kept_terms(self, region_class: RegionClass, region: int, position: float) -> Terms:
        terms: Terms = []
        for (owner, first), column in self.kept.items():
            num = sum(other.index < region for other in owner.members) + (owner is region_class and first <= position)
            if num:
                terms.append((column, num / owner.multiplicity))
        return terms

    def _kept(self) -> dict[tuple[RegionClass, int], int]:
        """MiB kept by all instances of a class, by the position from which on it is there."""
        costs = self.problem.costs
        table: dict[tuple[RegionClass, int], list[tuple[int, float]]] = defaultdict(list)
        for (stored, native), column in self.recompute.keep.items():
            key = _place(stored.source.decision)
            size = costs.block_bytes(stored.source.tensor, native) / MIB
            table[key].append((self.recompute.stays(column), size))
        for (decision, option), column in self.recompute.keep_inner.items():
            table[_place(decision)].append((self.recompute.stays(column), decision.inner_bytes[option] / MIB))
        for use, want in self.recompute.keep_copy:
            made = min(d.position for d in use.demands if any(want in wants for wants in d.wants))
            table[use.region_class, made + 1] += self.recompute.kept_copies(use, want)
        return {key: self._column(terms) for key, terms in table.items()}

    def _passing(self, stored: Stored) -> int:
        """Return the column of the MiB that an output takes in one instance, less the share that is kept."""
        source = stored.source
        count, terms = source.decision.count, []
        for native, chosen in self.sharding.yields(source).items():
            size = self.problem.costs.block_bytes(source.tensor, native) / MIB
            terms += [(column, size) for column in chosen]
            terms.append((self.recompute.stays(self.recompute.keep[stored, native]), -size / count))
        return self._column(terms)

    def _alive(self, region_class: RegionClass, position: int) -> list[Stored]:
        """Return the outputs that this group or an earlier one makes and that this group or a later one reads."""
        found: dict[Stored, None] = {}
        for use in self.problem.uses:
            stored = self.problem.stored_of.get(use)
            if stored is not None and use.region_class is region_class:
                made = _place(stored.source.decision)[1] if use.inside else -1
                if made <= position and any(demand.position >= position for demand in use.demands):
                    found[stored] = None
        for stored in self.problem.stored:
            owner, made = _place(stored.source.decision)
            if owner is region_class and (made == position or (made < position and (stored.boundary or stored.held))):
                found[stored] = None
        return list(found)

    def _column(self, terms: Terms) -> int:
        column = self.model.column()
        self.model.row("sums of bytes", [*terms, (column, -1.0)], 0.0, 0.0)
        return column


def _place(decision: Decision) -> tuple[RegionClass, int]:
    assert decision.region_class is not None
    assert decision.group is not None
    return decision.region_class, decision.group.index


def _positive(terms: Terms) -> list[tuple[int, float]]:
    return [(column, size) for column, size in terms if size > 0]
