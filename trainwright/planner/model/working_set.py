"""The working set: what a class of regions keeps for its backward, and what one instance needs while its backward runs.

All that an instance's backward needs is on the device while it runs: the forward kept it, or a rerun has made it again. Of M
instances the first r rerun and the others keep. The backward begins with the last one, so M − r instances are there then, and
one at least:

    present   P  =  the bytes of one instance, where its backward needs the tensor at all
    held      H  =  max(Σ bytes · K, P)     of all instances, while the last one's backward runs: H up to the backward of the group
                                            that uses the tensor last, and H − P from there on

The rows count no reruns, so they have no big M, and the relaxation pays for a whole instance as the plan does. A tensor that no
backward needs and reruns read is kept by the first instances; it has P = 0, and stays when the last one's backward is over.

With offloading (`offload`) K are the instances that stay. What is offloaded comes back when the backward first asks for it, not
with the rest of its instance, so up to the backward of that group rows have W in place of P, and max(Σ bytes · K, W) in place
of H:

    waiting   W  =  P − bytes · O / M
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...program.blocks import RegionClass
from ...program.layout import Layout
from ...program.program import Tensor
from ..problem.problem import Decision, Problem, Source, Stored, Use, readers_end
from .milp import MIB, Model, Terms
from .recompute import Recompute
from .sharding import Sharding, has_one_want, wants_of


@dataclass(frozen=True, eq=False)
class Item:
    """A piece of memory that may be kept or rederived; columns in MiB."""

    region_class: RegionClass
    owner: Decision | Use
    """The group that makes it, or the use that it is a copy for."""
    members: frozenset[int]
    """The instances that have it."""
    position: float
    """The group whose backward uses it last, or between which it is."""
    first: float
    """The group whose backward uses it first."""
    freed_by: tuple[Decision, int] | None
    """The group, and the place of its op, whose backward is the last in the region to use it; None of what is freed op by op."""
    kept: int
    held: int
    present: int
    held_waiting: int
    """As `held` and `present`, before the group that uses it first."""
    waiting: int
    most_mib: float
    """One instance takes no more than this."""
    instance: Terms
    """What one instance takes, in MiB, by what is chosen, with what kept ones hold more."""
    made_at: float = -math.inf
    """The moment of a region's reruns at which it is made (`rerun_memory`); -∞ if it is there where they begin."""
    read_until: float = -math.inf
    """The last moment of the reruns that reads it."""
    again: Terms = field(default_factory=list)
    """The bytes of one instance that is made again, in MiB, by the share of the instances that are."""
    away: Terms = field(default_factory=list)
    """The same of an instance that is offloaded."""

    def beside(self, moment: float, position: float, is_result: bool) -> Terms:
        """Return what the last instance holds at a moment of its reruns, less what the row of the group at `position` counts.

        Before it is made again, that is what is kept; then, until the last rerun has read it, all of it, whether a backward
        needs it or not. is_result: it is the result of what happens at that moment, and counted there.
        """
        if moment > self.read_until:
            return []
        counted: Terms = []
        if self.region_class.multiplicity - 1 in self.members and self.position <= position:
            is_waiting = self.first < position
            counted = [(self.kept, 1.0), (self.held_waiting if is_waiting else self.held, -1.0)]
            counted += [] if is_waiting else self.away
        return counted if moment <= self.made_at or is_result else [*counted, *self.again]


def gathered_first(use: Use, sharding: Sharding) -> bool:
    """Tell whether reruns gather a tensor before the first of them: in buckets parameters are."""
    return use.source.is_param and sharding.joined.in_buckets


def converting_moment(use: Use, sharding: Sharding) -> float:
    """Return at which moment reruns convert a tensor for a use: before its first reader runs, in buckets parameters at first."""
    if gathered_first(use, sharding):
        return -math.inf
    return before(min(demand.until for demand in use.demands), 2)


def when_converted(use: Use, sharding: Sharding) -> tuple[float, float]:
    """Return from which moment of the reruns on a copy is there, and the last that reads it."""
    if gathered_first(use, sharding):
        return -math.inf, -math.inf
    # before it is converted, so that it counts while another tensor is converted for the same group
    return before(min(demand.until for demand in use.demands), 3), max(demand.position for demand in use.demands) - 0.5


def before(moment: float, num: int) -> float:
    """Return the moment of reruns that comes `num` steps before one at which ops run.

    Groups run at integers, with four steps from one to the next. Ops that run before groups ahead of their own do so half way
    between two (`Group.moment`), and the steps before them are half as long.
    """
    return moment - num * (0.25 if moment == int(moment) else 0.125)


def copies_made_again(problem: Problem, recompute: Recompute) -> dict[Use, Terms]:
    """Return the bytes of each use's copies in one instance, in MiB, by the share of the instances that convert again."""
    found: dict[Use, Terms] = defaultdict(list)
    for (use, native, want), column in recompute.convert.items():
        size = problem.costs.copy_bytes(use.source.tensor, native, want[0])
        found[use].append((column, size / use.count / MIB))
    return found


def find_items(model: Model, problem: Problem, sharding: Sharding, recompute: Recompute) -> list[Item]:
    """Add the columns of every piece, with the rows that tie them together."""
    return list(_ItemBuilder(model, problem, sharding, recompute).items())


class _ItemBuilder:
    def __init__(self, model: Model, problem: Problem, sharding: Sharding, recompute: Recompute) -> None:
        self.model, self.problem, self.sharding, self.recompute = model, problem, sharding, recompute
        self.again = copies_made_again(problem, recompute)
        self.flows: dict[Use, list[tuple[tuple[int, ...], tuple, int]]] = defaultdict(list)
        for (use, native, want), column in sharding.flow.items():
            self.flows[use].append((native, want, column))
        for tied in sharding.tied:
            for (source, native, want), column in sharding.shared.items():
                for use in tied.uses if source is tied.source else ():
                    if want in wants_of(use):
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
        chosen = self.sharding.choice[source.decision]
        instance = [(column, sizes[native]) for column, native in zip(chosen, source.natives)]
        needs: list[Terms] = [instance] if stored.own_saved else []
        for use in stored.uses:
            held = _memory_of_views(sizes, source, use.source)
            served = [
                (column, held[native])
                for native, want, column in self.flows[use]
                if want[0] == native and _is_saved(use, want)
            ]
            # Of one use with one want, one flow is 1; of several wants, each is a need of its own.
            needs += [served] if has_one_want(use) else [[term] for term in served]
        when = (stored.position, stored.first_position, stored.freed_by)
        assert source.decision.group is not None
        made_at = _made_at(source.decision, source.tensor)
        read_until = max((d.position for use in stored.uses if use.inside for d in use.demands), default=made_at) - 0.5
        again = [
            (self.recompute.rerun[source.decision, option], sizes[native] / source.decision.count)
            for option, native in enumerate(source.natives)
            if (source.decision, option) in self.recompute.rerun
        ]
        reruns, most = (made_at, max(made_at, read_until), again), max(sizes.values())
        item = self._item(source.decision, range(source.decision.count), when, kept, needs, instance, reruns, most)
        if not stored.own_saved and source.decision.count > 1:
            # what only the first instances derive from is theirs: it is still there when the last one's backward is over
            needed = [(column, -size) for terms in needs for column, size in terms]
            self.model.row("sums of bytes", [(item.present, 1.0), *needed], upper=0.0)
        return item

    def _inner(self, decision: Decision) -> Item:
        assert decision.group is not None
        sizes = [size / MIB for size in decision.inner_bytes]
        columns = [self.recompute.keep_inner[decision, option] for option in range(len(sizes))]
        kept = list(zip(columns, sizes))
        needs = list(zip(self.sharding.choice[decision], sizes))
        # while the op itself is rerun, that is there
        moments = [decision.inner_until, *(_made_at(decision, tensor) for tensor in decision.inner_tensors)]
        made_at = before(min(moments), 1)
        return self._item(
            decision, range(decision.count), (decision.inner_until, decision.group.index, None), kept, [needs], needs,
            (made_at, made_at, []), max(sizes),
        )  # fmt: skip

    def _copies(self, use: Use) -> Item:
        """Return the item of a use's converted copies; copies of different wants share no memory, so their bytes add up."""
        recompute, wants = self.recompute, wants_of(use)
        keys = [(use, want) for want in wants if (use, want) in recompute.keep_copy]
        kept = [(recompute.keep_copy[key], recompute.copy_mib[key]) for key in keys]
        padding = [(recompute.padding[key], 1.0) for key in keys if key in recompute.padding]
        needs: Terms = []
        for native, want, column in self.flows[use]:
            if want[0] != native and _is_saved(use, want):
                size = self.problem.costs.copy_bytes(use.source.tensor, native, want[0]) / MIB
                needs.append((column, size))
        readers = [demand for demand in use.demands if any(demand.saves)]
        when = (
            min((demand.until for demand in readers), default=0),
            max((demand.position for demand in readers), default=0),
            readers_end(readers or use.demands),
        )
        reruns = (*when_converted(use, self.sharding), self.again[use])
        most = len(wants) * max((size for _, size in needs), default=0.0)
        return self._item(use, use.members, when, kept, [needs], needs, reruns, most, padding)

    def _item(
        self,
        owner: Decision | Use,
        members: Iterable[int],
        when: tuple[float, float, tuple[Decision, int] | None],
        kept: Terms,
        needs: list[Terms],
        instance: Terms,
        reruns: tuple[float, float, Terms],
        most: float,
        padding: Terms | None = None,
    ) -> Item:
        """Add the columns of one piece; `instance`: the MiB of one, `most` at most; `padding`: what kept ones hold more."""
        assert owner.region_class is not None
        here, leaving = self._here(kept, owner.count)
        kept_column, present = self.model.column(), self.model.column()
        self.model.row("sums of bytes", [*here, *(padding or []), (kept_column, -1.0)], 0.0, 0.0)
        for terms in needs:
            if terms:
                self.model.row("sums of bytes", [*terms, (present, -1.0)], upper=0.0)
        # rows subtract `present` where it is released, so it must not be more than one instance takes
        self.model.row("sums of bytes", [*instance, (present, -1.0)], lower=0.0)
        held = self._at_least(kept_column, present)
        waiting, held_waiting = present, held
        if leaving:
            waiting = self.model.column()
            self.model.row("sums of bytes", [(present, 1.0), *leaving, (waiting, -1.0)], upper=0.0)
            held_waiting = self._at_least(kept_column, waiting)
        last, first, freed_by = when
        away = [(column, -size) for column, size in leaving]
        return Item(
            owner.region_class, owner, frozenset(members), last, first, freed_by, kept_column, held, present, held_waiting, waiting,
            most, [*instance, *(padding or [])], *reruns, away,
        )  # fmt: skip

    def _here(self, kept: Terms, count: int) -> tuple[Terms, Terms]:
        """Return the terms of the instances that stay, and the negative terms of one instance's offloaded share."""
        leaves = self.recompute.leaves
        here = [(self.recompute.stays(column), size) for column, size in kept]
        return here, [(leaves[column], -size / count) for column, size in kept if column in leaves]

    def _at_least(self, *columns: int) -> int:
        most = self.model.column()
        for column in columns:
            self.model.row("sums of bytes", [(column, 1.0), (most, -1.0)], upper=0.0)
        return most

    def _mib(self, tensor, layout: tuple[int, ...]) -> float:
        return self.problem.costs.block_bytes(tensor, layout) / MIB


def _made_at(decision: Decision, tensor: Tensor) -> float:
    """Return the moment of the reruns at which the op of a group that makes a tensor runs."""
    assert decision.group is not None
    assert decision.region_class is not None
    assert tensor.producer is not None
    return decision.group.moment(tensor.producer, decision.region_class.groups)


def _memory_of_views(sizes: Mapping[Layout, float], source: Source, view: Source) -> dict[Layout, float]:
    """Return, by the layout of a view of `source`, the MiB of the memory behind it, which it keeps whole."""
    found: dict[Layout, float] = {}
    for root, native in zip(source.natives, view.natives):
        found[native] = min(sizes[root], found.get(native, math.inf))
    return found


def _is_saved(use: Use, want: tuple) -> bool:
    return any(want in saves for demand in use.demands for saves in demand.saves)
