"""What a graph computes from nothing: which nodes, and their values, without the memory that they would take.

A mask of 64 by 131072 by 131072 elements is a fact that takes a line to say. So values are held as small tensors
expanded over the dims along which they do not vary, and a comparison of two aranges as `Causal`: one scalar on and
below the diagonal, one above.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ...torch_internals import private
from .common import mutated_placeholders

LIMIT = 2**26
"""Elements beyond which a value is not computed (64 MiB of booleans)."""

COLLAPSE_LIMIT = 2**22


@dataclass(frozen=True)
class Causal:
    """Holds `inside` where column ≤ row, else `outside` (0-d), in its last two dims, whatever the others."""

    inside: Tensor
    outside: Tensor
    shape: tuple[int, ...]


Value = Tensor | Causal


def constant_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the calls, buffers and constants that depend on no parameter, batch entry or random number.

    A buffer that the step writes is none of them.
    """
    written = mutated_placeholders(graph)
    constant: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            fixed = node.meta["role"] in ("buffer", "const") and node not in written
        elif node.op == "call_function":
            operands = node.all_input_nodes
            fixed = all(operand in constant for operand in operands) and not private.is_random(node.target)
            fixed = fixed and not private.is_mutating(node.target)
        else:
            fixed = False
        if fixed:
            constant.add(node)
    return constant


def evaluate_constants(
    graph: fx.Graph, nodes: Iterable[fx.Node], known: Mapping[str, Tensor], limit: int = LIMIT
) -> dict[fx.Node, Value]:
    """Return the values of those `nodes` that are constant and computable with `limit` elements at a time.

    known: buffer's or constant's name → its real CPU value. A value comes as a tensor, expanded (stride 0) where it
    does not vary, or as `Causal`; what depends on a value not known is left out.
    """
    evaluator = _Evaluator(constant_nodes(graph), known, limit)
    found = {node: evaluator.value(node) for node in nodes}
    return {node: value for node, value in found.items() if isinstance(value, Tensor | Causal)}


class _Evaluator:
    def __init__(self, constant: set[fx.Node], known: Mapping[str, Tensor], limit: int) -> None:
        self._constant = constant
        self._known = known
        self._limit = limit
        self._memo: dict[fx.Node, Any] = {}

    def value(self, node: fx.Node) -> Any:
        """The node's value, or None when it is not to be had. Iterative: chains may be long."""
        pending = [node]
        while pending:
            top = pending[-1]
            missing = [operand for operand in top.all_input_nodes if operand not in self._memo]
            if top in self._memo or top not in self._constant:
                self._memo.setdefault(top, None)
                pending.pop()
            elif missing:
                pending.extend(missing)
            else:
                self._memo[top] = self._compute(top)
                pending.pop()
        return self._memo[node]

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._known.get(node.meta["name"])
        operands = [self._memo[operand] for operand in node.all_input_nodes]
        if any(operand is None for operand in operands):
            return None
        try:
            return self._call(node, operands)
        except (RuntimeError, TypeError, IndexError, NotImplementedError):
            raise
            return None  # an op that cannot be run here is not evaluated; nothing is lost but a pattern

    def _call(self, node: fx.Node, operands: list[Any]) -> Any:
        fake = node.meta["val"]
        if any(isinstance(operand, Causal) for operand in operands):
            return self._call_causal(node, fake)
        args, kwargs = map_arg(node.args, self._memo.get), map_arg(node.kwargs, self._memo.get)
        if node.target is operator.getitem:
            return args[0][args[1]]  # type: ignore[index]
        if not isinstance(fake, Tensor):
            return node.target(*args, **kwargs) if _elements(fake) <= self._limit else None  # type: ignore[operator]
        if is_pointwise(node.target):
            return self._pointwise(node, args, kwargs, fake)
        triangle = _triangle(node, args, fake)
        if triangle is not None:
            return triangle
        if fake.numel() > self._limit and not private.is_view(node.target) and not _makes_uniform(node.target):
            return None
        return collapse(_run(node.target, args, kwargs, fake))

    def _pointwise(self, node: fx.Node, args: Any, kwargs: Any, fake: Tensor) -> Any:
        """Compute on what varies; a comparison of a row of numbers and a column of numbers may be `Causal`."""
        small = [_narrowed(arg, fake.dim()) if isinstance(arg, Tensor) else arg for arg in args]
        shapes = [arg.shape for arg in small if isinstance(arg, Tensor)]
        causal = _comparison(node.target, small, tuple(fake.shape))
        if causal is not None:
            return causal
        if torch.broadcast_shapes(*shapes).numel() > self._limit:
            return None
        result: Tensor = node.target(*small, **_without_device(kwargs))  # type: ignore[operator]
        return collapse(result.to(fake.dtype)).expand(fake.shape)

    def _call_causal(self, node: fx.Node, fake: Any) -> Any:
        """Ops on `Causal` values: pointwise with uniform ones, and views that leave the last two dims alone."""
        operands = [self._memo[operand] for operand in node.all_input_nodes]
        size = next(operand for operand in operands if isinstance(operand, Causal)).shape[-2:]
        if not isinstance(fake, Tensor) or tuple(fake.shape[-2:]) != size:
            return None
        if is_pointwise(node.target) or _keeps_last_dims(node):
            inside, outside = (self._scalar_call(node, part) for part in ("inside", "outside"))
            return None if inside is None or outside is None else Causal(inside, outside, tuple(fake.shape))
        return None

    def _scalar_call(self, node: fx.Node, part: str) -> Tensor | None:
        """Run the op on one scalar in place of each operand."""
        scalars = {operand: _scalar(self._memo[operand], part) for operand in node.all_input_nodes}
        if any(scalar is None for scalar in scalars.values()):
            return None
        if _keeps_last_dims(node):
            return next(iter(scalars.values()))
        result: Tensor = node.target(*map_arg(node.args, scalars.get), **_without_device(node.kwargs))  # type: ignore[operator]
        return result.to(node.meta["val"].dtype)


def collapse(tensor: Any) -> Any:
    """Return the tensor, expanded from one slice along every dim in which it does not vary."""
    if not isinstance(tensor, Tensor):
        return tensor
    shape, small = tensor.shape, _narrowed(tensor, tensor.dim())
    if small.numel() > COLLAPSE_LIMIT * 16:
        return tensor
    for dim in range(small.dim()):
        first = small.narrow(dim, 0, min(1, small.size(dim)))
        if small.size(dim) > 1 and bool((small == first).all()):
            small = first
    return small.contiguous().expand(shape)


def uniform(value: Any) -> Tensor | None:
    """Return the one element that all of `value` equals, or None."""
    if isinstance(value, Causal):
        return value.inside if torch.equal(value.inside, value.outside) else None
    small = _narrowed(value, value.dim())
    if small.numel() == 1:
        return small.reshape(())
    return None


def is_pointwise(target: Any) -> bool:
    """Tell whether the op computes each element from the operands' elements at its place."""
    if not isinstance(target, private.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or private.packet(target) in ("to", "clone", "contiguous", "where")


def _narrowed(tensor: Tensor, rank: int) -> Tensor:
    """One slice along each dim of stride 0, with leading dims of 1 up to `rank`."""
    index = tuple(
        slice(0, 1) if stride == 0 and size > 1 else slice(None) for size, stride in zip(tensor.shape, tensor.stride())
    )
    small = tensor[index] if index else tensor
    return small.reshape((1,) * (rank - small.dim()) + tuple(small.shape)) if tensor.dim() else small


def _scalar(value: Any, part: str) -> Tensor | None:
    return getattr(value, part) if isinstance(value, Causal) else uniform(value)


def _without_device(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "memory_format")}


def _elements(fakes: Any) -> int:
    return sum(fake.numel() for fake in fakes if isinstance(fake, Tensor)) if isinstance(fakes, list | tuple) else 0


UNIFORM = {"ones": 1, "zeros": 0, "full": None, "new_ones": 1, "new_zeros": 0, "new_full": None,
           "ones_like": 1, "zeros_like": 0, "full_like": None}  # fmt: skip


def _makes_uniform(target: Any) -> bool:
    return private.packet(target) in UNIFORM


def _run(target: Any, args: Any, kwargs: Any, fake: Tensor) -> Tensor:
    """Run a call; a uniform factory makes one element and expands it."""
    name = private.packet(target)
    if name in UNIFORM:
        fill: Any = args[-1] if UNIFORM[name] is None else UNIFORM[name]
        return torch.full((), fill, dtype=fake.dtype).expand(fake.shape)
    if name in ("reshape", "view") and fake.numel() > LIMIT:
        return args[0].view(args[1])  # raises, and so gives up, where it would have to copy
    result: Tensor = target(*args, **_without_device(kwargs))
    return result


KEEPERS = ("expand", "unsqueeze", "squeeze", "reshape", "repeat", "slice", "view")


def _keeps_last_dims(node: fx.Node) -> bool:
    """A view that leaves the last two dims as they are. The caller has compared their sizes, before and after."""
    name = private.packet(node.target)
    if name == "unsqueeze":
        rank, dim = node.meta["val"].dim(), int(node.args[1])  # type: ignore[arg-type]
        return dim % rank < rank - 2
    return name in KEEPERS


def _triangle(node: fx.Node, args: Any, fake: Tensor) -> Causal | None:
    """`tril` or `triu(1)` of a uniform square is `Causal`."""
    name = private.packet(node.target)
    diagonal = args[1] if len(args) > 1 else node.kwargs.get("diagonal", 0)
    if (name, diagonal) not in (("tril", 0), ("triu", 1)) or fake.shape[-1] != fake.shape[-2]:
        return None
    filled = uniform(args[0])
    if filled is None:
        return None
    zero = torch.zeros_like(filled)
    return Causal(*((filled, zero) if name == "tril" else (zero, filled)), tuple(fake.shape))


COMPARISONS = {"le": (0, True), "ge": (1, True), "gt": (0, False), "lt": (1, False)}
"""Comparison → which operand must be the column's for `Causal`, and the value on and below the diagonal."""


def _comparison(target: Any, operands: list[Any], shape: tuple[int, ...]) -> Value | None:
    """`column ≤ row` of two rising vectors that cross at the diagonal, or a comparison that holds everywhere."""
    name = private.packet(target)
    if name not in COMPARISONS or len(operands) != 2 or not all(isinstance(each, Tensor) for each in operands):
        return None
    which, inside = COMPARISONS[name]
    columns, rows = _vector(operands[which], -1), _vector(operands[1 - which], -2)
    if columns is None or rows is None or len(shape) < 2:
        return None
    if bool(columns.max() <= rows.min()) or bool(columns.min() > rows.max()):
        return torch.tensor(bool(columns.max() <= rows.min()) == inside).expand(shape)
    if len(columns) != len(rows) or shape[-2] != shape[-1]:
        return None
    rising = bool((columns.diff() >= 0).all() and (rows.diff() >= 0).all())
    crossing = bool((columns <= rows).all() and (columns[1:] > rows[:-1]).all())
    return Causal(torch.tensor(inside), torch.tensor(not inside), shape) if rising and crossing else None


def _vector(tensor: Tensor, dim: int) -> Tensor | None:
    """The tensor as a vector when it varies along `dim` alone."""
    if tensor.dim() < 2 or tensor.numel() != tensor.shape[dim] or tensor.numel() < 2:
        return None
    return tensor.reshape(-1)


__all__ = ["Causal", "Value", "collapse", "constant_nodes", "evaluate_constants", "uniform"]
