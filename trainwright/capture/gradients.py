"""Completes the graph of a forward that takes a gradient (`torch.autograd.grad`), as physics-informed losses and penalties do.

What the engine runs is written into the graph like any other call, but what autograd saved for it comes back as other tensor
objects, which an export takes for constants. They are the results of earlier calls, told by their memory. A convolution's
backward that is asked for the gradient of its input alone becomes the convolution that it is. Backward ops of norms, and
others that leave results out, are refused: they read statistics that no rule follows.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx

from ..torch_internals import private

aten = torch.ops.aten
LIFTED = "lifted_tensor_"
"""What torch names the tensors that a forward reads and that come from none of its inputs, parameters and buffers."""


def unfollowed(program: Any) -> list[fx.Node]:
    """Return the placeholders of results of the forward that an exported graph reads and does not make."""
    lifted = {
        spec.arg.name: spec.target for spec in program.graph_signature.input_specs if LIFTED in (spec.target or "")
    }
    nodes = [node for node in program.graph.find_nodes(op="placeholder") if node.name in lifted]
    fakes = [node for node in nodes if isinstance(program.constants.get(lifted[node.name]), private.FakeTensor)]
    return [node for node in fakes if any(user.users for user in node.users)]


def follow_saved(program: Any) -> None:
    """Let the graph read the call that made a saved tensor in place of it, and convolve where a backward op is that."""
    graph: fx.Graph = program.graph
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    order = {node: position for position, node in enumerate(graph.nodes)}
    results: defaultdict[Any, list[fx.Node]] = defaultdict(list)
    if saved := unfollowed(program):
        for node in order:
            if isinstance(node.meta.get("val"), Tensor) and LIFTED not in node.name:
                results[_place(node.meta["val"])].append(node)
    for placeholder in saved:
        alike = results[_place(program.constants[targets[placeholder.name]])]
        for user in list(placeholder.users):
            found = _last([node for node in alike if order[node] < order[user]])
            if found is not None:
                user.replace_input_with(placeholder, found)
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        if [value is not None for value in node.meta["val"]] == [True, False, False]:
            _as_convolution(graph, node)


def without_rules(program: Any) -> list[fx.Node]:
    """Return the calls of a gradient that a graph cannot hold.

    They read what no call of the graph makes, or the statistics of a norm, or leave out a result.
    """
    readers = [user for node in unfollowed(program) for user in node.users]
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return readers + [node for node in calls if _leaves_out(node) or _reads_statistics(node)]


def _leaves_out(node: fx.Node) -> bool:
    values = node.meta.get("val")
    is_backward = isinstance(node.target, private.OpOverload) and private.packet(node.target).endswith("_backward")
    return is_backward and isinstance(values, (tuple, list)) and any(value is None for value in values)


def _reads_statistics(node: fx.Node) -> bool:
    if isinstance(node.target, private.OpOverload):
        return private.packet(node.target) in ("native_layer_norm_backward", "native_batch_norm_backward")
    if node.target is not operator.getitem:
        return False
    source, index = node.args  # the backward of group norms is written in ops that read them
    of_group_norm = isinstance(source, fx.Node) and source.target is aten.native_group_norm.default
    return bool(of_group_norm and index and node.users)


def _last(alike: list[fx.Node]) -> fx.Node | None:
    """Return the last of nodes that lie alike; the last through which a gradient goes, if there is one."""
    followed = [node for node in alike if node.meta["val"].requires_grad]
    return followed[-1] if followed else alike[-1] if alike else None


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return what is equal for tensors that lie alike in the same memory."""
    lies = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    return private.storage_of(tensor).cdata, *lies, tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _as_convolution(graph: fx.Graph, node: fx.Node) -> None:
    """Put the convolution that the gradient of an input is in place of a backward op that gives nothing else."""
    arguments: tuple[Any, ...] = node.args
    grad, x, weight, _, stride, padding, dilation, transposed, _, groups, _ = arguments
    sizes = zip(
        x.meta["val"].shape[2:], grad.meta["val"].shape[2:], weight.meta["val"].shape[2:], stride, padding, dilation
    )
    left = [0] * len(stride)
    if not transposed:
        left = [
            size - ((out - 1) * step - 2 * pad + gap * (kernel - 1) + 1) for size, out, kernel, step, pad, gap in sizes
        ]
    with graph.inserting_before(node):
        call = (grad, weight, None, stride, padding, dilation, not transposed, left, groups)
        made = graph.call_function(aten.convolution.default, call)
    made.meta = {**node.meta, "val": node.meta["val"][0]}
    for item in list(node.users):
        item.replace_all_uses_with(made)
        graph.erase_node(item)
    graph.erase_node(node)
