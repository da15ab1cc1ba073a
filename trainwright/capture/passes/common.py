"""What the passes of `normalise` share: a node's arguments by name, and new nodes that know their value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ...torch_internals import private
from ...torch_internals.dtypes import may_have_gradient
from ...torch_internals.repeats import Key, Recipe, RepeatedCalls

aten = torch.ops.aten

COPIED_META = ("path", "stack")
_RECIPES: dict[Key, Recipe | None] = {}
"""What earlier captures of this process learned of calls on fakes."""


@dataclass(eq=False)
class Context:
    """What the passes may know beside the graph."""

    mode: private.FakeTensorMode
    constants: dict[str, Tensor]
    """Name → real CPU value, of lifted constants and of the buffers whose values are at hand."""
    autocast: torch.dtype | None = None
    notes: list[str] = field(default_factory=list)

    @cached_property
    def calls(self) -> RepeatedCalls:
        """Answers calls on fakes alike from one another: blocks repeat, and so do captures of one model."""
        return RepeatedCalls(self.mode, self._run, _RECIPES)

    def _run(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.mode, torch.no_grad():
            return target(*args, **kwargs)


def emit(
    context: Context, before: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], like: fx.Node, **kwargs: Any
) -> fx.Node:
    """Insert a call of `target` before the node `before`; its value is computed on fakes, its origin is `like`'s."""
    graph = before.graph
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    node.meta.update({key: like.meta[key] for key in COPIED_META if key in like.meta})
    node.meta["val"] = value_of_call(context, target, args, kwargs)
    return node


def value_of_call(context: Context, target: Callable[..., Any], args: Any, kwargs: Any, watch: Any = None) -> Any:
    """Run `target` on the fake values of the nodes in `args` and `kwargs`; `watch` is entered innermost."""
    fakes, named = map_arg(args, value), map_arg(kwargs, value)
    if watch is None:
        return context.calls(target, fakes, named)
    with context.mode, torch.no_grad(), watch:
        return target(*fakes, **named)


class _Followed(private.PlainDispatchMode):
    """Runs on fakes of a context, below autograd, each call like an earlier one answered from that."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._calls = context.calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._calls(func, args, kwargs or {})


def propagate(graph: fx.Graph, context: Context) -> None:
    """Run the graph on fakes, gradients on: every node's `val` (no history) and `requires_grad`."""
    values: dict[fx.Node, Any] = {}
    last_use = _last_uses(graph)
    with _Followed(context), torch.enable_grad():
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


def value(node: fx.Node) -> Any:
    """Return the node's fake value."""
    return node.meta["val"]


def shape(node: Any) -> tuple[int, ...]:
    """Return the shape of the node's fake value."""
    return tuple(node.meta["val"].shape)


def bound(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an ATen call by name, defaults included."""
    return private.bound(node.target, node.args, node.kwargs)  # type: ignore[arg-type]


def operand(node: fx.Node, position: int = 0) -> fx.Node:
    """Return the positional operand, which by the op's schema is a node."""
    found = node.args[position]
    assert isinstance(found, fx.Node), f"{node.format_node()} has no node at {position}"
    return found


def calls(graph: fx.Graph, *names: str) -> list[fx.Node]:
    """Return the ATen calls whose op has one of `names` (`view`, `reshape`), in order."""
    return [node for node in graph.nodes if is_call(node, *names)]


def is_call(node: Any, *names: str) -> bool:
    """Tell whether `node` is a call of an ATen op with one of `names`."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return isinstance(node.target, private.OpOverload) and private.packet(node.target) in names


def replace(node: fx.Node, by: fx.Node) -> None:
    """Let every user of `node` read `by`, and erase `node`."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)


def reached_from(graph: fx.Graph, sources: Iterable[fx.Node], stops: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Return the nodes that depend on `sources`, without passing through nodes for which `stops` holds."""
    reached = set(sources)
    for node in graph.nodes:
        if node not in reached and not stops(node) and any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return reached


def needing_gradient(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes through which a gradient flows to a trainable parameter."""

    def stops(node: fx.Node) -> bool:
        fake = node.meta.get("val")
        return is_call(node, "detach") or (isinstance(fake, Tensor) and not may_have_gradient(fake.dtype))

    return reached_from(graph, trainable(graph), stops)


def trainable(graph: fx.Graph) -> list[fx.Node]:
    """Return the placeholders whose value requires a gradient."""
    return [node for node in graph.nodes if node.op == "placeholder" and node.meta.get("requires_grad")]


def mutated_placeholders(graph: fx.Graph) -> set[fx.Node]:
    """Return the placeholders that the graph writes in place: by mutating ops, or as running statistics."""
    return {root for root in written_memory(graph) if root.op == "placeholder"}


def written_memory(graph: fx.Graph) -> set[fx.Node]:
    """Return the owners of all memory that the graph writes in place."""
    return {storage_root(operand) for node in graph.nodes for operand in written_operands(node)}


def written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that the call writes in place."""
    if is_call(node, "batch_norm", "instance_norm"):
        # their schemas do not confess that training writes the running statistics
        named = bound(node)
        training = named.get("training", named.get("use_input_stats"))
        operands = [named["running_mean"], named["running_var"]] if training else []
    elif node.op == "call_function" and private.is_mutating(node.target):
        named = bound(node)
        operands = [named[name] for name in private.mutated_arguments(node.target)]  # type: ignore[arg-type]
    else:
        return []
    flat: list[Any] = []
    for operand in operands:
        flat.extend(operand if isinstance(operand, list | tuple) else [operand])
    return [operand for operand in flat if isinstance(operand, fx.Node)]


def storage_root(node: fx.Node) -> fx.Node:
    """Follow views and in-place results back to the node that owns the memory."""
    while True:
        parent = aliased_parent(node)
        if parent is None:
            return node
        node = parent


def aliased_parent(node: fx.Node) -> fx.Node | None:
    """Return the operand whose memory the node's output shares, or None."""
    if node.op != "call_function":
        return None
    if private.is_mutating(node.target):
        name = private.returned_argument(node.target)  # type: ignore[arg-type]
        found = bound(node).get(name) if name is not None else None
        return found if isinstance(found, fx.Node) else None
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if getattr(node.target, "__name__", "") == "getitem":
        return aliased_parent(node.args[0])
    return node.args[0] if _shares_memory(node) else None


_MAY_COPY = ("reshape", "reshape_as", "flatten", "contiguous", "to", "type_as", "expand_as", "ravel")
"""Views by their schemas that are copies where they have to be."""


def _shares_memory(node: fx.Node) -> bool:
    """A view by its schema that is one in fact."""
    if not private.is_view(node.target):
        return False
    if not is_call(node, *_MAY_COPY):
        return True
    mine, source = node.meta.get("val"), node.args[0].meta.get("val")  # type: ignore[union-attr]
    if not isinstance(mine, Tensor) or not isinstance(source, Tensor):
        return True
    return private.storage_of(mine) == private.storage_of(source)
