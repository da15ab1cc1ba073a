"""Passes for masks made of the batch: `mask[arange(b)[:, None], arange(s)]` takes everything, so it is a view.

With such an index a rank that holds some rows of the batch would look for rows it does not have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from .common import Context, aten, bound, calls, emit, replace, shape
from .constants import evaluate_constants, uniform


def gathers_to_views(graph: fx.Graph, context: Context) -> None:
    """Turn `x[i, j, …]`, each index an arange over its whole dim along an axis of its own, into a permuted view."""
    gathers = calls(graph, "index")
    indices = [index for node in gathers for index in bound(node)["indices"] if isinstance(index, fx.Node)]
    values = evaluate_constants(graph, dict.fromkeys(indices), context.constants)
    for node in gathers:
        source, given = bound(node)["self"], bound(node)["indices"]
        known = [values.get(index) for index in given]
        if not all(isinstance(each, Tensor) for each in known):
            continue
        axes = _axes(shape(source), known, len(shape(node)))
        if axes is not None:
            replace(node, _view(node, source, axes, context))


def _axes(sizes: tuple[int, ...], indices: list[Any], rank: int) -> list[int] | None:
    """Return for each dim of the source its place in the result, or None when some index does not take it whole."""
    num_broadcast = rank - (len(sizes) - len(indices))
    axes: list[int] = []
    for size, index in zip(sizes, indices):
        axis = _whole_arange(index, size, num_broadcast)
        if axis is None:
            return None
        axes.append(axis)
    axes.extend(range(num_broadcast, rank))
    placed = [axis for axis, size in zip(axes, sizes) if size > 1]
    return axes if len(set(placed)) == len(placed) else None


def _whole_arange(index: Tensor, size: int, rank: int) -> int | None:
    """The broadcast axis along which `index` runs from 0 to size - 1; -1 for the only element of a dim of 1."""
    if index.dtype == torch.bool:
        return None
    if size == 1:
        return -1 if uniform(index) is not None and int(index.reshape(-1)[0]) == 0 else None
    varying = [dim for dim in range(index.dim()) if index.shape[dim] > 1 and index.stride(dim) != 0]
    if len(varying) != 1 or index.shape[varying[0]] != size:
        return None
    line = index[tuple(slice(None) if dim == varying[0] else 0 for dim in range(index.dim()))]
    return varying[0] + rank - index.dim() if torch.equal(line, torch.arange(size, dtype=line.dtype)) else None


def _view(node: fx.Node, source: fx.Node, axes: list[int], context: Context) -> fx.Node:
    sizes = shape(source)
    kept = [dim for dim, axis in enumerate(axes) if axis >= 0 and (sizes[dim] > 1 or axis >= 0)]
    order = sorted(kept, key=lambda dim: axes[dim])
    dropped = [dim for dim in range(len(sizes)) if dim not in kept]
    full = dropped + order
    if full != list(range(len(sizes))):
        source = emit(context, node, aten.permute.default, (source, full), like=node)
    target = [1] * len(shape(node))
    for dim in order:
        target[axes[dim]] = sizes[dim]
    if tuple(target) != shape(source):
        source = emit(context, node, aten.reshape.default, (source, target), like=node)
    if tuple(target) != shape(node):
        source = emit(context, node, aten.expand.default, (source, list(shape(node))), like=node)
    return source


def drop_neutral_masks(graph: fx.Graph, context: Context) -> None:
    """Turn `x & all-true` into `x`, broadcast: the conjunction would write batch times sequence² elements."""
    conjunctions = [node for node in calls(graph, "bitwise_and", "logical_and", "__and__") if _is_boolean(node)]
    operands = [each for node in conjunctions for each in node.args[:2] if isinstance(each, fx.Node)]
    values = evaluate_constants(graph, dict.fromkeys(operands), context.constants)
    for node in conjunctions:
        for neutral, other in (node.args[:2], node.args[1::-1]):
            known = values.get(neutral) if isinstance(neutral, fx.Node) else None
            element = uniform(known) if known is not None else None
            if element is not None and bool(element) and isinstance(other, fx.Node):
                if shape(other) != shape(node):
                    other = emit(context, node, aten.expand.default, (other, list(shape(node))), like=node)
                replace(node, other)
                break


def _is_boolean(node: fx.Node) -> bool:
    operands = [each for each in node.args[:2] if isinstance(each, fx.Node)]
    return len(operands) == 2 and all(each.meta["val"].dtype == torch.bool for each in operands)
