"""Passes that drop what says nothing: checks, copies of constants, devices, conversions to the type at hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ...torch_internals import private
from .common import (
    Context,
    aten,
    bound,
    calls,
    emit,
    is_call,
    mutated_placeholders,
    needing_gradient,
    operand,
    replace,
    shape,
    storage_root,
)

CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
NAMES = ("alias", "lift_fresh", "lift")


def drop_bookkeeping(graph: fx.Graph, context: Context) -> None:
    """Drop checks that bake in type and device, other names of one tensor, and batch entries that are no tensors."""
    del context
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        if is_call(node, *CHECKS) or "guards" in private.packet(node.target):
            graph.erase_node(node)
        elif is_call(node, *NAMES):
            replace(node, operand(node))
    for node in [node for node in graph.nodes if node.op == "placeholder"]:
        if node.meta["role"] == "input" and not isinstance(node.meta["val"], Tensor) and not node.users:
            graph.erase_node(node)


SYNONYMS = {f"__{name}__": f"bitwise_{name}" for name in ("and", "or", "xor")}


def plain_names(graph: fx.Graph, context: Context) -> None:
    """Call the operators `&`, `|`, `^` by the names of the ops they are."""
    del context
    for node in calls(graph, *SYNONYMS):
        synonym = private.overload_of(node.target, SYNONYMS[private.packet(node.target)])  # type: ignore[arg-type]
        if synonym is not None:
            node.target = synonym


def drop_copies(graph: fx.Graph, context: Context) -> None:
    """Drop copies that nobody can tell from the original now that no call writes an activation in place."""
    del context
    written = mutated_placeholders(graph)
    gradient = needing_gradient(graph)
    for node in calls(graph, "clone", "lift_fresh_copy", "detach"):
        source = operand(node)
        detached = is_call(node, "detach")
        if source in gradient if detached else storage_root(source) in written:
            continue
        if detached or node.meta["val"].stride() == source.meta["val"].stride():
            replace(node, source)


def unbake_devices(graph: fx.Graph, context: Context) -> None:
    """Let factories make their tensors wherever the graph runs."""
    del context
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        kept = {key: value for key, value in node.kwargs.items() if key not in ("device", "pin_memory")}
        if kept.get("layout") is torch.strided:
            del kept["layout"]
        if len(kept) != len(node.kwargs):
            node.kwargs = kept


CONVERSIONS = ("to", "_to_copy", "type_as")


def drop_conversions(graph: fx.Graph, context: Context) -> None:
    """Write every conversion as `aten.to.dtype(x, dtype)`; drop those to the type at hand."""
    for node in calls(graph, *CONVERSIONS):
        source = operand(node)
        wanted, strides = node.meta["val"].dtype, node.meta["val"].stride()
        if wanted != source.meta["val"].dtype:
            replace(node, emit(context, node, aten.to.dtype, (source, wanted), like=node))
        elif strides == source.meta["val"].stride():
            replace(node, source)
        else:  # only the memory format changes
            format_ = node.kwargs.get("memory_format") or torch.contiguous_format
            replace(node, emit(context, node, aten.contiguous.default, (source,), like=node, memory_format=format_))


def drop_whole_slices(graph: fx.Graph, context: Context) -> None:
    """Drop slices that take everything; write the ends of the others as they are."""
    del context
    for node in calls(graph, "slice"):
        named = bound(node)
        source = named["self"]
        if shape(source) == shape(node):
            replace(node, source)
            continue
        size = shape(source)[named["dim"]]
        start, end = _within(named["start"] or 0, size), _within(_or(named["end"], size), size)
        node.args = (source, named["dim"], start, end, *((named["step"],) if named["step"] != 1 else ()))
        node.kwargs = {}


def _or(given: Any, otherwise: int) -> Any:
    return otherwise if given is None else given


def _within(index: int, size: int) -> int:
    return min(max(index + size if index < 0 else index, 0), size)


DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


def drop_inactive_dropout(graph: fx.Graph, context: Context) -> None:
    """Drop dropout of probability zero, or in evaluation mode; active dropout stays as it is."""
    del context
    for node in calls(graph, *DROPOUTS):
        named = bound(node)
        if named["p"] == 0 or not named["train"]:
            replace(node, named["input"])


def dense_gradients(graph: fx.Graph, context: Context) -> None:
    """Give tables of embeddings dense gradients, which have the same values; optimizers of plans keep dense states."""
    for node in calls(graph, "embedding", "embedding_bag"):
        if bound(node)["sparse"]:
            place = [name for name, *_ in private.arguments(node.target)].index("sparse")  # type: ignore[arg-type]
            if place < len(node.args):
                node.args = (*node.args[:place], False, *node.args[place + 1 :])
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "sparse"}
            context.notes.append(
                f"sparse=True was left out of {node.meta['path'] or 'an embedding'}: gradients of tables are dense"
            )
