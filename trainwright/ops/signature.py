"""What an op is, in loop dims: one signature covers its sharding, its local shapes and its reruns.

A signature names the independent iteration dimensions (*loops*) of one call and says, dim by dim, which loops each
tensor runs over: `linear` is `b* i, o i, o -> b* o`. Splitting a loop over a mesh axis then means: operands that have it
are split; operands that lack it are replicated, and their gradient comes back partial; an output that lacks it
(a *reduced* loop) is a partial sum. A dim may run over several loops, major first: `(h d)` after heads were merged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Dims = tuple[tuple[str, ...], ...]
"""The loops of each dim of a tensor, major first; an empty tuple for a dim of size 1."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor argument or result."""

    shape: tuple[int, ...]
    dtype: Any = None
    requires_grad: bool = False


@dataclass(frozen=True)
class Call:
    """One call of an op: literal arguments with a `TensorSpec` in place of each tensor."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[TensorSpec, ...]

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Every tensor argument, in the order in which they stand in the call."""
        return tuple(flatten_specs((self.args, self.kwargs)))

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """Return the argument at `index`, or by `name`, or `default`."""
        if index < len(self.args):
            return self.args[index]
        return self.kwargs.get(name, default)


def flatten_specs(tree: Any) -> Iterable[TensorSpec]:
    """Yield the `TensorSpec`s of nested arguments, left to right."""
    if isinstance(tree, TensorSpec):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from flatten_specs(item)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from flatten_specs(item)


@dataclass(frozen=True)
class Signature:
    """The loops of one call, and which of them each dim of each tensor runs over."""

    sizes: dict[str, int]
    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    reduced: frozenset[str] = field(default_factory=frozenset)
    """Loops whose split leaves the outputs partial sums."""
    whole: frozenset[str] = field(default_factory=frozenset)
    """Loops that are never split: what the op computes along them is not separable."""
    once: frozenset[int] = field(default_factory=frozenset)
    """Tensor arguments that one rank alone adds where a reduced loop is split (a bias): their gradient is not partial."""
    averaged: frozenset[str] = field(default_factory=frozenset)
    """Reduced loops over which the op takes a mean: of parts of equal size, the mean of the means is the whole one."""
    joint: frozenset[str] = field(default_factory=frozenset)
    """Loops whose split makes ranks work together inside the op: no part of it can be computed for itself."""
    ordered: frozenset[str] = field(default_factory=frozenset)
    """Loops of which a rank's part must be consecutive: of their factors the first alone is split."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Loops that one axis may split together, the op exchanging between its ranks: tensors with the first are cut along that."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a loop is whole, where that is this very call's doing."""
    discovered: bool = False
    """Found by trying shards of a small input, not written down by anybody."""
    known: bool = True
    """False: no rule; the op runs on whole tensors."""


class SignatureBuilder:
    """Collects loops while a rule walks the shapes of a call."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.whole: set[str] = set()
        self.reasons: dict[str, str] = {}

    def loop(self, name: str, size: int, whole: bool = False) -> tuple[str, ...]:
        """Return the dim entry of loop `name`; a dim of size 1 runs over nothing."""
        if size == 1:
            return ()
        self.sizes[name] = size
        if whole:
            self.whole.add(name)
        return (name,)

    def opaque(self, prefix: str, shape: Sequence[int]) -> Dims:
        """Return the dims of a tensor that can't be split at all."""
        return tuple(self.loop(f"{prefix}{dim}", size, whole=True) for dim, size in enumerate(shape))

    def build(
        self,
        inputs: Iterable[Dims],
        outputs: Iterable[Dims],
        reduced: Iterable[str] = (),
        once: Iterable[int] = (),
        averaged: bool = False,
        joint: Iterable[str] = (),
        pairs: Iterable[tuple[str, str]] = (),
        ordered: Iterable[str] = (),
    ) -> Signature:
        ins, outs = tuple(inputs), tuple(outputs)
        used = {name for dims in ins + outs for dim in dims for name in dim}
        sizes = {name: size for name, size in self.sizes.items() if name in used}
        summed = frozenset(reduced) & used
        return Signature(
            sizes, ins, outs, summed, frozenset(self.whole) & used, frozenset(once),
            averaged=summed if averaged else frozenset(), joint=frozenset(joint) & used,
            pairs=tuple(pair for pair in pairs if used.issuperset(pair)), ordered=frozenset(ordered) & used,
            reasons=self.reasons,
        )  # fmt: skip


def einsum_signature(
    pattern: str, call: Call, *, reduced: str = "", whole: str = "", once: Iterable[int] = ()
) -> Signature:
    """Build a signature from a pattern such as `b* i, o i, o -> b* o`, matched against the shapes of `call`.

    `x*` stands for any number of leading dims. A dim of size 1 broadcasts. `reduced` and `whole` list loop names.
    """
    left, _, right = pattern.partition("->")
    specs = call.inputs
    builder = SignatureBuilder()
    whole_names = set(whole.split())
    ins = [_match(text.split(), spec, builder, whole_names) for text, spec in zip(left.split(","), specs)]
    outs = [_match(text.split(), spec, builder, whole_names) for text, spec in zip(right.split(","), call.outputs)]
    if len(ins) < len(specs):
        raise ValueError(f"{call.name}: a pattern for {len(specs)} tensors is needed, {pattern!r} has {len(ins)}")
    return builder.build(ins, outs, reduced.split(), once)


def _match(names: list[str], spec: TensorSpec, builder: SignatureBuilder, whole: set[str]) -> Dims:
    labels: list[str] = []
    for name in names:
        if name.endswith("*"):
            count = len(spec.shape) - (len(names) - 1)
            labels += [f"{name[:-1]}{index}" for index in range(count)]
        else:
            labels.append(name)
    if len(labels) != len(spec.shape):
        raise ValueError(f"pattern {' '.join(names)!r} does not fit shape {spec.shape}")
    stem = {label: label.rstrip("0123456789") for label in labels}
    return tuple(
        builder.loop(label, size, whole=label in whole or stem[label] + "*" in whole)
        for label, size in zip(labels, spec.shape)
    )


def broadcast_dims(shape: Sequence[int], out: Sequence[int], builder: SignatureBuilder, prefix: str = "d") -> Dims:
    """Return the dims of an operand of `shape` that broadcasts, aligned at the right, against an output of shape `out`."""
    offset = len(out) - len(shape)
    return tuple(
        builder.loop(f"{prefix}{offset + dim}", size) if size == out[offset + dim] else ()
        for dim, size in enumerate(shape)
    )


def regroup(source: Sequence[int], target: Sequence[int]) -> tuple[dict[str, int], Dims, Dims] | None:
    """Find the common factors of two shapes of equal size, as `reshape` needs them.

    Returns (loop sizes, dims of the source, dims of the target). Where the two shapes have no common
    refinement (6×4 → 8×3) `None` is returned, and the caller treats the dims as opaque.

    >>> regroup((8, 768), (8, 12, 64))[1]
    (('r0',), ('r1', 'r2'))
    """
    sizes: dict[str, int] = {}
    dims: tuple[list[list[str]], list[list[str]]] = ([[] for _ in source], [[] for _ in target])
    left = [[dim, size] for dim, size in enumerate(source) if size != 1]
    right = [[dim, size] for dim, size in enumerate(target) if size != 1]
    # Consume both shapes from the minor end: the minor dims of a row-major reshape agree first.
    while left and right:
        factor = math.gcd(left[-1][1], right[-1][1])
        if min(left[-1][1], right[-1][1]) != factor:
            return None
        name = f"r{len(sizes)}"
        sizes[name] = factor
        for side, stack in zip(dims, (left, right)):
            side[stack[-1][0]].insert(0, name)
            stack[-1][1] //= factor
            if stack[-1][1] == 1:
                stack.pop()
    order = {name: f"r{len(sizes) - 1 - index}" for index, name in enumerate(sizes)}
    renamed = [tuple(tuple(order[name] for name in dim) for dim in side) for side in dims]
    return {order[name]: size for name, size in reversed(sizes.items())}, renamed[0], renamed[1]
