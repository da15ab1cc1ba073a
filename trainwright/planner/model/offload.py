"""Offloading as a fourth fate: of the instances that are kept, how many leave the device until their backward.

    O[·] ∈ 0..M        instances whose tensor leaves, for every K, KI and KC           R + O = K,  R ≥ 0 stay,  O + r ≤ M

    bytes     the memory rows count R in place of K; what the running instance needs is there (`working_set`, `memory`)
    in flight F[class] ≥ bytes · O / M for everything that leaves a class
    capacity  Σ bytes · O ≤ the tier's
    seconds   E ≥ (1 − ω) T  and  E ≥ T − ω · C     T = Σ (bytes / bandwidth + latency) · O,  C the phase's other seconds

for the forward (out) and the backward (back), each E a term of the objective (where parameters rest on the same disks, one E
a phase is at least what either direction exposes, and ω is a little less than the tier's: `resting`); ω is the share of a
transfer that a computation hides, 1 where the two do not meet. Of the instances that are kept the first leave, which wait longest.
Optimizer states go to the same tier, between updates: `offload_states`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from ...program.blocks import RegionClass
from ..problem.problem import Decision, Problem, Stored, Use, Want
from .milp import MIB, Model, Terms
from .offload_states import add_states, moved_terms, update_terms
from .recompute import Recompute
from .resting import add_resting, taken_there
from .sharding import Sharding, flow_s

LEAVES = "what is kept stays or leaves"
TRANSFERS = "what is offloaded is moved"
CAPACITY = "the tier holds what is offloaded"
IN_FLIGHT = 1
"""The number of transfers of the largest tensor in flight: the next transfer waits for it, the computation does not."""
OFFLOAD_EPSILON_S = 1e-9
"""A small cost per offloaded instance, so that nothing is offloaded without need."""


SHOWS = 0.02
"""What of a phase's transfers or computation counts though the other hides it, where parameters rest on disks: among what takes
as long, what moves and computes less is wanted, whose phases also begin and end sooner."""


@dataclass(frozen=True)
class _Kept:
    """A column of kept instances, with what one of them takes."""

    column: int
    region_class: RegionClass
    count: int
    num_bytes: int
    rederived: tuple[int, ...] = ()
    """Columns of the instances, the first ones, that are not kept."""


def add_offload(model: Model, problem: Problem, sharding: Sharding, recompute: Recompute) -> None:
    """Add the columns and rows of offloading to the cluster's tier that the task allows; nothing without one."""
    tier = problem.costs.tier
    if tier is None:
        return
    found = [kept for kept in _kept(problem, recompute) if kept.num_bytes >= problem.costs.min_offload_bytes]
    for kept in found:
        leaves = model.column(float(kept.count), OFFLOAD_EPSILON_S, integer=True)
        resident = model.column()
        model.row(LEAVES, [(resident, 1.0), (leaves, 1.0), (kept.column, -1.0)], 0.0, 0.0)
        model.row(LEAVES, [(leaves, 1.0), *((column, 1.0) for column in kept.rederived)], upper=float(kept.count))
        recompute.leaves[kept.column], recompute.resident[kept.column] = leaves, resident
    _add_in_flight(model, recompute, found)
    resting = problem.costs.resting
    states = add_states(model, problem, sharding, recompute, has_window=resting is None)
    disks = None if resting is None else add_resting(model, problem, sharding, recompute, resting, tier)
    if tier.capacity_bytes is not None:
        terms = [(recompute.leaves[kept.column], kept.num_bytes / MIB) for kept in found]
        terms += states if resting is None else taken_there(problem, sharding, recompute, resting)
        model.row(CAPACITY, terms, upper=tier.capacity_bytes / MIB)
    hidden = tier.overlap if resting is None else (1 - SHOWS) * tier.overlap
    exposed = _Exposed(model, hidden, problem.unit_s)
    forward, backward = _windows(problem, sharding, recompute, model)
    moved = int if resting is None else resting.moved
    out, back = (
        [
            (recompute.leaves[kept.column], problem.costs.num_passes * (moved(kept.num_bytes) / rate + tier.latency_s))
            for kept in found
        ]
        for rate in (tier.write_bytes_per_s, tier.read_bytes_per_s)
    )
    update = update_terms(problem, sharding)
    if disks is None or resting is None:
        exposed.add(forward, out)
        exposed.add(backward, back)
        if states:
            exposed.add(update, moved_terms(problem, recompute, tier))
        return
    exposed.add(forward, disks.forward_read, out)
    beside, after = ([*backward, *update], []) if resting.update == "during" else (backward, update)
    exposed.add(beside, [*disks.backward_read, *back], disks.backward_written)
    if after:
        exposed.add(after, disks.after_read, disks.after_written)


def spans(stored: Stored) -> list[tuple[int, int]]:
    """Return, for each instance, the first and the last region in the program's order whose backward needs it."""
    owner = stored.source.decision.region_class
    assert owner is not None
    own = {member.index: [member.index] if stored.own_saved else [] for member in owner.members}
    for use in stored.uses:
        for made, read in use.reaches():
            own[made].append(read)
    return [(min(own[m.index], default=m.index), max(own[m.index], default=m.index)) for m in owner.members]


def _kept(problem: Problem, recompute: Recompute) -> Iterator[_Kept]:
    reruns: dict[Decision, list[int]] = defaultdict(list)
    for (decision, _), column in recompute.rerun.items():
        reruns[decision].append(column)
    converts: dict[tuple[Use, Want], list[int]] = defaultdict(list)
    for (use, _, want), column in recompute.convert.items():
        converts[use, want].append(column)
    for (stored, native), column in recompute.keep.items():
        decision = stored.source.decision
        assert decision.region_class is not None
        if not stored.held:
            size = problem.costs.local_bytes(stored.source.tensor, native)
            again = () if stored.boundary else reruns[decision]
            yield _Kept(column, decision.region_class, decision.count, size, tuple(again))
    for (decision, option), column in recompute.keep_inner.items():
        assert decision.region_class is not None
        size = decision.inner_bytes[option]
        yield _Kept(column, decision.region_class, decision.count, size, tuple(reruns[decision]))
    for (use, want), column in recompute.keep_copy.items():
        size = problem.costs.local_bytes(use.source.tensor, want[0])
        yield _Kept(column, use.region_class, use.count, size, tuple(converts[use, want]))


def _add_in_flight(model: Model, recompute: Recompute, found: list[_Kept]) -> None:
    by_class: dict[RegionClass, list[_Kept]] = defaultdict(list)
    for kept in found:
        by_class[kept.region_class].append(kept)
    for region_class, items in by_class.items():
        column = recompute.in_flight[region_class] = model.column()
        for kept in items:
            size = IN_FLIGHT * kept.num_bytes / MIB / kept.count
            model.row(TRANSFERS, [(recompute.leaves[kept.column], size), (column, -1.0)], upper=0.0)


def _windows(problem: Problem, sharding: Sharding, recompute: Recompute, model: Model) -> tuple[Terms, Terms]:
    """Return the seconds of the forward, and of the backward with what is rederived in it."""
    out: Terms = []
    back: Terms = []
    for decision in problem.groups:
        for option, column in enumerate(sharding.choice[decision]):
            there, again = decision.inner_comm_s[option]
            out.append((column, decision.count * (decision.forward_s[option] + there)))
            back.append((column, decision.count * (decision.backward_s[option] + again)))
    for (use, native, want), column in sharding.flow.items():
        times = flow_s(problem, use, native, want)
        out.append((column, use.count * times[0]))
        back.append((column, use.count * times[1]))
    for (source, native, want), column in sharding.shared.items():
        gradient = want[1] if source.tensor.requires_grad else native
        shared_s = problem.costs.edge_s(source.tensor, native, want[0], gradient)
        assert shared_s is not None, "what is shared has seconds"
        out.append((column, shared_s[0]))
        back.append((column, shared_s[1]))
    for column in (*recompute.rerun.values(), *recompute.convert.values()):
        back.append((column, model.cost[column]))
    return out, back


@dataclass(frozen=True)
class _Exposed:
    """Adds to the objective what transfers add to the computation beside them, one column a phase."""

    model: Model
    overlap: float
    """The share of a transfer that a computation hides."""
    unit_s: float

    def add(self, compute: Terms, *directions: Terms) -> None:
        """Add a phase with its computation and the transfers of each direction, which do not wait for one another."""
        overlap = self.overlap
        window, exposed = self._sum(compute), self.model.column(cost=self.unit_s)
        for terms in directions:
            moved = [(column, seconds / self.unit_s) for column, seconds in terms]
            self.model.row(TRANSFERS, [*((c, (1 - overlap) * s) for c, s in moved), (exposed, -1.0)], upper=0.0)
            self.model.row(TRANSFERS, [*moved, (window, -overlap), (exposed, -1.0)], upper=0.0)

    def _sum(self, terms: Terms) -> int:
        column = self.model.column()
        self.model.row(TRANSFERS, [*((c, seconds / self.unit_s) for c, seconds in terms), (column, -1.0)], 0.0, 0.0)
        return column
