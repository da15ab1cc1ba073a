"""Groups the ops of a compiled graph into kernels, by a short form of the rules of inductor's scheduler.

    views        run no kernel
    products, convolutions, attention, scatters, sorts, and whatever is not known to be elementwise or a reduction:
                 a kernel each
    elementwise  is inlined into its readers and has no memory, unless a kernel of the former kind, the caller or the backward
                 reads it; or it has several readers and is expensive: it reads more than 4 tensors or takes more than 30
                 operations (50 on a CPU, where an exponential is expensive too); or it reads more than 8 tensors (12 on a CPU)
    reductions   have memory, unless all their readers are in the same kernel
    one kernel   fuses ops that share a tensor, are at most 64 ops apart and have matching loops: equal numbers of elements, or a
                 reduction of the last dims with an op over as many elements as it reads or makes. It never fuses two ops
                 between which an op outside the kernel stands, since the kernel would wait for itself

The thresholds are inductor's defaults (`realize_reads_threshold`, `realize_opcount_threshold`, `realize_acc_reads_threshold`, and
the distance of its `are_long_distant_nodes`). What it decides by measuring (tiles, templates for products) is not followed.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from ..ops import find
from ..torch_internals import private

Kind = Literal["view", "elementwise", "reduction", "alone"]
_FAR = 64
_REDUCTIONS = frozenset(
    [
        "sum", "mean", "amax", "amin", "prod", "var_mean", "var", "std", "any", "all", "argmax", "argmin",
        "logsumexp", "prims::var", "prims::sum", "xor_sum",
    ]
)  # fmt: skip
_ELEMENTWISE = frozenset(
    [
        "cat", "clone", "copy_", "copy", "constant_pad_nd", "embedding", "index", "gather", "index_select", "full",
        "full_like", "zeros", "ones", "zeros_like", "ones_like", "arange", "scalar_tensor", "empty", "empty_like",
        "new_zeros", "new_ones", "new_full", "new_empty", "lift_fresh_copy", "flip", "repeat", "roll", "tril", "triu",
        "slice_scatter", "select_scatter", "diagonal_scatter", "_to_copy", "native_dropout", "select_backward",
        "slice_backward", "stack", "where", "fill", "masked_fill", "rand", "randn", "rand_like", "randn_like",
        "upsample_nearest2d", "avg_pool2d", "_unsafe_index", "_unsafe_masked_index", "prims::convert_element_type",
        "prims::iota", "prims::fma", "prims::inductor_random", "prims::inductor_seeds", "prims::inductor_seed",
        "prims::inductor_lookup_seed", "prims::broadcast_in_dim", "prims::_low_memory_max_pool_with_offsets",
        "prims::_low_memory_max_pool_offsets_to_indices",
    ]
)  # fmt: skip
_VIEWS = frozenset({"_unsafe_view", "reshape"})
_DEAR_ON_CPU = frozenset({"exp", "sigmoid"})


@dataclass(eq=False)
class KernelGroup:
    """The ops that run as one kernel, in the graph's order."""

    nodes: list[fx.Node]
    """The ops that `_Values` counts as materialised; those computed inline on the way to them are in `inlined`."""
    is_fused: bool
    """False for a kernel of one op that runs as it would without a compiler."""
    inlined: dict[fx.Node, None] = field(default_factory=dict)
    reads: list[fx.Node] = field(default_factory=list)
    """The tensors from other kernels or the graph's inputs that this kernel reads, each once."""
    writes: list[fx.Node] = field(default_factory=list)
    """Those of `nodes` that an op outside the kernel, or the caller, reads."""
    dies: list[fx.Node] = field(default_factory=list)
    """The tensors, the graph's inputs included, that nothing reads after this kernel."""
    overwritable: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """For each of `writes`: the tensors among `dies` that it reads and no other op of the kernel does. Its result may take the
    place of one of them; inductor decides that op by op, so that a tensor which two ops of one kernel read keeps its place."""
    number: int = 0
    """The index of the group in the order of creation."""

    @property
    def name(self) -> str:
        """Return the name that inductor would give the kernel: `fused_add_mul_sum`."""
        ops = dict.fromkeys(private.packet(node.target).split("::")[-1] for node in (*self.inlined, *self.nodes))
        return "fused_" + "_".join(sorted(ops)[:6])


def kernel_groups(graph: fx.Graph, is_cpu: bool) -> list[KernelGroup]:
    """Return the kernels of a flat graph of ATen ops (each node with its `meta["val"]`), in an order in which they can run.

    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> made = make_fx(lambda x, w: ((x.relu() * 2) @ w).exp().sum(), tracing_mode="fake")(torch.ones(3, 4), torch.ones(4, 5))
    >>> [group.name if group.is_fused else str(group.nodes[0]) for group in kernel_groups(made.graph, is_cpu=False)]
    ['fused_mul_relu', 'mm', 'fused_exp_sum']
    """
    found = _Values(graph, is_cpu)
    groups = _grouped(found)
    return _ordered(found, groups, graph)


def kind_of(node: fx.Node) -> Kind:
    """Return how a call of a compiled graph runs: as a view, as part of a fused kernel, or as a kernel of its own."""
    target = node.target
    if target is operator.getitem:
        return "view"
    name = private.packet(target)
    if name in _VIEWS:
        return "view"
    if name in _REDUCTIONS:
        return "reduction"
    if name in _ELEMENTWISE or torch.Tag.pointwise in getattr(target, "tags", ()):
        return "elementwise"
    return "view" if private.is_view(target) else "alone"


def num_elements(value: Any) -> int:
    """Return the number of elements of a node's tensor, or of its first one; 1 if it has none."""
    tensors = tensors_of(value)
    return tensors[0].numel() if tensors else 1


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a node's value."""
    if isinstance(value, Tensor):
        return [value]
    return [item for item in value if isinstance(item, Tensor)] if isinstance(value, (tuple, list)) else []


def read_bytes(node: fx.Node, readers: Iterable[fx.Node]) -> int:
    """Return the bytes of `node` that `readers` read; from a table they read no more than the rows that they look up."""
    size = num_bytes(node.meta.get("val"))
    looked_up = [
        num_bytes(reader.meta.get("val"))
        for reader in readers
        if find(private.packet(reader.target)).reads_rows and reader.args and reader.args[0] is node
    ]
    return min(size, sum(looked_up)) if looked_up else size


def num_bytes(value: Any) -> int:
    """Return the bytes of the tensors in a node's value; expanded dims (stride 0) count once."""
    return sum(
        math.prod(size for size, step in zip(tensor.shape, tensor.stride()) if step) * tensor.element_size()
        for tensor in tensors_of(value)
    )


class _Values:
    """Holds, for every node of a graph, what it reads, and whether it is materialised in memory or inlined into its readers."""

    def __init__(self, graph: fx.Graph, is_cpu: bool) -> None:
        self.order = {node: place for place, node in enumerate(graph.nodes)}
        self.kinds: dict[fx.Node, Kind] = {node: kind_of(node) for node in graph.nodes if node.op == "call_function"}
        self.sources: dict[fx.Node, dict[fx.Node, None]] = {}
        """For each node: the materialised nodes that its value is computed from; of a materialised one, itself."""
        self.reads: dict[fx.Node, dict[fx.Node, None]] = {}
        """For each materialised node that a kernel makes: the materialised nodes that the kernel reads for it."""
        self.inlined: dict[fx.Node, dict[fx.Node, None]] = {}
        """For each node without memory: the ops, itself included, that its readers recompute inline."""
        self.on_the_way: dict[fx.Node, dict[fx.Node, None]] = {}
        """For each materialised node: the ops that its kernel computes inline before it."""
        self.is_cpu = is_cpu
        self.most_ops, self.most_reads = (50, 12) if is_cpu else (30, 8)
        for node in graph.nodes:
            self._look_at(node)

    def readers(self, node: fx.Node) -> list[fx.Node]:
        """Return the nodes that read `node`, directly or through views of it."""
        found = []
        for user in node.users:
            found += self.readers(user) if self.kinds.get(user) == "view" else [user]
        return found

    def _look_at(self, node: fx.Node) -> None:
        if node.op != "call_function":
            self.sources[node] = {node: None}
            return
        kind = self.kinds[node]
        sources = {source: None for arg in node.all_input_nodes for source in self.sources[arg]}
        on_the_way = {on: None for arg in node.all_input_nodes for on in self.inlined.get(arg, ())}
        if kind == "view":
            self.sources[node], self.inlined[node] = sources, on_the_way
        elif kind == "elementwise" and not self._has_memory(node, len(sources), len(on_the_way) + 1):
            self.sources[node], self.inlined[node] = sources, {**on_the_way, node: None}
        else:
            self.sources[node], self.reads[node], self.on_the_way[node] = {node: None}, sources, on_the_way

    def _has_memory(self, node: fx.Node, num_reads: int, num_ops: int) -> bool:
        readers = self.readers(node)
        if private.is_mutating(node.target) or not isinstance(node.meta.get("val"), Tensor):
            return True
        if any(self.kinds.get(reader, "alone") == "alone" for reader in readers) or num_reads > self.most_reads:
            return True
        is_dear = num_reads > 4 or num_ops > self.most_ops
        is_dear = is_dear or (self.is_cpu and private.packet(node.target) in _DEAR_ON_CPU)
        return len(readers) > 1 and is_dear


@dataclass
class _Loop:
    """The loops of a kernel: over `full` elements; a reduction leaves `outer` of them, by reducing the last dims if `is_inner`."""

    full: int
    outer: int | None = None
    is_inner: bool = True

    def joined(self, other: _Loop) -> _Loop | None:
        """Return the loops of one kernel that fuses both; None where the loops do not match."""
        first, second = (self, other) if self.outer is not None else (other, self)
        if second.outer is not None:
            return first if first == second else None
        if first.outer is None:
            return first if first.full == second.full else None
        return first if first.is_inner and second.full in (first.full, first.outer) else None


def _loop(node: fx.Node, kind: Kind) -> _Loop:
    size = num_elements(node.meta.get("val"))
    if kind != "reduction":
        return _Loop(size)
    read: Any = node.args[0]
    shape = read.meta["val"].shape
    dims: Any = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else range(len(shape))
    return _Loop(shape.numel(), size, not dims or len(shape) - 1 in {dim % max(len(shape), 1) for dim in dims})


def _grouped(found: _Values) -> list[KernelGroup]:
    groups: list[KernelGroup] = []
    loops: list[_Loop] = []
    group_of: dict[fx.Node, KernelGroup] = {}
    reading: dict[fx.Node, list[KernelGroup]] = defaultdict(list)
    after: dict[int, set[int]] = defaultdict(set)
    for node, reads in found.reads.items():
        kind = found.kinds[node]
        makers = {group_of[source].number for source in reads if source in group_of}
        home = None
        if kind != "alone":
            loop = _loop(node, kind)
            for group in _nearby(found, node, reads, group_of, reading):
                both = loops[group.number].joined(loop)
                if both is not None and not _reaches(after, group.number, makers - {group.number}):
                    home, loops[group.number] = group, both
                    break
        if home is None:
            home = KernelGroup([], kind != "alone", number=len(groups))
            groups.append(home)
            loops.append(_Loop(-1) if kind == "alone" else loop)
        home.nodes.append(node)
        home.inlined.update(found.on_the_way[node])
        group_of[node] = home
        for maker in makers - {home.number}:
            after[maker].add(home.number)
        for source in reads:
            reading[source].append(home)
    return groups


def _nearby(
    found: _Values,
    node: fx.Node,
    reads: Iterable[fx.Node],
    group_of: dict[fx.Node, KernelGroup],
    reading: dict[fx.Node, list[KernelGroup]],
) -> list[KernelGroup]:
    """Return the fused groups near `node` that make or read a tensor which it reads too, those that share most bytes first."""
    shared: dict[int, int] = defaultdict(int)
    candidates = {}
    for source in reads:
        size = num_bytes(source.meta.get("val"))
        makers = [group_of[source]] if source in group_of else []
        for group in {id(group): group for group in (*makers, *reading[source])}.values():
            if group.is_fused and found.order[node] - found.order[group.nodes[-1]] <= _FAR:
                shared[group.number] += size
                candidates[group.number] = group
    return [candidates[number] for number in sorted(shared, key=lambda number: (-shared[number], number))]


def _reaches(after: dict[int, set[int]], start: int, ends: set[int]) -> bool:
    """Tell whether a group of `ends` depends on `start`: then fusing a reader of it into `start` would close a cycle."""
    seen, pending = {start}, [start]
    while pending and ends:
        for group in after[pending.pop()]:
            if group in ends:
                return True
            if group not in seen:
                seen.add(group)
                pending.append(group)
    return False


def _ordered(found: _Values, groups: list[KernelGroup], graph: fx.Graph) -> list[KernelGroup]:
    """Return the groups in topological order, the graph's order among equals; fill in what each reads, writes and frees."""
    group_of = {node: group for group in groups for node in group.nodes}
    returned = {source for node in graph.nodes if node.op == "output" for arg in node.all_input_nodes
                for source in found.sources[arg]}  # fmt: skip
    waits: dict[int, set[int]] = {group.number: set() for group in groups}
    before: dict[int, set[int]] = defaultdict(set)
    read_outside = set(returned)
    for group in groups:
        reads = dict.fromkeys(source for node in group.nodes for source in found.reads[node])
        group.reads = [source for source in reads if group_of.get(source) is not group]
        read_outside.update(group.reads)
        for source in group.reads:
            if source in group_of:
                waits[group.number].add(group_of[source].number)
                before[group_of[source].number].add(group.number)
    ready = [group.number for group in groups if not waits[group.number]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        group = groups[heapq.heappop(ready)]
        ordered.append(group)
        for number in before[group.number]:
            waits[number].discard(group.number)
            if not waits[number]:
                heapq.heappush(ready, number)
    if len(ordered) < len(groups):
        raise AssertionError("kernels of a compiled graph wait for each other")
    seen: set[fx.Node] = set(returned)
    for group in reversed(ordered):
        group.writes = [node for node in group.nodes if node in read_outside]
        group.dies = [source for source in (*group.reads, *group.nodes) if source not in seen]
        seen.update(group.dies)
        num_readers = Counter(source for node in group.nodes for source in found.reads[node])
        last_read = {source for source in group.dies if num_readers[source] == 1}
        group.overwritable = {node: [s for s in found.reads[node] if s in last_read] for node in group.writes}
    return ordered
