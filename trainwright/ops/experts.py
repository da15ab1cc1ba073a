"""The experts of a mixture as one op: tokens, the experts that each chose, and their weights → tokens.

    out[t] = Σ_k weights[t, k] · (gate(tokens[t] · w_in[e] + b_in[e]) · w_out[e] + b_out[e]),    e = ids[t, k]

Its loops: tokens t, experts e and inner features f (both summed over), hidden features h and choices k (whole):

    t          every rank runs all experts on its own tokens; its rows are known
    f          every expert cut along its inner features, the result a partial sum; rows known
    e          a rank runs its own experts on all tokens, the result a partial sum; rows depend on the data
    t and e    one axis splits both: rows go to their expert's rank and come back (all-to-all); rows depend on the data

The gate stands in a table by name: what it computes is code, the same in every process that defines it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, library

from .expert_routes import Holders
from .expert_rows import Gate, run_experts
from .local import LocalContext
from .partial import once
from .registry import describe, rule
from .signature import Call, Dims, Signature, SignatureBuilder

NAME = "trainwright::experts"
_LIBRARY = library.Library("trainwright", "FRAGMENT")
_LIBRARY.define(
    "experts(Tensor tokens, Tensor ids, Tensor weights, Tensor w_in, Tensor w_out, Tensor? b_in, Tensor? b_out, str gate, "
    "bool transposed, bool concatenated) -> Tensor"
)


@dataclass(frozen=True)
class GateRule:
    """The function of rows, feature by feature, between the two products."""

    run: Gate
    """[rows, parts · inner] → [rows, inner], in memory of its own."""
    parts: int
    """The columns of w_in to one inner feature: 2 for a gated unit."""


def _glu(activation: Callable[[Tensor], Tensor]) -> Gate:
    def run(up: Tensor) -> Tensor:
        gate, value = up.chunk(2, dim=-1)
        return activation(gate) * value

    return run


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu,
}  # fmt: skip
GATES: dict[str, GateRule] = {
    **{name: GateRule(run, 1) for name, run in _ACTIVATIONS.items()},
    **{f"{name}_glu": GateRule(_glu(run), 2) for name, run in _ACTIVATIONS.items()},
}
"""By name; `silu_glu` is SwiGLU. Others are added by `trainwright.gate` and while a model is captured."""


def _whole(
    tokens: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None,
    gate: str, transposed: bool, concatenated: bool,
) -> Tensor:  # fmt: skip
    del concatenated
    everything = Holders(w_in.shape[0], ((0, w_in.shape[0]),))
    return run_experts(tokens, ids, weights, w_in, w_out, b_in, b_out, GATES[gate].run, transposed, everything)


_LIBRARY.impl("experts", _whole, "Autograd")
_LIBRARY.impl("experts", torch.no_grad()(_whole), "CompositeExplicitAutograd")
EXPERTS: Any = torch.ops.trainwright.experts.default


def _localize(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not ctx.split("e", "f"):
        return target, args, kwargs
    holders = _holders(ctx)
    is_owner = ctx.owner("f")

    def local(
        tokens: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None,
        gate: str, transposed: bool, concatenated: bool,
    ) -> Tensor:  # fmt: skip
        own = once(b_out, is_owner) if b_out is not None and not is_owner else b_out
        return run_experts(tokens, ids, weights, w_in, w_out, b_in, own, GATES[gate].run, transposed, holders)

    return local, args, kwargs


def _holders(ctx: LocalContext) -> Holders:
    num = ctx.global_shape(3)[0]
    if not ctx.split("e"):
        return Holders(num, ((0, num),))
    pair = ctx.pair_of("t", "e")
    if pair is None:
        return Holders(num, (ctx.range_of("e"),), count=ctx.count, imbalance=ctx.imbalance, limit=ctx.limit)
    return Holders(num, pair.ranges, pair.place, pair.group, ctx.count, ctx.imbalance, ctx.limit)


@rule(NAME, localize=_localize)
def signature(call: Call) -> Signature:
    tokens, ids, _, w_in, w_out = call.inputs[:5]
    gate, transposed, concatenated = call.args[7:10]
    b, parts = SignatureBuilder(), GATES[gate].parts
    t, k = b.loop("t", tokens.shape[0]), b.loop("k", ids.shape[1], whole=True)
    h, e = b.loop("h", tokens.shape[1], whole=True), b.loop("e", w_in.shape[0])
    c, f = b.loop("c", parts, whole=True), b.loop("f", w_out.shape[1 if transposed else 2])
    wide = c + f if concatenated else f + c
    matrices: list[Dims] = [(e, h, wide), (e, f, h)] if transposed else [(e, wide, h), (e, h, f)]
    rows: list[Dims] = [dims for dims, bias in zip(((e, wide), (e, h)), call.args[5:7]) if bias is not None]
    last = [len(call.inputs) - 1] if call.args[6] is not None else []
    inputs = [(t, h), (t, k), (t, k), *matrices, *rows]
    return b.build(inputs, [(t, h)], reduced=("e", "f"), once=last, pairs=[("t", "e")])


describe(NAME, by_running=True)
