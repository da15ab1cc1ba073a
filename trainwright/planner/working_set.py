"""What a class of regions holds while the backward of one of its instances runs.

What an instance's backward needs is there, kept or rederived: one instance of it at least. Reruns take the first r of M
instances and the others keep, so of M − r kept ones all are there when the last instance's backward begins, and while
it runs there are

    present   P  =  bytes of one instance, where the backward needs the tensor at all
    held      H  =  max(Σ bytes · K, P)     all instances' before the group that uses it last, and H − P after it

No count of reruns enters, hence no big M: the relaxation pays for a whole instance, as the plan does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ..capture.blocks import RegionClass
from .milp import MIB, Model, Terms
from .problem import Decision, Problem, Stored, Use
from .recompute import Recompute
from .sharding import Sharding, has_one_want, wants_of


@dataclass(frozen=True, eq=False)
class Item:
    """A piece of memory that may be kept or rederived; columns in MiB."""

    region_class: RegionClass
    members: frozenset[int]
    """The instances that have it."""
    position: int
    """The group whose backward uses it last."""
    kept: int
    held: int
    present: int


def find_items(model: Model, problem: Problem, sharding: Sharding, recompute: Recompute) -> list[Item]:
    """Add the columns of every piece, with the rows that tie them together."""
    return list(_Builder(model, problem, sharding, recompute).items())


class _Builder:
    def __init__(self, model: Model, problem: Problem, sharding: Sharding, recompute: Recompute) -> None:
        self.model, self.problem, self.sharding, self.recompute = model, problem, sharding, recompute
        self.flows: dict[Use, list[tuple[tuple[int, ...], tuple, int]]] = defaultdict(list)
        for (use, native, want), column in sharding.flow.items():
            self.flows[use].append((native, want, column))

    def items(self) -> Iterable[Item]:
        for stored in self.problem.stored:
            if not stored.boundary and not stored.held:
                yield self._stored(stored)
        for decision in self.problem.groups:
            if any(decision.inner_bytes):
                yield self._inner(decision)
        for use in self.problem.uses:
            if any((use, want) in self.recompute.keep_copy for want in wants_of(use)):
                yield self._copies(use)

    def _stored(self, stored: Stored) -> Item:
        source = stored.source
        sizes = {native: self._mib(source.tensor, native) for native in self.sharding.yields(source)}
        kept = [(self.recompute.keep[stored, native], size) for native, size in sizes.items()]
        needs: list[Terms] = []
        if stored.own_saved:
            chosen = self.sharding.choice[source.decision]
            needs.append([(column, sizes[native]) for column, native in zip(chosen, source.natives)])
        for use in stored.uses:
            served = [
                (column, self._mib(use.source.tensor, native))
                for native, want, column in self.flows[use]
                if want[0] == native and _is_saved(use, want)
            ]
            # Of one use with one want, one flow is 1; of several wants, each is a need of its own.
            needs += [served] if has_one_want(use) else [[term] for term in served]
        return self._item(source.decision, range(source.decision.count), stored.position, kept, needs)

    def _inner(self, decision: Decision) -> Item:
        assert decision.group is not None
        sizes = [size / MIB for size in decision.inner_bytes]
        kept = [(self.recompute.keep_inner[decision, option], size) for option, size in enumerate(sizes)]
        needs = [list(zip(self.sharding.choice[decision], sizes))]
        return self._item(decision, range(decision.count), decision.group.index, kept, needs)

    def _copies(self, use: Use) -> Item:
        """The converted copies of a use; wants that differ share no memory, so they add up."""
        sizes = {want: self._mib(use.source.tensor, want[0]) for want in wants_of(use)}
        kept = [
            (column, sizes[want]) for want in sizes if (column := self.recompute.keep_copy.get((use, want))) is not None
        ]
        needs = [
            [
                (column, sizes[want])
                for native, want, column in self.flows[use]
                if want[0] != native and _is_saved(use, want)
            ]
        ]
        readers = [demand.position for demand in use.demands if any(demand.saves)]
        return self._item(use, use.members, min(readers, default=0), kept, needs)

    def _item(
        self, owner: Decision | Use, members: Iterable[int], position: int, kept: Terms, needs: list[Terms]
    ) -> Item:
        assert owner.region_class is not None
        kept_column, held, present = self.model.column(), self.model.column(), self.model.column()
        self.model.row("sums of bytes", [*kept, (kept_column, -1.0)], 0.0, 0.0)
        for terms in needs:
            if terms:
                self.model.row("sums of bytes", [*terms, (present, -1.0)], upper=0.0)
        self.model.row("sums of bytes", [(kept_column, 1.0), (held, -1.0)], upper=0.0)
        self.model.row("sums of bytes", [(present, 1.0), (held, -1.0)], upper=0.0)
        return Item(owner.region_class, frozenset(members), position, kept_column, held, present)

    def _mib(self, tensor, layout: tuple[int, ...]) -> float:
        return self.problem.costs.local_bytes(tensor, layout) / MIB


def _is_saved(use: Use, want: tuple) -> bool:
    return any(want in saves for demand in use.demands for saves in demand.saves)
