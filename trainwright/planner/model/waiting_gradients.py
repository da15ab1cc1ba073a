"""Gradients of activations that wait for other readers' parts, or for the backward of the op that made the tensor.

    at rest          Σ bytes · x                       from the backward of the tensor's last reader up to that of its producer
    padding          Σ f · padding                     beyond that, of a gradient that was gathered and has one reader
                     D ≥ Σ f · padding − most · Σ {f that change its layout}     of one that a sum hands on as it was given
    handed to two    −B,  B ≤ Σ {f that do not change its layout} · bytes        of one that waits, and is given to a backward too
    at a copy        Z ≥ Σ_n f[n, w] · (bytes of w's gradient − bytes at rest) − most · Σ {x of readers that do not want w}

Readers that share one copy (q, k and v of the same input) add up their gradients in the copy's layout, often whole, and the sum
alone is brought back to the layout of the tensor: Z is what it holds more, from the backward of the first of these readers to
that of the last. Readers of different copies bring back each part by itself, so no part waits at a copy. The backward of a sum
gives all its terms the same memory, so where one term waits while the other's backward begins, B takes it off once, unless
either changes its layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ...program.program import Op
from ...program.transition import gradient_layout
from ..problem.group_backward import runs_before
from ..problem.problem import Decision, Problem, Source, Use, Want
from .milp import MIB, Model, Terms
from .sharding import Sharding, has_one_want, ones, wants_of
from .tied import RegionGroup

HANDED_ON = "a gradient that was gathered is handed on"
AT_A_COPY = "gradients of one copy's readers add up there"
HANDED_TO_TWO = "a gradient that a sum hands to two terms"


class WaitingGradients:
    """The terms of the memory rows."""

    def __init__(self, model: Model, problem: Problem, sharding: Sharding) -> None:
        self.model, self.problem, self.sharding = model, problem, sharding
        self.uses = [use for use in problem.uses if not use.source.is_param and use.tensor.requires_grad]
        self.reads = _reads(self.uses)
        self.flows: dict[Use, list[tuple[tuple[int, ...], Want, int]]] = defaultdict(list)
        for (use, native, want), column in sharding.flow.items():
            self.flows[use].append((native, want, column))
        self.padding = {use: self._padding(use) for use in self.uses}
        """What a gradient holds more because it was gathered."""
        self._handed_on: dict[tuple[Source, Use], int] = {}
        self._columns: dict[tuple[Use, bool], int] = {}
        self._both: dict[tuple[Use, ...], int] = {}

    def of_outputs(self, decision: Decision) -> Terms:
        """Return what the gradients at which a group's backward begins hold more because they were gathered."""
        return [term for use, terms in self.padding.items() if use.source.decision is decision for term in terms]

    def terms(self, region: int, position: float, decision: Decision, late: Op | None = None) -> Terms:
        """Return the terms of what waits while the backward of a group runs, beside the gradients of its own outputs.

        late: the op, where one runs after groups that stand behind its own: some of their ops may still be to come.
        """
        terms: Terms = []
        here = region, position
        for source, instances in self.reads.items():
            is_given = late is None or any(runs_before(reader, late) for reader in source.tensor.consumers)
            waits = [
                reads
                for made, reads in instances.items()
                if (made, _position(source)) < here < reads[-1][0]
                if made != region or (is_given and source.decision is not decision)
            ]
            if waits:
                sizes = [
                    len(waits) * self.problem.costs.block_bytes(source.tensor, native) for native in source.natives
                ]
                terms += self.sharding.chosen_mib(source.decision, sizes)
            for reads in waits:
                if len(reads) == 1:
                    terms += self.padding[reads[0][1]]
                if len(reads) == 1 or reads[-2][0] <= here:
                    terms += self._handed(source, *reads[-1])
        for use in self.uses:
            terms += self._at_copy(use, region, position)
        return terms

    def given_too(self, decision: Decision, place: int) -> Terms:
        """Return the (negative) terms of what waits, and is what a group's backward is given, until its op at `place` has run."""
        assert decision.group is not None
        assert decision.region_class is not None
        ends = (decision.region_class.members[0].index, decision.region_class.members[-1].index)
        given = [source for source in self.reads if source.decision is decision]
        if len(given) != 1 or given[0].tensor not in decision.group.ops[place].outputs:
            return []
        found = [self._read_with(given[0], region) for region in ends]
        uses = tuple(dict.fromkeys(use for pair in found for use in pair))
        return [(self._in_both(uses), -1.0)] if all(found) and all(map(has_one_want, uses)) else []

    def _read_with(self, source: Source, region: int) -> tuple[Use, ...]:
        """Return the only read of what a group makes, with that of another tensor to which its reader alone gives the same memory.

        Empty where there is none, or where another reader has given that tensor's gradient a part before the group runs backward.
        """
        own = self.reads[source].get(region, ())
        if len(own) != 1:
            return ()
        here, (place, use) = (region, _position(source)), own[0]
        reader = next(demand.decision for demand in use.demands if demand.position == place[1])
        shares = next((op.shares for op in reader.backwards if use.tensor in op.shares), frozenset())
        for other, instances in self.reads.items() if len(shares) > 1 else ():
            for made, reads in instances.items():
                is_alone = reads[-1][0] == place and (len(reads) == 1 or reads[-2][0] <= here)
                if is_alone and (made, _position(other)) < here and reads[-1][1].tensor in shares - {use.tensor}:
                    return use, reads[-1][1]
        return ()

    def _in_both(self, uses: tuple[Use, ...]) -> int:
        """Return the column of the MiB of a gradient that is handed to all of them: 0 where one is brought to another layout."""
        if uses not in self._both:
            self._both[uses] = column = self.model.column()
            for use in uses:
                same = [
                    (flow, -self.problem.costs.block_bytes(use.source.tensor, native) / MIB)
                    for native, want, flow in self.flows[use]
                    if want[1] == gradient_layout(native)
                ]
                self.model.row(HANDED_TO_TWO, [(column, 1.0), *same], upper=0.0)
        return self._both[uses]

    def _at_copy(self, use: Use, region: int, position: float) -> Terms:
        """Return the term of what readers of one copy in a region have added up, and the last of them still adds to."""
        positions = [demand.position for demand in use.demands]
        is_between = min(positions) <= position < max(positions)
        if not is_between or all(use.region_class.members[member].index != region for member in use.members):
            return []
        # what other regions gave is at rest; what these give is not there yet
        is_first = any(reads[-1][0] == (region, max(positions)) for reads in self.reads[use.source].values())
        return [(self._column(use, is_first), 1.0)]

    def _column(self, use: Use, is_first: bool) -> int:
        """Return the column of the MiB at a copy, less what is at rest where nobody else has given anything."""
        key = use, is_first
        if key not in self._columns:
            self._columns[key] = column = self.model.column()
            sizes = {(native, want): self._more_mib(use, native, want, is_first) for native, want, _ in self.flows[use]}
            for own in wants_of(use):
                most = max((size for (_, want), size in sizes.items() if want == own), default=0.0)
                if most > 0:
                    terms = [(flow, sizes[native, want]) for native, want, flow in self.flows[use] if want == own]
                    others = ones(self._not_wanting(use, own), -most)
                    self.model.row(AT_A_COPY, [*terms, *others, (column, -1.0)], upper=0.0)
        return self._columns[key]

    def _not_wanting(self, use: Use, want: Want) -> list[int]:
        """Return the columns of the readers' options that ask for another copy."""
        return [
            column
            for demand in use.demands
            for column, wants in zip(self.sharding.choice[demand.decision], demand.wants)
            if want not in wants
        ]

    def _more_mib(self, use: Use, native: tuple[int, ...], want: Want, is_first: bool) -> float:
        costs, tensor = self.problem.costs, use.source.tensor
        if want[1] == gradient_layout(native):
            return 0.0
        rest = costs.block_bytes(tensor, native) if is_first else 0
        return (costs.block_bytes(tensor, want[1]) - rest) / MIB

    def _padding(self, use: Use) -> Terms:
        costs, tensor = self.problem.costs, use.source.tensor
        terms: Terms = []
        for native, want, column in self.flows[use]:
            gradient = gradient_layout(native)
            more = costs.copy_bytes(tensor, want[1], gradient) - costs.block_bytes(tensor, gradient)
            if more > 0:
                terms.append((column, more / MIB))
        return terms

    def _handed(self, source: Source, place: RegionGroup, reader: Use) -> Terms:
        """Return the padding that a gradient has from the one that its last reader was given, where that hands it on."""
        last = next(demand.decision for demand in reader.demands if demand.position == place[1])
        if not any(reader.tensor in op.passes_on for op in last.backwards):
            return []
        terms: Terms = []
        for given, instances in self.reads.items():
            reads = instances.get(place[0], ()) if given.decision is last else ()
            if len(reads) == 1 and self.padding[reads[0][1]]:
                terms.append((self._handed_column(source, reader, reads[0][1]), 1.0))
        return terms

    def _handed_column(self, source: Source, reader: Use, given: Use) -> int:
        """Return the column of the padding that `given` has, unless what `reader` hands on is brought to another layout."""
        key = source, given
        if key not in self._handed_on:
            self._handed_on[key] = column = self.model.column()
            padding = self.padding[given]
            most = max(size for _, size in padding)
            changed = [flow for native, want, flow in self.flows[reader] if want[1] != gradient_layout(native)]
            self.model.row(HANDED_ON, [*padding, *ones(changed, -most), (column, -1.0)], upper=0.0)
        return self._handed_on[key]


def _reads(uses: Iterable[Use]) -> dict[Source, dict[int, list[tuple[RegionGroup, Use]]]]:
    """Return, by the region that made each instance of what a group makes, where it is read, in order, and by which use."""
    found: dict[Source, dict[int, list[tuple[RegionGroup, Use]]]] = defaultdict(lambda: defaultdict(list))
    for use in uses:
        for made, region in use.reaches():
            found[use.source][made] += [((region, demand.position), use) for demand in use.demands]
    for instances in found.values():
        for reads in instances.values():
            reads.sort(key=lambda read: read[0])
    return found


def _position(source: Source) -> int:
    assert source.decision.group is not None
    return source.decision.group.index
