"""The planning problem of one program on one mesh: decisions, who reads what in which layout, and what must be stored.

    Decision   one group's split, or one parameter's layout at rest; its options, each with its seconds
    Source     a tensor class and the layout that each option of its decision leaves it in
    Use        the readers of one source in one class of regions; each distinct want is served by one converted copy
    Demand     what one group wants of a use, and what its backward saves of it, option by option
    Stored     a piece of memory that a group's output lives in, and that somebody's backward may need

Everything stands once per class of regions, whatever the number of layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...program.blocks import RegionClass
from ...program.factors import Factor
from ...program.groups import Group
from ...program.layout import Layout
from ...program.program import Program, Tensor
from ...program.transition import gradient_layout
from ..costs.costs import CostModel, OptimizerCost

Want = tuple[Layout, Layout]
"""The layout in which a reader wants a tensor, and the layout in which it returns the gradient."""


@dataclass(frozen=True)
class OpBackward:
    """The backward of one op of a group; bytes have one entry for each option."""

    place: int
    """The op's place among those of the group."""
    moment: float
    """When it runs, among the groups of its region: the group's index, but for an op that runs after groups behind it."""
    running_bytes: tuple[int, ...]
    """The most that is there until it has read what was saved: gradients, and scratch memory."""
    ending_bytes: tuple[int, ...]
    """The same afterwards, when what was made again of that is released."""
    made_bytes: tuple[int, ...]
    """The gradients that are there when it is done, before any of them changes its layout."""
    shares: frozenset[Tensor]
    """The operands whose gradients lie in memory that another gradient is in too."""
    passes_on: frozenset[Tensor]
    """The operands whose gradients lie in memory that another group made."""
    beside: tuple[Tensor, ...] = ()
    """The tensors of groups that stand behind that moment whose gradients wait then, since the ops that made them run later."""


@dataclass(eq=False)
class Decision:
    """One choice among `options`, shared by `count` instances.

    Lists have one entry for each option; seconds and bytes are those of one instance.
    """

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
    """The seconds of the collectives inside the group's ops, forward and backward."""
    rerun_s: list[float] = field(default_factory=list)
    """The seconds of a rerun of the forward; ops whose outputs are all kept anyway are not rerun."""
    inner_bytes: list[int] = field(default_factory=list)
    """The bytes that the group saves and nobody outside reads: activations between its ops, statistics, masks."""
    inner_tensors: list[Tensor] = field(default_factory=list)
    """The activations that `inner_bytes` counts."""
    inner_until: float = 0.0
    """Until when, among the groups, backwards need them: that of the first op that saves any may come after other groups'."""
    inner_freed: dict[int, list[int]] = field(default_factory=dict)
    """The part of `inner_bytes` that the backward of an op is the last to need, by the op's place in the group."""
    backwards: list[OpBackward] = field(default_factory=list)
    """The backward of each of the group's ops, in the order in which they run."""
    workspace_bytes: list[int] = field(default_factory=list)
    """The peak bytes that the forward of one of its ops holds temporarily, beside its outputs and what it saves."""
    rerun_bytes: list[int] = field(default_factory=list)
    """The same in a rerun, with all that the op makes there, and what it reads that no backward needs."""
    remade_bytes: list[int] = field(default_factory=list)
    """The same in a rerun, with all that the op makes there, and what the group's ops hand on that no backward needs."""
    given_bytes: list[int] = field(default_factory=list)
    """The bytes of the gradients of the tensors that other groups read."""
    result_bytes: list[int] = field(default_factory=list)
    """The bytes of the sums that the caller is given of outputs which all instances leave partial."""
    summing_bytes: list[int] = field(default_factory=list)
    """The most that making one of these sums holds, the sum included."""
    rest_bytes: list[int] = field(default_factory=list)
    """The bytes of a parameter at rest; its gradient takes as many."""
    state_bytes: list[int] = field(default_factory=list)
    leaving_state_bytes: list[int] = field(default_factory=list)
    """The bytes of optimizer states that may be offloaded; 0 where they have to stay."""
    step_bytes: list[int] = field(default_factory=list)
    left_bytes: list[int] = field(default_factory=list)
    """The bytes that the optimizer still holds of a parameter's update while it makes that of the next parameter."""

    def transient_bytes(self, option: int) -> int:
        """Return the most that the backward of one of the group's ops holds for a moment, incoming gradients included."""
        return max((backward.running_bytes[option] for backward in self.backwards), default=0)

    def resting_bytes(self, option: int) -> int:
        """Return the bytes at rest of all instances of a parameter, with their optimizer states."""
        return self.count * (self.rest_bytes[option] + self.state_bytes[option])

    def option_s(self, option: int) -> float:
        """Return the seconds of all instances, forward and backward."""
        return self.count * (self.forward_s[option] + self.backward_s[option] + sum(self.inner_comm_s[option]))


@dataclass(eq=False)
class Source:
    """A class of tensors, with the layout in which each option of `decision` makes it."""

    tensor: Tensor
    decision: Decision
    natives: list[Layout]

    @property
    def is_param(self) -> bool:
        return self.decision.group is None


@dataclass(eq=False)
class Demand:
    """The wants of one group for a tensor under each of its options, and the subset that its backward saves."""

    decision: Decision
    position: int
    until: float
    """Until when, among the groups, backwards need it: that of the first op of the group that reads it may come later."""
    place: int
    """The place in the group of the first op that reads it; its backward is the last of the group's to need it."""
    wants: list[frozenset[Want]]
    saves: list[frozenset[Want]]


@dataclass(eq=False)
class Use:
    """The reads of one source by groups in the regions `members` of one class."""

    source: Source
    region_class: RegionClass
    members: tuple[int, ...]
    tensor: Tensor
    """The tensor as the representative region reads it."""
    inside: bool
    """True if the tensor is made in the region that reads it."""
    demands: list[Demand]

    @property
    def count(self) -> int:
        return len(self.members)

    def reaches(self) -> Iterator[tuple[int, int]]:
        """Yield, for each member, the index of the region that made the tensor and that of the region that reads it.

        The source is a group's, not a parameter.
        """
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
    """The memory that a group's output lives in, with everything that reads it."""

    source: Source
    own_saved: bool
    """True if the group's own backward needs it, under every option."""
    held: bool
    """True if the caller holds it until the step is over."""
    own_place: int = 0
    """The place in its group of the op whose backward is the last of the group's to need it."""
    uses: list[Use] = field(default_factory=list)

    @property
    def boundary(self) -> bool:
        """Return True if another region reads it; such memory is never rematerialised."""
        return any(not use.inside for use in self.uses)

    @property
    def position(self) -> float:
        """Return until when, among the groups of the region, backwards need it as it was made; ∞ if none in the region reads it."""
        assert self.source.decision.group is not None
        own = self.source.decision.group.index
        inside = [demand for use in self.uses if use.inside for demand in use.demands]
        if self.own_saved or not self.uses:
            return own
        return min((d.until for d in inside if any(d.saves)), default=own if inside else math.inf)

    def is_result(self, native: Layout) -> bool:
        """Tell whether the caller holds it as it was made: of an output that ranks leave partial they hold the sum instead."""
        return self.held and gradient_layout(native) == native

    @property
    def freed_by(self) -> tuple[Decision, int]:
        """Return the group, and the place of the op in it, whose backward is the last in the region to need it as it was made."""
        readers = [d for use in self.uses if use.inside for d in use.demands if any(d.saves)]
        if self.own_saved or not readers:
            return self.source.decision, self.own_place
        return readers_end(readers)

    @property
    def first_position(self) -> float:
        """Return the index of the group whose backward is the first in the region to need it as it was made."""
        assert self.source.decision.group is not None
        own = [self.source.decision.group.index] if self.own_saved else []
        readers = [d.position for use in self.uses if use.inside for d in use.demands if any(d.saves)]
        return max([*own, *readers], default=self.position)


def readers_end(readers: Sequence[Demand]) -> tuple[Decision, int]:
    """Return the group, and the place of the op in it, whose backward is the last of the readers' to need a tensor."""
    last = min(readers, key=lambda demand: (demand.until, demand.position, demand.place))
    return last.decision, last.place


@dataclass(frozen=True)
class SavedConstant:
    """The memory of a tensor that depends on no parameter and that a backward needs: each rank has all of it, in any plan."""

    num_bytes: int
    last: tuple[int, float]
    """The region, in the order of the forward, and until when among its groups a backward needs it."""


FEW_OPS, MANY_OPS = 200, 400
"""Programs of at most `FEW_OPS` are simulated in a tenth of a second; above `MANY_OPS` that takes long."""


@dataclass(eq=False)
class Problem:
    """The decisions of one program on one mesh, and what connects them."""

    program: Program
    costs: CostModel
    optimizer: OptimizerCost
    samples: Factor | None
    groups: list[Decision]
    params: list[Decision]
    uses: list[Use]
    stored: list[Stored]
    static_bytes: int
    """The bytes that no decision changes: buffers, whole on every rank, and what the optimizer keeps once."""
    constants: list[SavedConstant] = field(default_factory=list)

    @property
    def decisions(self) -> list[Decision]:
        return [*self.groups, *self.params]

    @property
    def is_quick(self) -> bool:
        """Return True if simulations are so quick that the search may begin with memory rows that are too wide."""
        return len(self.program.ops) <= FEW_OPS

    @property
    def is_long(self) -> bool:
        """Return True if simulations and weak relaxations take so long that the search avoids them where it can."""
        return len(self.program.ops) > MANY_OPS

    @cached_property
    def stored_of(self) -> dict[Use, Stored]:
        """The memory of what each use reads, unless that is a parameter."""
        return {use: stored for stored in self.stored for use in stored.uses}

    @cached_property
    def updated_in_turn(self) -> list[tuple[Decision | None, Decision]]:
        """The parameters that an optimizer updates one after the other, each with the one before it."""
        owner = {tensor: param for param in self.params for tensor in param.tied}
        trained = [owner[tensor] for tensor in self.program.params if tensor.is_trained]
        return list(dict.fromkeys(zip([None, *trained], trained)))

    @cached_property
    def unit_s(self) -> float:
        """A thousandth of a step, about: rows of seconds are in it, since they hold to 1e-6, and a step may take microseconds."""
        shortest = (min(map(decision.option_s, range(len(decision.options)))) for decision in self.decisions)
        return max(1e-9, sum(shortest) / 1e3)

    @property
    def mesh(self) -> tuple[int, ...]:
        return self.costs.mesh

    def of_class(self, region_class: RegionClass) -> list[Decision]:
        """Return the decisions of one class's groups, in order."""
        return [decision for decision in self.groups if decision.region_class is region_class]
