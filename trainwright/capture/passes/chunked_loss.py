"""The head and its loss as one op over chunks of rows, in place of logits that stand whole.

    linear → (conversion | view | slice | transposition)* → cross_entropy      becomes      (the same)* → linear_cross_entropy

What moved or cut the rows of the logits does so to the hidden states. Outputs that were logits are None.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...artifacts import UserError
from ...ops.functional import linear_io
from ...ops.linear_loss import NAME, linear_cross_entropy
from ..export import Captured
from .common import aten, bound, calls, is_call, shape, value

LEAST_CHUNKS, MOST_CHUNKS = 2, 64
"""One chunk has whole logits. With more than the most, products are small, and each collective of split classes sends little."""


def chunk_losses(captured: Captured, num_chunks: int | None = None, micro_batches: int = 1) -> Captured:
    """Rewrite the cross-entropies of linear maps in the graph of `captured`, in place, and return it.

    num_chunks: into how many chunks each rank cuts its rows; None: so many that a chunk's logits take about what all the batch's
    hidden states take (classes / features, as a power of two). Of one of several `micro_batches`, whose rows are fewer, chunks of
    as many rows: smaller products would read their weight more often than they compute. `UserError` where there is no such loss.
    """
    found = [_match(loss) for loss in calls(captured.graph, "cross_entropy_loss")]
    heads = [head for head in found if isinstance(head, _Head)]
    if not heads:
        why = next((text for text in found if isinstance(text, str)), "the graph has no cross_entropy over labels")
        raise UserError(
            f"a linear head with the cross-entropy of its logits is needed for a loss in chunks; {why}; leave --loss-chunks out"
        )
    num = max(LEAST_CHUNKS, max(map(_fitting, heads)) // micro_batches) if num_chunks is None else num_chunks
    for head in heads:
        _fuse(captured.graph, head, num)
    captured.graph.lint()
    captured.loss_chunks = num
    captured.notes += (f"the loss is taken in {num} chunks of each rank's rows: no logits among a step's outputs",)
    return captured


@dataclass
class _Head:
    linear: fx.Node
    chain: list[fx.Node]
    """What stands between the linear map and the loss, in order."""
    loss: fx.Node

    @property
    def logits(self) -> fx.Node:
        return self.chain[-1] if self.chain else self.linear


def _fitting(head: _Head) -> int:
    """Return the power of two next above classes / features, from 2 to `MOST_CHUNKS`."""
    ratio = shape(head.linear)[-1] / shape(_operands(head.linear)[0])[-1]
    return next((num for num in (2, 4, 8, 16, 32) if num >= ratio), MOST_CHUNKS)


def _match(loss: fx.Node) -> _Head | str:
    """Return the loss with its head, or why it has none that can be fused."""
    named = bound(loss)
    key = loss.meta["key"]
    if named["reduction"] not in (1, 2) or value(named["target"]).is_floating_point() or len(shape(named["self"])) < 2:
        return f"{key} is no sum or mean over labels"
    chain: list[fx.Node] = []
    node, by, classes = named["self"], loss, 1
    while not _is_linear(node):
        if not _read_by(node, by):
            return f"{_others(node, by)} reads the logits too"
        before = _through(node, classes)
        if before is None:
            return f"{key} takes what {node.meta.get('key', node.name)} makes of logits"
        chain.insert(0, node)
        by, classes, node = node, before, node.args[0]
    if not _read_by(node, by):
        return f"{_others(node, by)} reads the logits too"
    if classes != len(shape(node)) - 1:
        return f"{key} takes its classes along another dim than the head's features"
    return _Head(node, chain, loss)


def _is_linear(node: fx.Node) -> bool:
    return is_call(node, "linear") or node.target is linear_io


def _operands(linear: fx.Node) -> tuple[fx.Node, fx.Node, Any]:
    if linear.target is linear_io:
        x, weight, *bias = linear.args
        return x, weight, bias[0] if bias else None  # type: ignore[return-value]
    named = bound(linear)
    return named["input"], named["weight"], named["bias"]


def _read_by(node: fx.Node, by: fx.Node) -> bool:
    """Whether nobody but `by` and the caller of the step reads `node`."""
    return all(user is by or user.op == "output" for user in node.users)


def _others(node: fx.Node, by: fx.Node) -> str:
    return ", ".join(user.meta["key"] for user in node.users if user is not by and user.op != "output")


def _through(node: fx.Node, classes: int) -> int | None:
    """Return along which dim of its operand `node` takes the classes that it has along `classes`; None if it computes."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or not isinstance(node.args[0], fx.Node):
        return None
    before, after = shape(node.args[0]), shape(node)
    if is_call(node, "to"):
        return (
            classes if torch.promote_types(value(node).dtype, value(node.args[0]).dtype) == value(node).dtype else None
        )
    if is_call(node, "contiguous", "clone", "alias"):
        return classes
    if is_call(node, "reshape", "view"):
        is_last = classes == len(after) - 1 and before[-1:] == after[-1:]
        return len(before) - 1 if is_last else None
    if is_call(node, "slice"):
        return None if bound(node)["dim"] % len(before) == classes else classes
    order = _order(node, len(before))
    return None if order is None else order[classes]


def _order(node: fx.Node, num_dims: int) -> list[int] | None:
    """Return the dims of a transposition's operand in the order of its result; None of another call."""
    order = list(range(num_dims))
    if is_call(node, "permute"):
        return [dim % num_dims for dim in bound(node)["dims"]]
    if is_call(node, "transpose"):
        a, b = (bound(node)[name] % num_dims for name in ("dim0", "dim1"))
        order[a], order[b] = order[b], order[a]
        return order
    return None


def _fuse(graph: fx.Graph, head: _Head, num_chunks: int) -> None:
    named = bound(head.loss)
    rows, weight, bias = _operands(head.linear)
    dtype = next((value(node).dtype for node in reversed(head.chain) if is_call(node, "to")), None)
    into = _Inserted(graph, head)
    for node in head.chain:
        if is_call(node, "reshape", "view"):
            rows = into.call(aten.reshape.default, rows, [*shape(node)[:-1], shape(rows)[-1]])
        elif not is_call(node, "to"):
            rows = into.call(node.target, rows, *node.args[1:], **node.kwargs)
    labels, num_dims = named["target"], len(shape(rows))
    if num_dims > 2:
        rows = into.call(aten.permute.default, rows, [0, *range(2, num_dims), 1])
        rows = into.call(aten.reshape.default, rows, [-1, shape(rows)[-1]])
        labels = into.call(aten.reshape.default, labels, [-1])
    literals = named["reduction"], named["ignore_index"], named["label_smoothing"]
    args = rows, labels, named["weight"], weight, bias, *literals, head.linear.target is linear_io, dtype, num_chunks
    fused = into.call(linear_cross_entropy, *args)
    head.loss.replace_all_uses_with(fused)
    graph.erase_node(head.loss)
    for node in reversed([head.linear, *head.chain]):
        _no_output(graph, node)
        graph.erase_node(node)


def _no_output(graph: fx.Graph, node: fx.Node) -> None:
    output = next(found for found in reversed(graph.nodes) if found.op == "output")
    output.args = (tuple(None if found is node else found for found in output.args[0]),)  # type: ignore[union-attr]


class _Inserted:
    """New calls before a loss, as of the head's module."""

    def __init__(self, graph: fx.Graph, head: _Head) -> None:
        self.graph, self.before, self.like = graph, head.loss, head.linear
        self.is_needed = bool(head.loss.meta.get("requires_grad"))
        self.mode = value(head.linear).fake_mode
        self.keys = Counter(node.meta["key"].partition("#")[0] for node in graph.nodes if node.op == "call_function")

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call; its value is made on fakes, the loss's without running its chunks."""
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        if target is linear_cross_entropy:
            name, made = NAME, self._scalar()
        else:
            fakes = fx.node.map_arg(args, value)
            name = {"reshape": "view"}.get(target._schema.name.removeprefix("aten::"), target._schema.name[6:])
            with self.mode, torch.no_grad():
                made = target(*fakes, **kwargs)
        key = f"{self.like.meta['path']}:{name}"
        self.keys[key] += 1
        node.meta.update({own: self.like.meta[own] for own in ("path", "stack") if own in self.like.meta})
        node.meta.update(val=made, constant=False, key=key if self.keys[key] == 1 else f"{key}#{self.keys[key]}")
        node.meta["requires_grad"] = self.is_needed and made.is_floating_point()
        return node

    def _scalar(self) -> Any:
        with self.mode:
            return torch.empty((), dtype=value(self.before).dtype)
