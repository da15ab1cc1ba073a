"""Groups: the ops that share one decision. A heavy op stands alone; elementwise ops and views join what feeds them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .factors import leaves
from .layout import PARTIAL, REPLICATE, Layout
from .transition import gradient_layout

if TYPE_CHECKING:
    from ..ops import Dims
    from .blocks import Region
    from .program import Op, Tensor

Split = tuple[int, ...]
"""Per mesh axis the index of the group's loop that it splits; -1: none."""


@dataclass(eq=False)
class Loop:
    """One iteration dimension of a group, in as many of its ops as run over it."""

    name: str
    size: int
    whole: bool
    """May not be split."""
    reduced: bool
    """Splitting it leaves the group's outputs partial sums."""


@dataclass(eq=False)
class Group:
    """Ops of one region that are split alike. `ops` are those of the representative region."""

    index: int
    ops: list[Op]
    loops: list[Loop] = field(default_factory=list)
    loop_at: dict[tuple[int, str, int], int] = field(default_factory=dict)
    """(position of the op, its loop, factor of that loop) → index into `loops`."""
    pairs: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Index of a loop that stands for two, which one axis splits together: tensors that have the first are cut along it, those
    that have the second alone along that."""
    _layouts: dict[tuple[Op, int, bool, Split], Any] = field(default_factory=dict, init=False, repr=False)
    """The layouts of operands and results that were asked for, by op, place, whether it is an operand's, and split."""

    @property
    def head(self) -> Op:
        """The op that the group is named after: the heavy one, else the first."""
        return next((op for op in self.ops if op.kind == "heavy"), self.ops[0])

    def moment(self, op: Op, groups: Sequence[Group]) -> float:
        """Return when, among the groups of its region, an op of this group runs: before those which begin behind it."""
        behind = [g.index for g in groups if g.index < self.index and g.ops[0].position > op.position]
        return min(behind) - 0.5 if behind else self.index

    def late_moment(self, op: Op, groups: Sequence[Group]) -> float:
        """Return when, among the groups of its region, an op runs that comes after groups behind this: after the last of them."""
        before = [g.index for g in groups if g.index > self.index and g.ops[-1].position < op.position]
        return max(before) + 0.5 if before else self.index

    @property
    def may_rerun(self) -> bool:
        """Whether its backward may be given what a rerun makes: none has an effect, or reads what is written later."""
        return any(op.requires_grad for op in self.ops) and not any(op.runs_once for op in self.ops)

    @property
    def key(self) -> str:
        return self.head.key

    @property
    def is_heavy(self) -> bool:
        return self.head.kind == "heavy"

    def operands(self) -> Iterable[tuple[Op, int, Tensor]]:
        """Yield every tensor argument that comes from outside the group: the op, its place there, the tensor."""
        inside = set(self.ops)
        for op in self.ops:
            for place, tensor in enumerate(op.inputs):
                if tensor.producer not in inside:
                    yield op, place, tensor

    def outputs(self) -> list[Tensor]:
        """Return the tensors that are read outside the group, or by nobody."""
        inside = set(self.ops)
        return [
            tensor
            for op in self.ops
            for tensor in op.outputs
            if not tensor.consumers or any(consumer not in inside for consumer in tensor.consumers)
        ]

    def input_layout(self, op: Op, place: int, split: Split) -> tuple[Layout, Layout]:
        """Return the layouts that `op` wants of its tensor argument at `place`, and that its gradient comes back in."""
        key = op, place, True, split
        if key not in self._layouts:
            self._layouts[key] = self._input_layout(op, place, split)
        found: tuple[Layout, Layout] = self._layouts[key]
        return found

    def _input_layout(self, op: Op, place: int, split: Split) -> tuple[Layout, Layout]:
        producer = op.inputs[place].producer
        if producer is not None and producer.region is op.region and producer.position in self._positions_inside():
            # Inside the group a tensor is read as it was left: a view of a partial sum is one too.
            native = self.output_layout(producer, producer.outputs.index(op.inputs[place]), split)
            return native, gradient_layout(native)
        forward, gradient = [], []
        for loop in split:
            slot = self._slot(op, op.inputs[place], op.signature.inputs[place], loop)
            forward.append(REPLICATE if slot is None else slot)
            if slot is not None:
                gradient.append(slot)
            else:
                full = loop < 0 or (self.loops[loop].reduced and place in op.signature.once)
                gradient.append(REPLICATE if full else PARTIAL)
        return tuple(forward), tuple(gradient)

    def output_layout(self, op: Op, place: int, split: Split) -> Layout:
        """Return the layout in which `op` leaves its output at `place`."""
        key = op, place, False, split
        if key not in self._layouts:
            self._layouts[key] = self._output_layout(op, place, split)
        found: Layout = self._layouts[key]
        return found

    def _output_layout(self, op: Op, place: int, split: Split) -> Layout:
        layout = []
        for loop in split:
            slot = self._slot(op, op.outputs[place], op.signature.outputs[place], loop)
            partial = slot is None and loop >= 0 and self.loops[loop].reduced
            layout.append(PARTIAL if partial else REPLICATE if slot is None else slot)
        return tuple(layout)

    def op_axes(self, op: Op, loop_name: str, split: Split) -> tuple[int, ...]:
        """Return the mesh axes that split a factor of the loop `loop_name` of `op`."""
        own = {index for (at, name, _), index in self.loop_at.items() if at == op.position and name == loop_name}
        own |= {index for index, both in self.pairs.items() if own.intersection(both)}
        return tuple(axis for axis, loop in enumerate(split) if loop in own)

    def axes_of(self, loop: int, split: Split) -> list[int]:
        """Return the mesh axes that split `loop`, alone or with another."""
        return [axis for axis, index in enumerate(split) if index == loop or loop in self.pairs.get(index, ())]

    def pair_axes(self, split: Split) -> list[int]:
        """Return the mesh axes that split two loops together."""
        return [axis for axis, index in enumerate(split) if index in self.pairs]

    def _positions_inside(self) -> set[int]:
        if not hasattr(self, "_inside"):
            self._inside = {op.position for op in self.ops}
        return self._inside

    def _positions(self, op: Op) -> list[tuple[tuple[int, str, int], int]]:
        if not hasattr(self, "_by_position"):
            table: dict[int, list[tuple[tuple[int, str, int], int]]] = defaultdict(list)
            for key, index in self.loop_at.items():
                table[key[0]].append((key, index))
            self._by_position = table
        return self._by_position[op.position]

    def _slot(self, op: Op, tensor: Tensor, dims: Dims, loop: int) -> int | None:
        if loop < 0:
            return None
        for single in self.pairs.get(loop, (loop,)):
            for (_, name, part), index in self._positions(op):
                if index == single:
                    slot = op.slot(tensor, dims, name, part)
                    if slot is not None:
                        return slot
        return None


def is_routed(group: Group, split: Split, mesh: Sequence[int]) -> bool:
    """Tell whether the rows that a rank gets under `split` depend on the data."""
    for op in group.ops:
        for _, other in op.signature.pairs:
            if any(mesh[axis] > 1 for axis in group.op_axes(op, other, split)):
                return True
    return False


def build_groups(region: Region) -> list[Group]:
    """Gather the ops of `region` into groups and find the loops of each."""
    apart: set[Op] = set()
    while True:
        groups = [Group(index, ops) for index, ops in enumerate(_gathered(region, apart))]
        crossed = {op for group in groups if (op := _find_loops(group)) is not None}
        if crossed <= apart:
            return groups
        apart |= crossed


def _gathered(region: Region, apart: Collection[Op]) -> list[list[Op]]:
    """Return the ops of each group, none of which reads from a later one; ops of `apart` join nothing that comes before them."""
    member: dict[Op, int] = {}
    ops: list[list[Op]] = []
    before: list[set[int]] = []
    """For each group, all groups that it depends on."""
    for op in region.ops:
        sources = {member[t.producer] for t in op.inputs if t.producer is not None and t.producer in member}
        index = None if op in apart else _join(op, sources, member, ops, before)
        if index is None:
            index = len(ops)
            ops.append([])
            before.append(set())
        ops[index].append(op)
        member[op] = index
        before[index] |= {s for s in sources if s != index} | {p for s in sources if s != index for p in before[s]}
        for later in range(len(ops)):
            if index in before[later]:
                before[later] |= before[index]
    ops.sort(key=_place)
    return ops


def _place(ops: Sequence[Op]) -> int:
    """Return the position at which a group stands among the others: that of its last op before anything else reads from it.

    Its ops may be apart: of silu(gate(x)) · up(x) the first runs before `up`, and the second behind it.
    """
    inside = set(ops)
    readers = [
        c.position for op in ops for t in op.outputs for c in t.consumers if c.region is op.region and c not in inside
    ]
    first = min(readers, default=ops[-1].position + 1)
    return max(op.position for op in ops if op.position < first)


def _join(op: Op, sources: set[int], member: dict[Op, int], ops: list[list[Op]], before: list[set[int]]) -> int | None:
    """Return the group that `op` should join, if any: it must not make two groups wait for each other."""
    if op.kind == "heavy":
        return None
    producers = [t.producer for t in op.inputs if t.producer is not None and t.producer in member]
    for producer in producers:
        index = member[producer]
        others = sources - {index}
        if any(index in before[other] for other in others):
            continue
        if op.kind == "view" and len(producers) == 1:
            return index
        heavy = any(peer.kind == "heavy" for peer in ops[index])
        single = all(len(t.consumers) == 1 for t in op.inputs if t.producer is producer)
        if not heavy and (single or not others) and _followable(op):
            return index
    return None


def _followable(op: Op) -> bool:
    """Tell whether an op may join the group that makes one of its operands."""
    return op.kind in ("elementwise", "view")


def _find_loops(group: Group) -> Op | None:
    """Identify the loops of the group's ops through the tensors that connect them.

    Returns the first op through which two loops of one op become one, as x[:, None] - x[None] makes those of x's own group: they
    stay whole. None where there is none, or where they stay whole anyhow.
    """
    whole: set[Hashable] = set()
    union = _united(group, group.ops, whole)
    roots: dict[Hashable, int] = {}
    for op in group.ops:
        for name, factors in op.loops.items():
            parts = leaves(factors)
            for part, factor in enumerate(parts):
                key = (op.position, name, part)
                root = union.find(key)
                if root not in roots:
                    roots[root] = len(group.loops)
                    label = name if len(parts) == 1 else f"{name}.{part}"
                    group.loops.append(Loop(_unique(label, op, group), factor.size, False, False))
                loop = group.loops[roots[root]]
                loop.whole |= key in whole or name in op.signature.whole or factor.blocked
                loop.whole |= bool(part) and name in op.signature.ordered
                loop.reduced |= name in op.signature.reduced
                group.loop_at[key] = roots[root]
    crossing = _keep_crossed_whole(group)
    _refuse_mixed_gradients(group)
    _add_pairs(group)
    return crossing


def _united(group: Group, ops: Sequence[Op], whole: set[Hashable]) -> _Union:
    """Return which loops of `ops`, the first of the group, are one; add to `whole` those whose factors match no dim."""
    union = _Union()
    inside = set(group.ops)
    for op in ops:
        for tensors, all_dims in ((op.inputs, op.signature.inputs), (op.outputs, op.signature.outputs)):
            for tensor, dims in zip(tensors, all_dims):
                _connect(op, tensor, dims, union, whole, connect=tensor.producer in inside or not group.is_heavy)
    return union


def _keep_crossed_whole(group: Group) -> Op | None:
    """Keep loops whole that are two of one op; return the op that makes them one, if they might have been split."""
    places: dict[tuple[int, int], list[Hashable]] = defaultdict(list)
    for key, index in group.loop_at.items():
        places[key[0], index].append(key)
    twice = {place: keys for place, keys in places.items() if len(keys) > 1}
    crossed = [keys for (_, index), keys in twice.items() if not group.loops[index].whole]
    for _, index in twice:
        group.loops[index].whole = True
    for count in range(1, len(group.ops) + 1) if crossed else ():
        union = _united(group, group.ops[:count], set())
        if any(len({union.find(key) for key in keys}) < len(keys) for keys in crossed):
            return group.ops[count - 1]
    return None


def _add_pairs(group: Group) -> None:
    """Add a loop for each two factors that an op lets one axis split together."""
    for op in group.ops:
        for pair in op.signature.pairs:
            firsts, seconds = (
                [i for (at, name, _), i in group.loop_at.items() if at == op.position and name == own] for own in pair
            )
            for both in itertools.product(firsts, seconds):
                one, other = (group.loops[index] for index in both)
                if not one.whole and not other.whole:
                    group.pairs[len(group.loops)] = both
                    name = f"{one.name}+{other.name}"
                    group.loops.append(Loop(name, min(one.size, other.size), whole=False, reduced=False))


def _refuse_mixed_gradients(group: Group) -> None:
    """Keep whole the loops that would leave a tensor with a gradient that is part whole, part partial.

    An op that does not run over a split loop hands whole gradients on to its inputs, where those that do leave partial ones.
    An op whose ranks work together over the loop takes a whole gradient and leaves each rank's share, so what reads nothing
    but its results, and does not run over the loop again, may be whole.
    """
    for index, loop in enumerate(group.loops):
        if not loop.whole and not loop.reduced:
            loop.whole = _mixes_gradients(group, index)


def _mixes_gradients(group: Group, index: int) -> bool:
    inside = set(group.ops)
    ended: set[Op | None] = set()
    """The ops that take whole gradients: those that work together over the loop, and what stands behind these alone."""
    for op in group.ops:
        names = {name for (at, name, _), own in group.loop_at.items() if at == op.position and own == index}
        behind = [tensor.producer in ended for tensor in op.inputs if tensor.requires_grad]
        if any(behind) and (names or not all(behind)):
            return True
        if any(behind) or _ends_jointly(op, names):
            ended.add(op)
            continue
        for place, tensor in enumerate(op.outputs):
            read = any(consumer not in inside for consumer in tensor.consumers)
            if read and tensor.requires_grad and group.output_layout(op, place, (index,)) == (REPLICATE,):
                return True
    return False


def _ends_jointly(op: Op, names: set[str]) -> bool:
    """True if the ranks that split the loops `names` work together in `op`, and none of its outputs has them."""
    in_outputs = {name for dims in op.signature.outputs for dim in dims for name in dim}
    return bool(names) and names <= op.signature.joint and not names & in_outputs


def _connect(
    op: Op, tensor: Tensor, dims: tuple[tuple[str, ...], ...], union: _Union, whole: set, connect: bool
) -> None:
    """Tie the loops of `op` to the slots of one of its tensors; a loop whose factors do not match the dim stays whole."""
    slot = 0
    for own, dim in zip(tensor.dims, dims):
        parts = leaves(own)
        keys = [(op.position, name, part) for name in dim for part in range(len(leaves(op.loops[name])))]
        found = [factor for name in dim for factor in leaves(op.loops[name])]
        if dim and len(parts) == len(found) and all(a is b for a, b in zip(parts, found)):
            for offset, key in enumerate(keys):
                if connect:
                    union.join(key, ("tensor", id(tensor), slot + offset))
        else:
            whole.update(keys)
        slot += len(parts)


def _unique(label: str, op: Op, group: Group) -> str:
    taken = {loop.name for loop in group.loops}
    if label not in taken:
        return label
    label = f"{op.key.split(':')[-1]}.{label}"
    count = 2
    name = label
    while name in taken:
        name, count = f"{label}~{count}", count + 1
    return name


class _Union:
    """Union-find over hashable keys."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def add(self, key: Hashable) -> None:
        self.parent.setdefault(key, key)

    def find(self, key: Hashable) -> Hashable:
        self.add(key)
        while self.parent[key] != key:
            self.parent[key] = self.parent[self.parent[key]]
            key = self.parent[key]
        return key

    def join(self, first: Hashable, second: Hashable) -> None:
        self.parent[self.find(first)] = self.find(second)
