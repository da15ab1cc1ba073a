"""Bring an exported graph into few forms, once, for profiler, planner and runtime alike.

`PASSES` is the whole order of application; each pass takes the flat graph and leaves it correct. Afterwards the graph
is run on fakes with gradients on, which gives every node its final value and proves that the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx, nn

from ...torch_internals import private
from ..block_paths import place_in_blocks
from .activations import restore_activations
from .common import Context, propagate, written_operands
from .constants import constant_nodes
from .effects import copy_before_writes, mark_effects
from .gathers import drop_neutral_masks, gathers_to_views
from .inplace import functionalise
from .linear import fuse_linears
from .masks import restore_attention
from .regions import flatten_regions
from .simple import (
    dense_gradients,
    drop_bookkeeping,
    drop_conversions,
    drop_copies,
    drop_inactive_dropout,
    drop_whole_slices,
    plain_names,
    unbake_devices,
)
from .views import drop_contiguous, literal_expands, reshapes

__all__ = ["PASSES", "Context", "normalise"]

Pass = Callable[[fx.Graph, Context], None]


def _drop_dead(graph: fx.Graph, context: Context) -> None:
    """Drop what nothing reads and what writes nothing that lasts."""
    del context
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output") or _writes(node))
    for node in graph.find_nodes(op="placeholder"):
        if node.meta["role"] == "const" and not node.users:
            graph.erase_node(node)  # such as the list of its weights that an LSTM keeps beside its parameters


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
    dense_gradients,
    reshapes,
    literal_expands,
    drop_contiguous,
    fuse_linears,
    restore_activations,
    _drop_dead,
    gathers_to_views,
    restore_attention,
    drop_neutral_masks,
    _drop_dead,
    copy_before_writes,
)


def normalise(exported: fx.Graph, modules: nn.Module, context: Context) -> fx.Graph:
    """Return `exported` as one flat, normalised graph; `modules` holds its nested regions."""
    graph = flatten_regions(exported, modules, context)
    for apply in PASSES:
        apply(graph, context)
    propagate(graph, context)
    _mark(graph)
    _find_loss(graph)
    place_in_blocks(graph)
    name_calls(graph)
    graph.lint()
    return graph


def _find_loss(graph: fx.Graph) -> None:
    """Say which output is the loss: the first by construction, dropped there when the model returns it as well."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    loss, *own = output.args[0]  # type: ignore[misc]
    if loss in own:
        output.args = (tuple(own),)
    output.meta["loss_index"] = own.index(loss) if loss in own else 0


def _mark(graph: fx.Graph) -> None:
    """Mark what depends on nothing, and what writes buffers or shares memory with what is written."""
    constant = constant_nodes(graph)
    for node in graph.nodes:
        node.meta["constant"] = node in constant
    mark_effects(graph)


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
        name = private.packet(node.target).rpartition("::")[2]
        key = f"{node.meta['path']}:{SHORT.get(name, name)}"
        counts[key] = counts.get(key, 0) + 1
        node.meta["key"] = key if counts[key] == 1 else f"{key}#{counts[key]}"
