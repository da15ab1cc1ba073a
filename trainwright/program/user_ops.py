"""Registers the loops of an op that the user has made, so that plans may split it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from ..artifacts import UserError
from ..ops import RULES, Call, OpRule, Signature
from ..ops.signature import Dims, TensorSpec, einsum_signature
from ..torch_internals import private
from .program import op_name

Rule = Callable[[Call], Signature | None]
LocalRule = Callable[..., Any]


def register_op(
    op: Any,
    loops: str | Rule,
    *,
    reduced: str = "",
    whole: str = "",
    once: Sequence[int] = (),
    kind: Literal["heavy", "elementwise"] = "heavy",
    localize: LocalRule | None = None,
) -> None:
    """Say which loops a user's op runs over: a plan may then split them. Without, the op runs on whole tensors, gathered.

    op: a `custom_op` of torch, one of `torch.ops`, or its name, `"ours::scaled"`. It needs its own `register_fake`, and
    `register_autograd` where a gradient passes through it.
    loops: an entry for each tensor argument, in order, an arrow, an entry for each output: `"b* i, o i -> b* o"`. The same
    letter is the same loop; `b*` stands for any number of leading dims; a dim of size 1 broadcasts. Or a function from the call
    to a `Signature`, for what depends on other arguments; `None` from it means: this call on whole tensors.
    reduced: loops that are summed over; the op must be linear in them, so that the ranks' parts add up.
    whole: loops never to be split: what is computed along them is not separable (a softmax, a sort, a norm).
    once: places of the tensor arguments that one rank alone adds where a reduced loop is split (a bias); the local rule sees to it.
    kind: `elementwise` joins the op that feeds it and takes no decision of its own.
    localize: `(context, op, args, kwargs) → (function, args, kwargs)`, where other arguments depend on the split: see
    `trainwright.ops.local.LocalContext`.

    Call it where the op is defined, so that every process that imports the model knows it. An op may be registered again.
    It is not checked against what the op computes: `tw.verify` on a plan that splits it does that. FLOPs are those of
    `torch.utils.flop_counter.register_flop_formula`, else one for each element.

    Raises `UserError` for an op of torch's own, a pattern that names no output, or (when a model is captured) one that does not
    fit the shapes of a call.

    >>> import torch
    >>> from torch import library
    >>> @library.custom_op("doctest::scaled", mutates_args=())
    ... def scaled(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    ...     return x * weight
    >>> _ = scaled.register_fake(lambda x, weight: torch.empty_like(x))
    >>> register_op(scaled, "b* o, o -> b* o")
    """
    name = _name_of(op)
    if kind not in ("heavy", "elementwise"):
        raise UserError(f"a kind of op is heavy or elementwise; got {kind!r} for {name}")
    signature = (
        _from_pattern(name, loops, reduced, whole, tuple(once)) if isinstance(loops, str) else _checked(name, loops)
    )
    RULES[name] = OpRule(name, kind, signature, localize)


def _name_of(op: Any) -> str:
    name = op if isinstance(op, str) else op_name(private.registered(op))
    namespace, _, own = name.partition("::")
    if not own or namespace == "aten":
        raise UserError(
            f"an op of your own is needed, one made with `custom_op` of torch, or its name such as 'ours::scaled'; got {name!r}; "
            "torch's own ops have their rules in trainwright/ops"
        )
    return name.partition(".")[0]


def _from_pattern(name: str, pattern: str, reduced: str, whole: str, once: tuple[int, ...]) -> Rule:
    if "->" not in pattern:
        raise UserError(f"loops as 'b* i, o i -> b* o' are needed for {name}; got {pattern!r}, without an arrow")
    known = {letter.rstrip("*") for letter in pattern.replace("->", " ").replace(",", " ").split()}
    unknown = sorted({letter.rstrip("*") for letter in (reduced + " " + whole).split()} - known)
    if unknown:
        raise UserError(
            f"loops that stand in the pattern are needed; {', '.join(unknown)} does not in {pattern!r} of {name}"
        )

    def signature(call: Call) -> Signature:
        try:
            return einsum_signature(pattern, call, reduced=reduced, whole=whole, once=once)
        except ValueError as error:
            raise UserError(
                f"a pattern that fits every call of {name} is needed; {pattern!r} does not: {error}"
            ) from None

    return _checked(name, signature)


def _checked(name: str, rule: Rule) -> Rule:
    """Return `rule` with a check of its signatures against the shapes of the call."""

    def signature(call: Call) -> Signature | None:
        found = rule(call)
        if found is None:
            return None
        for what, dims, specs in (("argument", found.inputs, call.inputs), ("output", found.outputs, call.outputs)):
            if len(dims) != len(specs):
                raise UserError(
                    f"loops for each tensor are needed; {name} has {len(specs)} {what}s, its rule {len(dims)}"
                )
            for place, (own, spec) in enumerate(zip(dims, specs)):
                _check_sizes(f"{what} {place} of {name}", own, spec, found)
        lost = found.reduced & {loop for dims in found.outputs for dim in dims for loop in dim}
        if lost:
            raise UserError(
                f"a reduced loop that no output has is needed; {', '.join(sorted(lost))} stays in one of {name}"
            )
        return found

    return signature


def _check_sizes(what: str, dims: Dims, spec: TensorSpec, found: Signature) -> None:
    sizes = []
    for dim in dims:
        size = 1
        for loop in dim:
            size *= found.sizes[loop]
        sizes.append(size)
    if tuple(sizes) != tuple(spec.shape):
        raise UserError(
            f"loops of the sizes of the tensors are needed; {what} has shape {list(spec.shape)}, its loops {sizes}; "
            "give dims of different sizes different letters"
        )
