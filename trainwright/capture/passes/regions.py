"""Flatten an exported graph: inline its nested regions, with the gradient mode and the casts they stood for.

Exported graphs hold `with torch.no_grad()` and `with torch.autocast()` as calls of sub-graphs. The copy made here is
one flat graph. Under no_grad, what would need a gradient is detached as it enters; under autocast, every op is asked
once, on fakes, which of its operands autocast would convert, and the conversions become nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from ...artifacts import UserError
from ...torch_internals import private
from ..export_errors import data_dependent
from ..own_backwards import under_autocast
from .common import Context, aliased_parent, aten, value_of_call

Casts = dict[tuple[fx.Node, torch.dtype], fx.Node]


@dataclass(frozen=True)
class _State:
    """The modes in force where a node stands; `casts` are the parameters already converted in this autocast region."""

    autocast: torch.dtype | None
    grad: bool
    casts: Casts


def flatten_regions(source: fx.Graph, modules: nn.Module, context: Context) -> fx.Graph:
    """Return a flat copy of `source`, each node with a fresh fake value; `modules` holds the sub-graphs."""
    graph = fx.Graph()
    copier = _Copier(graph, context)
    state = _State(context.autocast, True, {})
    placeholders = [node for node in source.nodes if node.op == "placeholder"]
    environment = {node: _placeholder(graph, node) for node in placeholders}
    copier.needs_grad = {new for new in environment.values() if new.meta.get("requires_grad")}
    outputs = copier.copy(source, modules, environment, state)
    graph.output(tuple(outputs))
    return graph


def _placeholder(graph: fx.Graph, old: fx.Node) -> fx.Node:
    node = graph.placeholder(re.sub(r"\W", "_", f"{old.meta['role']}_{old.meta['name']}"))
    node.meta.update(old.meta)
    return node


class _Copier:
    """Copies graphs into one, region by region."""

    def __init__(self, graph: fx.Graph, context: Context) -> None:
        self.graph = graph
        self.context = context
        self.needs_grad: set[fx.Node] = set()

    def copy(self, source: fx.Graph, owner: nn.Module, environment: dict[fx.Node, Any], state: _State) -> list[Any]:
        """Copy the calls of `source`, whose placeholders are in `environment`; return the outputs.

        `owner` holds the regions inside `source`; their names are not unique beyond it.
        """
        for node in source.nodes:
            if node.op == "call_function":
                environment[node] = self._call(node, environment, state)
            elif node.op == "get_attr":
                environment[node] = owner.get_submodule(str(node.target))
            elif node.op == "output":
                results = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
                return [_look_up(result, environment) for result in results]
        return []

    def _call(self, node: fx.Node, environment: dict[fx.Node, Any], state: _State) -> Any:
        args = map_arg_to_any(node.args, environment)
        kwargs = map_arg_to_any(node.kwargs, environment)
        name = private.packet(node.target)
        if name == "_assert_tensor_metadata":  # it checks the type from before the casts, and gives nothing
            return None
        if name == "wrap_with_set_grad_enabled":
            enabled, region, *operands = args
            if not state.grad or enabled:
                return self._region(region, operands, replace(state, grad=enabled))
            detached = [self._detached(operand, node) for operand in operands]
            results = self._region(region, detached, replace(state, grad=enabled))
            # what a region hands on is what it was given, gradient and all, wherever its ops return the very tensor
            entered: dict[int | None, Any] = {
                id(new.meta["val"]): old for new, old in zip(detached, operands) if new is not old
            }
            return [entered.get(_identity(result), result) for result in results]
        if name == "wrap_with_autocast":
            _, dtype, enabled, _, region, *operands = args
            inner = replace(state, autocast=(dtype or torch.bfloat16) if enabled else None, casts={})
            return self._region(region, operands, inner)
        if name == "getitem" and isinstance(args[0], list):
            return args[0][args[1]]
        return self._plain(node, args, kwargs, state)

    def _region(self, region: fx.GraphModule, operands: list[Any], state: _State) -> list[Any]:
        placeholders = [node for node in region.graph.nodes if node.op == "placeholder"]
        return self.copy(region.graph, region, dict(zip(placeholders, operands, strict=True)), state)

    def _detached(self, operand: Any, like: fx.Node) -> Any:
        if operand not in self.needs_grad:
            return operand
        return self._append(aten.detach.default, (operand,), {}, like.meta)

    def _plain(self, node: fx.Node, args: Any, kwargs: Any, state: _State) -> fx.Node:
        if state.autocast is None or not isinstance(node.target, private.OpOverload):
            return self._append(node.target, args, kwargs, node.meta)
        if (own := under_autocast(node.target, state.autocast)) is not None:
            return self._append(own, args, kwargs, node.meta)
        return self._append(node.target, *self._cast(node, args, kwargs, state), node.meta)

    def _cast(self, node: fx.Node, args: Any, kwargs: Any, state: _State) -> tuple[Any, Any]:
        assert state.autocast is not None
        with _explained(node.meta["stack"], self.context):
            wanted = casts_of(self.context, node.target, args, kwargs, state.autocast)

        def convert(operand: fx.Node) -> fx.Node:
            dtype = wanted.get(operand)
            if dtype is None:
                return operand
            known = state.casts.get((operand, dtype))
            if known is None:
                known = self._append(aten.to.dtype, (operand, dtype), {}, node.meta)
                if operand.op == "placeholder":  # autocast keeps what it converted of parameters, and of nothing else
                    state.casts[operand, dtype] = known
            return known

        return map_arg(args, convert), map_arg(kwargs, convert)

    def _append(self, target: Any, args: Any, kwargs: Any, meta: Mapping[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta.update({key: meta[key] for key in ("path", "stack") if key in meta})
        if private.packet(target) in _VALUELESS:
            return node
        with _explained(node.meta["stack"], self.context):
            node.meta["val"] = value_of_call(self.context, target, args, kwargs)
        if target is not aten.detach.default and any(source in self.needs_grad for source in node.all_input_nodes):
            self.needs_grad.add(node)
        return node


def _identity(result: Any) -> int | None:
    """Return which fake tensor a node's value is: an op that has nothing to do, or works in place, returns its operand."""
    while isinstance(result, fx.Node) and private.is_mutating(result.target):
        result = aliased_parent(result)
    return id(result.meta["val"]) if isinstance(result, fx.Node) and "val" in result.meta else None


@contextmanager
def _explained(stack: str, context: Context) -> Iterator[None]:
    """Name the user's line `stack` when an op needs values, or fails under the autocast that was asked for."""
    try:
        yield
    except private.VALUE_NEEDED:
        raise data_dependent(stack) from None
    except RuntimeError as error:
        if context.autocast is None:
            raise
        raise UserError(
            f"a model that runs under autocast is needed; it failed at {stack}: {str(error).splitlines()[0]}; "
            "convert there, or leave autocast out"
        ) from None


_VALUELESS = {"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size"}


def map_arg_to_any(tree: Any, environment: Mapping[fx.Node, Any]) -> Any:
    """Replace the nodes in nested `tree`, also by what is no node (a region, the list of its outputs)."""
    if isinstance(tree, fx.Node):
        return environment[tree]
    if isinstance(tree, list | tuple):
        return type(tree)(map_arg_to_any(part, environment) for part in tree)
    if isinstance(tree, dict):
        return {key: map_arg_to_any(part, environment) for key, part in tree.items()}
    return tree


def _look_up(result: Any, environment: Mapping[fx.Node, Any]) -> Any:
    return environment[result] if isinstance(result, fx.Node) else result


def casts_of(context: Context, target: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> dict[fx.Node, torch.dtype]:
    """Return the operands that autocast would convert before `target`, and to what.

    Autocast itself is asked: the op runs on fakes under it, and the conversions below it are observed. An op that
    converts views of its operands (einsum) shows by its result's type alone; then all operands get that type.
    """
    operands = _floating_operands(args, kwargs)
    if not operands:
        return {}
    watch = _Conversions([operand.meta["val"] for operand in operands])
    with _autocast(dtype):
        result = value_of_call(context, target, args, kwargs, watch)
    wanted = {operand: to for operand in operands if (to := watch.found.get(id(operand.meta["val"]))) is not None}
    if wanted or not isinstance(result, Tensor) or not result.is_floating_point():
        return wanted
    plain = value_of_call(context, target, args, kwargs)
    if plain.dtype == result.dtype:
        return {}
    return {operand: result.dtype for operand in operands if operand.meta["val"].dtype != result.dtype}


def _floating_operands(args: Any, kwargs: Any) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    map_arg((args, kwargs), lambda node: found.setdefault(node))
    return [node for node in found if isinstance(fake := node.meta.get("val"), Tensor) and fake.is_floating_point()]


class _Conversions(private.TorchDispatchMode):
    """Records the type that each watched tensor is converted to."""

    def __init__(self, watched: list[Tensor]) -> None:
        super().__init__()
        self._watched = {id(tensor): tensor for tensor in watched}
        self.found: dict[int, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default and id(args[0]) in self._watched and kwargs.get("dtype") is not None:
            self.found.setdefault(id(args[0]), kwargs["dtype"])
        return func(*args, **kwargs)


@contextmanager
def _autocast(dtype: torch.dtype) -> Iterator[None]:
    """Autocast as it acts on the CPU fakes of the capture; without its cache, which would hide conversions."""
    with torch.autocast("cpu", dtype=dtype, cache_enabled=False):
        yield


@contextmanager
def no_autocast() -> Iterator[None]:
    """Shield from the caller's autocast: exported under it, a graph lacks the casts and fails outside it."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
