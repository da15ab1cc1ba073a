"""What a forward writes that outlasts the step: buffers. Every op sees them as they stood when it ran, also in a rerun.

The backward may run an op again, and autograd may hold on to what an op read. Both are right only while what was read
stays as it was. So where the graph writes a buffer, by an in-place op or as running statistics, all that reads the
buffer reads a copy made at that point. The ops that touch written memory themselves (writers, copies, views of it) are
marked: a plan neither splits nor reruns them.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ...artifacts import UserError
from ...torch_internals import private
from .common import Context, aliased_parent, aten, emit, is_call, storage_root, written_memory, written_operands


def copy_before_writes(graph: fx.Graph, context: Context) -> None:
    """Let ops read memory that the graph writes through copies; copies are shared within a module until the next write."""
    written = written_memory(graph)
    if not written:
        return
    copies: dict[tuple[fx.Node, int, Any], fx.Node] = {}
    num_writes = dict.fromkeys(written, 0)
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        own = written_operands(node)
        for operand in node.all_input_nodes:
            root = storage_root(operand)
            if root not in written or operand in own or _passes_on(node, operand):
                continue
            name = (operand, num_writes[root], node.meta["path"])
            if name not in copies:
                copies[name] = emit(context, node, aten.clone.default, (operand,), like=node)
            node.replace_input_with(operand, copies[name])
        for root in {storage_root(operand) for operand in own}:
            num_writes[root] += 1


def mark_effects(graph: fx.Graph) -> None:
    """Give writers `mutates`, the names of the buffers, and all that owns, reads or writes such memory `touches_written`."""
    written = written_memory(graph)
    for node in graph.nodes:
        if node.op == "placeholder" and node in written:
            node.meta["mutated"] = True
        elif node.op == "call_function":
            roots = [storage_root(operand) for operand in written_operands(node)]
            names = [root.meta["name"] for root in roots if root.op == "placeholder"]
            if names:
                node.meta["mutates"] = ", ".join(dict.fromkeys(names))
            touched = any(storage_root(operand) in written for operand in node.all_input_nodes)
            node.meta["touches_written"] = (bool(written) and touched) or node in written


def _passes_on(node: fx.Node, operand: fx.Node) -> bool:
    """Whether the call is a copy of the operand, a view of it, or a piece of a view."""
    return (
        is_call(node, "clone") or aliased_parent(node) is operand or getattr(node.target, "__name__", "") == "getitem"
    )


def check_written(node: fx.Node, root: fx.Node) -> None:
    """Raise `UserError` for a write to a parameter, or to a tensor that is neither a buffer nor has a value of its own."""
    role, line = root.meta["role"], node.meta["stack"]
    if role == "param":
        raise UserError(
            f"a forward that leaves parameters as they are is needed; {line} writes {root.meta['name']} by "
            f"{private.packet(node.target)}; write it after the optimizer's step, or make it a buffer"
        )
    if role == "const" and root.meta.get("value") is None:
        raise UserError(
            f"a forward that writes nothing but its buffers is needed; {line} writes a tensor that is none, by "
            f"{private.packet(node.target)} (`.data` of one, perhaps); write a registered buffer itself, under torch.no_grad()"
        )
