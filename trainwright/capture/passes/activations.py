"""Restore activations that a model spells out (`0.5 * x * (1 + tanh(0.798 * (x + 0.0447 * x**3)))`) as the one op they are.

Spelt out, GPT-2's GELU runs eight kernels where there is one, and keeps four tensors for the backward where that one
keeps its input. What a piece of the graph computes is found by computing it, not by its form: on numbers, in float64.
All its terms are smooth, so that a piece that agrees with an activation over its whole bend, and far from it, is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx

from ...torch_internals import private
from .common import Context, aten, calls, emit, is_call, operand, replace

BENDS = ("tanh", "erf", "sigmoid", "exp")
"""Every piece holds one of these."""
ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "true_divide", "neg", "pow", "square", "reciprocal")
TERMS = (*BENDS, *ARITHMETIC, "softplus", "log1p", "to")
"""What a piece is of. Ops with a kink (`clamp`, `where`) are not: it may lie where nobody looks."""
MOST_TERMS = 12
TOLERANCE = 1e-9
"""Of the largest difference; models write sqrt(2/pi) to ten digits at least."""


class _Activation(NamedTuple):
    target: Any
    kwargs: tuple[tuple[str, Any], ...] = ()


ACTIVATIONS = (
    _Activation(aten.gelu.default, (("approximate", "tanh"),)),
    _Activation(aten.gelu.default),
    _Activation(aten.silu.default),
    _Activation(aten.mish.default),
)


def restore_activations(graph: fx.Graph, context: Context) -> None:
    """Put GELU (either form), SiLU and Mish for the pieces of the graph that compute them of one tensor.

    A piece of which something else reads an inner value stays: it would be computed all the same.
    """
    for bend in calls(graph, *BENDS):
        found = _spelt_out(bend)
        if found is None:
            continue
        source, result, activation = found
        wanted = result.meta["val"].dtype
        if source.meta["val"].dtype != wanted:  # some of its terms were widened, by autocast for instance
            source = emit(context, result, aten.to.dtype, (source, wanted), like=result)
        fused = emit(context, result, activation.target, (source,), like=result, **dict(activation.kwargs))
        replace(result, fused)


def _spelt_out(bend: fx.Node) -> tuple[fx.Node, fx.Node, _Activation] | None:
    """Return (variable, result, activation) of the largest piece around `bend` that is an activation."""
    for result in reversed(list(_results(bend))):
        for source in _sources(bend):
            formula = _formula(source, result)
            activation = None if formula is None else _recognised(formula)
            if activation is not None:
                return source, result, activation
    return None


def _results(bend: fx.Node) -> Iterator[fx.Node]:
    """Yield `bend`, its only reader, that one's only reader … as far as they are terms; no conversion, which stays."""
    node = bend
    for _ in range(MOST_TERMS):
        if not is_call(node, "to"):
            yield node
        if len(node.users) != 1 or not is_call(node := next(iter(node.users)), *TERMS):
            return


def _sources(bend: fx.Node) -> list[fx.Node]:
    """What `bend` is computed of by terms, nearest first."""
    found = list(bend.all_input_nodes)
    for node in found:
        if len(found) > MOST_TERMS:
            break
        if is_call(node, *TERMS):
            found += [operand for operand in node.all_input_nodes if operand not in found]
    return found


@dataclass(frozen=True)
class _Of:
    """Stands in a formula for what its term `index` gave; the variable is 0."""

    index: int


_Formula = tuple[tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]


def _formula(source: fx.Node, result: fx.Node) -> _Formula | None:
    """Return the terms from `source` to `result`; None unless they are of `source` alone, and nothing else reads them."""
    inside = _between(source, result)
    if inside is None:
        return None
    places = {source: _Of(0)}
    terms = []
    for node in inside:
        named = {key: value for key, value in node.kwargs.items() if value is not None}
        args = tuple(places[arg] if isinstance(arg, fx.Node) else arg for arg in node.args)
        kwargs = tuple((key, places[arg] if isinstance(arg, fx.Node) else arg) for key, arg in named.items())
        terms.append((None if is_call(node, "to") else node.target, args, kwargs))
        places[node] = _Of(len(terms))
    return tuple(terms)


def _between(source: fx.Node, result: fx.Node) -> list[fx.Node] | None:
    """The nodes from `source` to `result` in order; None unless all are terms of floats and stand by themselves."""
    inside: dict[fx.Node, None] = {}
    if not _add_before(result, source, inside):
        return None
    closed = all(user in inside for node in inside if node is not result for user in node.users)
    return list(inside) if closed else None


def _add_before(node: fx.Node, source: fx.Node, inside: dict[fx.Node, None]) -> bool:
    """Add what `node` is computed of from `source` on, then itself; False when that is not terms of `source` alone."""
    if node is source or node in inside:
        return True
    if not is_call(node, *TERMS) or _narrows(node) or len(inside) == MOST_TERMS:
        return False
    if not all(_add_before(operand, source, inside) for operand in node.all_input_nodes):
        return False
    inside[node] = None
    return True


def _narrows(node: fx.Node) -> bool:
    """A conversion that rounds, as the model asked for, or gives no float."""
    given, made = operand(node).meta["val"].dtype, node.meta["val"].dtype
    return not made.is_floating_point or (is_call(node, "to") and torch.promote_types(given, made) != made)


@cache
def _recognised(formula: _Formula) -> _Activation | None:
    """Return the activation that the formula computes."""
    with private.without_modes():
        x = _numbers()
        values = [x]
        for target, args, kwargs in formula:
            given = [values[arg.index] if isinstance(arg, _Of) else arg for arg in args]
            named = {key: values[arg.index] if isinstance(arg, _Of) else arg for key, arg in kwargs}
            values.append(given[0] if target is None else target(*given, **named))
        for activation in ACTIVATIONS:
            apart = (values[-1] - activation.target(x, **dict(activation.kwargs))).abs().max()
            if float(apart) <= TOLERANCE:
                return activation
    return None


def _numbers() -> torch.Tensor:
    """Numbers over the bend of every activation, and far out on both sides."""
    near = torch.linspace(-12, 12, 97, dtype=torch.float64, device="cpu")
    return torch.cat([near, near.new_tensor([-100.0, -30.0, 30.0, 100.0])])
