"""The table of ops: one entry an op, found by its ATen name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .signature import Call, Signature, SignatureBuilder

if TYPE_CHECKING:
    from .local import LocalContext

SignatureRule = Callable[[Call], Signature | None]
LocalRule = Callable[
    ["LocalContext", Any, tuple[Any, ...], dict[str, Any]], tuple[Any, tuple[Any, ...], dict[str, Any]]
]
Kind = Literal["heavy", "elementwise", "view"]


class WeightRule(NamedTuple):
    """A mean that does not count all its entries alike. Both take (args, kwargs) of a call."""

    weight: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    """How much a mean over these entries counts beside one over others, a scalar tensor. It reads the labels, which are the
    second argument, and the weights of their classes, the third."""
    as_sum: Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    """The arguments with which the op gives the sum."""


@dataclass(frozen=True)
class OpRule:
    """All that trainwright knows of one op."""

    name: str
    kind: Kind
    """`heavy` ops have a decision of their own, `elementwise` ones join the op that feeds them, a `view` moves no data."""
    signature: SignatureRule
    localize: LocalRule | None = None
    """Rewrites the call for one rank's part, where the literal arguments or the arithmetic depend on the split."""
    scratch: tuple[int, ...] = ()
    """The places of arguments that the op writes and its results do not depend on; a rerun gets copies of them."""
    weight: WeightRule | None = None
    """How a mean weighs its entries; None if means over as many entries weigh the same."""
    differentiable: bool = True
    """False if its results have no gradient."""
    linear: bool = False
    """True if the mean of several operands gives the mean of their results."""
    copies: bool = False
    """True if its result is a copy of its operand."""
    uniform: bool = False
    """True if its results repeat one value, or an operand, along the dims that its sizes name."""
    fresh_gradient: int | None = None
    """The operand whose gradient is a tensor made for it, which no other operand's gradient shares."""
    reads_rows: bool = False
    """True if it looks its results up in its first operand, of which it reads about as many bytes as it returns."""
    linear_map: Literal["out_in", "in_out"] | None = None
    """For a linear map of its first operand by its second, the order of the second's dims."""
    tensor_parallel: bool = False
    """True if Megatron's recipe says how to split it."""
    dropout: tuple[str, Any] | None = None
    """The argument that switches its dropout off, with the value that does so."""
    draws_by_dropout: bool = False
    """True if it draws random numbers only where that argument has another value."""
    masks: bool = False
    """True if it is dropout and nothing else: a multiplication by a random mask."""
    training: tuple[str, Any] | None = None
    """The argument that says whether the model trains, with its value in evaluation."""
    fused_on_gpu: bool = False
    """True if a GPU runs it, dropout included, as one kernel that a CPU lacks."""
    by_running: bool = False
    """True if the size of a part does not follow from its loops' shares: its local form is run on fakes for its costs."""
    cpu_scratch: bool = False
    """True if its CPU kernels take scratch memory that varies beyond what is modelled."""

    @property
    def is_described(self) -> bool:
        """Return True if its loops are known."""
        return self.signature is not unknown_signature


RULES: dict[str, OpRule] = {}


def rule(
    *names: str,
    kind: Kind = "heavy",
    localize: LocalRule | None = None,
    scratch: tuple[int, ...] = (),
    weight: WeightRule | None = None,
) -> Callable[[SignatureRule], SignatureRule]:
    """Register the decorated signature rule for the ATen ops `names` (without namespace and overload)."""

    def register(function: SignatureRule) -> SignatureRule:
        for name in names:
            if name in RULES:
                raise ValueError(f"op {name} has two rules; keep one")
            RULES[name] = OpRule(name, kind, function, localize, scratch, weight)
        return function

    return register


def describe(*names: str, **facts: Any) -> None:
    """Set fields of the entries of `names`; an op without a rule gets an entry whose loops nobody knows."""
    for name in names:
        RULES[name] = replace(find(name), **facts)


def find(name: str) -> OpRule:
    """Return the rule of op `name`; an op without one runs on whole tensors."""
    return RULES.get(name) or OpRule(name, "heavy", unknown_signature)


def unknown_signature(call: Call) -> Signature:
    """The signature of an op that nobody described: nothing can be split."""
    builder = SignatureBuilder()
    ins = [builder.opaque(f"i{k}_", spec.shape) for k, spec in enumerate(call.inputs)]
    outs = [builder.opaque(f"o{k}_", spec.shape) for k, spec in enumerate(call.outputs)]
    signature = builder.build(ins, outs)
    return Signature(signature.sizes, signature.inputs, signature.outputs, whole=signature.whole, known=False)


def signature_of(call: Call) -> Signature:
    """Return the signature of `call`; a rule that cannot describe this very call gives the unknown one."""
    found = find(call.name).signature(call)
    return found if found is not None else unknown_signature(call)
