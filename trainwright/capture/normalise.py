"""Bring an exported graph into few forms, once, for profiler, planner and runtime alike.

`PASSES` is the whole order of application; each pass takes the flat graph and leaves it correct. Afterwards the graph
is run on fakes with gradients on, which gives every node its final value and proves that the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from . import _torch_private as private
from .normalise_common import Context, mutated_placeholders, written_operands
from .normalise_constants import constant_nodes
from .normalise_inplace import functionalise
from .normalise_linear import fuse_linears
from .normalise_masks import restore_attention
from .normalise_gathers import drop_neutral_masks, gathers_to_views
from .normalise_regions import flatten_regions
from .normalise_simple import (
    drop_bookkeeping,
    drop_conversions,
    drop_copies,
    drop_inactive_dropout,
    drop_whole_slices,
    plain_names,
    unbake_devices,
)
from .normalise_views import drop_contiguous, literal_expands, reshapes

__all__ = ["PASSES", "Context", "normalise"]

Pass = Callable[[fx.Graph, Context], None]


def _drop_dead(graph: fx.Graph, context: Context) -> None:
    """Drop what nothing reads and what writes nothing that lasts."""
    del context
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or _writes(node))


def _writes(node: fx.Node) -> bool:
    return bool(written_operands(node))


PASSES: tuple[Pass, ...] = (
    drop_bookkeeping,
    functionalise,
    plain_names,
    unbake_devices,
    drop_conversions,
    drop_copies,
    drop_whole_slices,
    drop_inactive_dropout,
    reshapes,
    literal_expands,
    drop_contiguous,
    fuse_linears,
    _drop_dead,
    gathers_to_views,
    restore_attention,
    drop_neutral_masks,
    _drop_dead,
)


def normalise(exported: fx.Graph, modules: nn.Module, context: Context) -> fx.Graph:
    """Return `exported` as one flat, normalised graph; `modules` holds its nested regions."""
    graph = flatten_regions(exported, modules, context)
    for apply in PASSES:
        apply(graph, context)
    propagate(graph, context)
    _mark(graph)
    _find_loss(graph)
    name_calls(graph)
    graph.lint()
    return graph


def propagate(graph: fx.Graph, context: Context) -> None:
    """Run the graph on fakes, gradients on: every node's `val` (no history) and `requires_grad`."""
    values: dict[fx.Node, Any] = {}
    last_use = _last_uses(graph)
    with context.mode, torch.enable_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = node.meta["val"].detach().requires_grad_(bool(node.meta.get("requires_grad")))
            elif node.op == "call_function":
                result = node.target(*map_arg(node.args, values.get), **map_arg(node.kwargs, values.get))
                values[node] = result
            else:
                continue
            node.meta["requires_grad"] = _any_requires_grad(values[node])
            node.meta["val"] = _without_history(values[node])
            for done in last_use.get(node, ()):
                del values[done]


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            last[operand] = node
    table: dict[fx.Node, list[fx.Node]] = {}
    for operand, node in last.items():
        table.setdefault(node, []).append(operand)
    return table


def _any_requires_grad(result: Any) -> bool:
    if isinstance(result, list | tuple):
        return any(_any_requires_grad(part) for part in result)
    return isinstance(result, Tensor) and result.requires_grad


def _without_history(result: Any) -> Any:
    """The fake, detached; a leaf keeps `requires_grad`, so that frozen parameters show."""
    if isinstance(result, list | tuple):
        return type(result)(_without_history(part) for part in result)
    if not isinstance(result, Tensor):
        return result
    return result if result.is_leaf and result.grad_fn is None else result.detach()


def _find_loss(graph: fx.Graph) -> None:
    """Say which output is the loss: the first by construction, dropped there when the model returns it as well."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    loss, *own = output.args[0]  # type: ignore[misc]
    if loss in own:
        output.args = (tuple(own),)
    output.meta["loss_index"] = own.index(loss) if loss in own else 0


def _mark(graph: fx.Graph) -> None:
    """Mark what depends on nothing, and what writes a buffer or parameter."""
    constant = constant_nodes(graph)
    for node in graph.nodes:
        node.meta["constant"] = node in constant
    for placeholder in mutated_placeholders(graph):
        placeholder.meta["mutated"] = True


SHORT = {
    "scaled_dot_product_attention": "sdpa",
    "cross_entropy_loss": "cross_entropy",
    "linear_io": "linear",
    "convolution": "conv",
    "reshape": "view",
}


def name_calls(graph: fx.Graph) -> None:
    """Give every call its `key`: the module's path, the op, and from the second such op in that module on, `#k`."""
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        name = private.packet(node.target)
        key = f"{node.meta['path']}:{SHORT.get(name, name)}"
        counts[key] = counts.get(key, 0) + 1
        node.meta["key"] = key if counts[key] == 1 else f"{key}#{counts[key]}"
