"""The planning problem of one program on one mesh: decisions, who reads what in which layout, and what must be stored.

    Decision   one group's split, or one parameter's layout at rest; its options, each with its seconds
    Source     a tensor class and the layout that each option of its decision leaves it in
    Use        the readers of one source in one class of regions; each distinct want is served by one converted copy
    Demand     what one group wants of a use, and what its backward saves of it, option by option
    Stored     a piece of memory that a group's output lives in, and that somebody's backward may need

Everything stands once per class of regions, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ...program.blocks import RegionClass
from ...program.factors import Factor
from ...program.groups import Group
from ...program.layout import Layout
from ...program.program import Program, Tensor
from ..costs.costs import CostModel, OptimizerCost

Want = tuple[Layout, Layout]
"""The layout that a reader wants, and that in which the gradient comes back."""


@dataclass(eq=False)
class Decision:
    """One choice among `options`. Seconds are those of one instance; there are `count`."""

    index: int
    key: str
    options: list[tuple[int, ...]]
    count: int
    group: Group | None = None
    region_class: RegionClass | None = None
    tied: list[Tensor] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    inner_comm_s: list[tuple[float, float]] = field(default_factory=list)
    """What the group's ops communicate inside themselves, forward and backward."""
    rerun_s: list[float] = field(default_factory=list)
    """What one instance's forward takes where it runs again: ops that make what is never rederived do not."""
    inner_bytes: list[int] = field(default_factory=list)
    """What the group saves and nobody outside reads: activations between its ops, statistics, masks."""
    inner_tensors: list[Tensor] = field(default_factory=list)
    """The activations among these."""
    transient_bytes: list[int] = field(default_factory=list)
    """What the group's backward holds for a moment, gradients included."""
    workspace_bytes: list[int] = field(default_factory=list)
    """What its forward holds for a moment, beside what it makes and saves."""
    rerun_bytes: list[int] = field(default_factory=list)
    """The same with what a rerun reads or makes and no backward needs."""
    given_bytes: list[int] = field(default_factory=list)
    """The gradients of what it leaves to others."""
    rest_bytes: list[int] = field(default_factory=list)
    """Parameters: bytes of one instance at rest; its gradient takes as much."""
    state_bytes: list[int] = field(default_factory=list)
    leaving_state_bytes: list[int] = field(default_factory=list)
    """What of the optimizer's states may leave the device; 0 where they stay."""
    step_bytes: list[int] = field(default_factory=list)

    def option_s(self, option: int) -> float:
        """Return the seconds of all instances, forward and backward."""
        return self.count * (self.forward_s[option] + self.backward_s[option] + sum(self.inner_comm_s[option]))


@dataclass(eq=False)
class Source:
    """A tensor class: the layout that each option of `decision` leaves it in."""

    tensor: Tensor
    decision: Decision
    natives: list[Layout]

    @property
    def is_param(self) -> bool:
        return self.decision.group is None


@dataclass(eq=False)
class Demand:
    """What one group wants of a tensor under each of its options, and which of the wanted its backward saves."""

    decision: Decision
    position: int
    wants: list[frozenset[Want]]
    saves: list[frozenset[Want]]


@dataclass(eq=False)
class Use:
    """The readers of one source in the regions `members` of one class."""

    source: Source
    region_class: RegionClass
    members: tuple[int, ...]
    tensor: Tensor
    """The tensor as the representative region reads it."""
    inside: bool
    """Made and read in the same region."""
    demands: list[Demand]

    @property
    def count(self) -> int:
        return len(self.members)

    def reaches(self) -> Iterator[tuple[int, int]]:
        """Yield, for each member, the region where what it reads was made and its own; of what a group makes."""
        place = None if self.inside else self.region_class.representative.externals.index(self.tensor)
        for member in self.members:
            region = made = self.region_class.members[member]
            if place is not None:
                producer = region.externals[place].producer
                assert producer is not None
                assert producer.region is not None
                made = producer.region
            yield made.index, region.index


@dataclass(eq=False)
class Stored:
    """The memory behind a group's output."""

    source: Source
    own_saved: bool
    """The group's own backward needs it, whatever is chosen."""
    held: bool
    """The caller holds it until the step is over."""
    uses: list[Use] = field(default_factory=list)

    @property
    def boundary(self) -> bool:
        """Read by another region: never rederived."""
        return any(not use.inside for use in self.uses)

    @property
    def position(self) -> int:
        """The group of the region whose backward is the last to need it, natively."""
        assert self.source.decision.group is not None
        own = self.source.decision.group.index
        readers = [d.position for use in self.uses if use.inside for d in use.demands if any(d.saves)]
        return own if self.own_saved or self.held else min(readers, default=own)

    @property
    def first_position(self) -> int:
        """The group of the region whose backward is the first to need it, natively."""
        assert self.source.decision.group is not None
        own = [self.source.decision.group.index] if self.own_saved else []
        readers = [d.position for use in self.uses if use.inside for d in use.demands if any(d.saves)]
        return max([*own, *readers], default=self.position)


FEW_OPS, MANY_OPS = 200, 400
"""Up to so many a program is simulated in a tenth of a second; of more it is long."""


@dataclass(eq=False)
class Problem:
    """All that the solver chooses from, for one program on one mesh."""

    program: Program
    costs: CostModel
    optimizer: OptimizerCost
    samples: Factor | None
    groups: list[Decision]
    params: list[Decision]
    uses: list[Use]
    stored: list[Stored]
    static_bytes: int
    """Buffers: whole on every rank."""

    @property
    def decisions(self) -> list[Decision]:
        return [*self.groups, *self.params]

    @property
    def is_quick(self) -> bool:
        """Whether simulations take so little that the rows may begin too wide."""
        return len(self.program.ops) <= FEW_OPS

    @property
    def is_long(self) -> bool:
        """Whether simulations, and weak relaxations, take so long that they are saved where they can be."""
        return len(self.program.ops) > MANY_OPS

    @property
    def mesh(self) -> tuple[int, ...]:
        return self.costs.mesh

    def of_class(self, region_class: RegionClass) -> list[Decision]:
        """Return the decisions of one class's groups, in order."""
        return [decision for decision in self.groups if decision.region_class is region_class]
