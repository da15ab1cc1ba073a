"""Gradients of activations that have a part already, and wait for other readers' parts or for the backward of their producer.

    at the tensor    Σ bytes at rest · x                 from the backward of its last reader on, until that of its producer
                     Σ f · padding of a gather           beyond that, where one reader alone gives it
    at a copy        Z ≥ Σ_n f[n, w] · (bytes of w's gradient − bytes at rest) − most · Σ {f of other copies}

Readers of one copy (q, k and v of the same input) add up their gradients in the copy's layout, in which each is often whole, and
only the sum is brought back to the layout of the tensor. So Z stands beside x from the backward of the first of them to that of
the last. Where readers ask for different copies, none waits there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ...program.transition import gradient_layout
from ..problem.problem import Decision, Problem, Source, Use, Want
from .milp import MIB, Model, Terms
from .sharding import Sharding, wants_of
from .tied import Place

AT_A_COPY = "gradients of one copy's readers add up there"


class WaitingGradients:
    """The terms of the memory rows."""

    def __init__(self, model: Model, problem: Problem, sharding: Sharding) -> None:
        self.model, self.problem, self.sharding = model, problem, sharding
        self.uses = [use for use in problem.uses if not use.source.is_param and use.tensor.requires_grad]
        self.waits = _waits(self.uses)
        self.flows: dict[Use, list[tuple[tuple[int, ...], Want, int]]] = defaultdict(list)
        for (use, native, want), column in sharding.flow.items():
            self.flows[use].append((native, want, column))
        self.padding = {source: self._padding(source) for source in self.waits}
        """What a gradient holds more because it was gathered."""
        self._columns: dict[tuple[Use, bool], int] = {}

    def of_outputs(self, decision: Decision) -> Terms:
        """Return what the gradients at which a group's backward begins hold more because they were gathered."""
        return [term for source, terms in self.padding.items() if source.decision is decision for term in terms]

    def terms(self, region: int, position: int) -> Terms:
        """Return the terms of what waits while the backward of a group runs."""
        terms: Terms = []
        for source, waits in self.waits.items():
            num = sum(made < (region, position) < last for made, last in waits)
            if num:
                sizes = [num * self.problem.costs.block_bytes(source.tensor, native) for native in source.natives]
                terms += self.sharding.chosen_mib(source.decision, sizes)
                if self._has_one_reader(source):
                    terms += [(column, num * size) for column, size in self.padding[source]]
        for use in self.uses:
            terms += self._at_copy(use, region, position)
        return terms

    def _at_copy(self, use: Use, region: int, position: int) -> Terms:
        """Return the term of what readers of one copy in a region have added up, and the last of them still adds to."""
        positions = [demand.position for demand in use.demands]
        is_between = min(positions) <= position < max(positions)
        if not is_between or all(use.region_class.members[member].index != region for member in use.members):
            return []
        # what other regions gave is at rest; what these give is not there yet
        is_first = any(last == (region, max(positions)) for _, last in self.waits[use.source])
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
                    terms = [
                        (flow, sizes[native, want] if want == own else -most) for native, want, flow in self.flows[use]
                    ]
                    self.model.row(AT_A_COPY, [*terms, (column, -1.0)], upper=0.0)
        return self._columns[key]

    def _more_mib(self, use: Use, native: tuple[int, ...], want: Want, is_first: bool) -> float:
        costs, tensor = self.problem.costs, use.source.tensor
        if want[1] == gradient_layout(native):
            return 0.0
        rest = costs.block_bytes(tensor, native) if is_first else 0
        return (costs.block_bytes(tensor, want[1]) - rest) / MIB

    def _padding(self, source: Source) -> Terms:
        costs, tensor = self.problem.costs, source.tensor
        terms: Terms = []
        for use in (use for use in self.uses if use.source is source):
            for native, want, column in self.flows[use]:
                gradient = gradient_layout(native)
                more = costs.copy_bytes(tensor, want[1], gradient) - costs.block_bytes(tensor, gradient)
                if more > 0:
                    terms.append((column, more / MIB))
        return terms

    def _has_one_reader(self, source: Source) -> bool:
        return sum(len(use.demands) for use in self.uses if use.source is source) == 1


def _waits(uses: Iterable[Use]) -> dict[Source, list[tuple[Place, Place]]]:
    """Return where each instance of what a group makes was made, and where it is read last."""
    last: dict[Source, dict[int, Place]] = defaultdict(dict)
    for use in uses:
        position = max(demand.position for demand in use.demands)
        for made, read in use.reaches():
            own = last[use.source]
            own[made] = max(own.get(made, (-1, -1)), (read, position))
    return {source: [((made, _position(source)), end) for made, end in own.items()] for source, own in last.items()}


def _position(source: Source) -> int:
    assert source.decision.group is not None
    return source.decision.group.index
