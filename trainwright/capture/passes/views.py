"""Passes that write the many ways to say *the same elements in another shape* in one."""

from __future__ import annotations

from torch import fx

from .common import Context, aten, bound, calls, emit, is_call, operand, replace, shape, value_of_call

RESHAPES = ("view", "_unsafe_view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel")


def reshapes(graph: fx.Graph, context: Context) -> None:
    """Write every regrouping of dims as `aten.reshape(x, literal shape)`; drop those that change nothing."""
    for node in calls(graph, *RESHAPES):
        source = operand(node)
        if node.meta["val"].dtype != source.meta["val"].dtype:
            continue  # `view(dtype)` reinterprets bits
        if shape(source) == shape(node):
            replace(node, source)
        else:
            replace(node, emit(context, node, aten.reshape.default, (source, list(shape(node))), like=node))


def literal_expands(graph: fx.Graph, context: Context) -> None:
    """Write every broadcast as `aten.expand(x, literal shape)`; drop those that change nothing."""

    def write(node: fx.Node, source: fx.Node) -> None:
        if shape(source) != shape(node):
            source = emit(context, node, aten.expand.default, (source, list(shape(node))), like=node)
        replace(node, source)

    for node in calls(graph, "expand", "expand_as", "broadcast_to"):
        write(node, operand(node))
    for node in calls(graph, "broadcast_tensors"):  # as `mse_loss` and others begin
        sources = bound(node)["tensors"]
        for item in [*node.users]:
            write(item, sources[item.args[1]])  # type: ignore[index]
        graph.erase_node(node)


def drop_contiguous(graph: fx.Graph, context: Context) -> None:
    """Drop `contiguous` of what is contiguous, and where only reshapes read it that copy, or give the same strides, without it."""

    def is_same(reshape: fx.Node, source: fx.Node) -> bool:
        given = value_of_call(context, reshape.target, (source, *reshape.args[1:]), reshape.kwargs)  # type: ignore[arg-type]
        return given.stride() == reshape.meta["val"].stride()

    for node in calls(graph, "contiguous"):
        source = operand(node)
        unchanged = node.meta["val"].stride() == source.meta["val"].stride()
        plain = not node.kwargs.get("memory_format") and len(node.args) == 1
        if unchanged or (plain and all(is_call(user, "reshape") and is_same(user, source) for user in node.users)):
            replace(node, source)
