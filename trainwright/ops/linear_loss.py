"""A linear map and the cross-entropy of its results as one op, a chunk of rows at a time: the logits never stand whole.

    loss = Σ_t a_t · (log Σ_v exp z_tv) - (1 - ε) w_y z_ty - ε/V · Σ_v w_v z_tv,    z = x · Wᵀ + b,  y = labels[t]

with a_t = (1 - ε) w_y + ε/V · Σ_v w_v; rows without a label count nothing, and a mean divides by Σ_t w_y. The gradients of a
chunk's logits are known as soon as the chunk is, and so are its shares of the gradients of x, W and b: the forward adds these up,
and the backward multiplies them by what it is given. No product is computed twice. Its loops are rows t (summed over), classes v
(the ranks work together, chunk by chunk) and features i (whole).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import partial
from .local import AxisGroup, LocalContext, WithSum
from .loss import MEAN, SUM
from .registry import WeightRule, describe, rule
from .signature import Call, Dims, Signature, SignatureBuilder

__all__ = ["linear_cross_entropy"]

NAME = "linear_cross_entropy"


def linear_cross_entropy(
    x: Tensor, labels: Tensor, class_weight: Tensor | None, weight: Tensor, bias: Tensor | None, reduction: int = MEAN,
    ignore_index: int = -100, label_smoothing: float = 0.0, input_first: bool = False, dtype: torch.dtype | None = None,
    num_chunks: int = 1,
) -> Tensor:  # fmt: skip
    """Return the cross-entropy of `x · weightᵀ + bias` against `labels`, without holding all of these logits at once.

    x: [rows, features]; labels: [rows], integers; class_weight: [classes] or None, of each class in the loss; weight: [classes,
    features], or with `input_first` [features, classes]; bias: [classes] or None. reduction: 1 for the mean, 2 for the sum.
    dtype: the type in which the loss is taken, as if the logits were converted to it. num_chunks: into how many chunks the rows
    are cut.

    Values and gradients are those of `cross_entropy(linear(x, weight, bias).to(dtype), labels)`; gradients of `weight` add up in
    fp32 at least. The result can be differentiated once: for a Hessian use the two functions.

    >>> x, weight, labels = torch.randn(6, 4), torch.randn(5, 4), torch.arange(6) % 5
    >>> whole = torch.nn.functional.cross_entropy(x @ weight.T, labels)
    >>> bool(torch.allclose(linear_cross_entropy(x, labels, None, weight, None, num_chunks=3), whole))
    True
    """
    head = Head(weight.shape[1 if input_first else 0], ignore_index, label_smoothing, input_first, dtype, num_chunks)
    count = partial.label_weight(labels, class_weight, ignore_index) if reduction == MEAN else None
    return _run(head, count, x, labels, class_weight, weight, bias)


@dataclass(frozen=True)
class Head:
    """The literal arguments of a call, and the rank's part of the classes."""

    num_classes: int
    ignore_index: int
    smoothing: float
    input_first: bool
    dtype: torch.dtype | None
    num_chunks: int
    start: int = 0
    vocabulary: AxisGroup | None = None
    """The ranks that hold the other classes."""

    def over_ranks(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Return the reduction of a rank's part over those that hold other classes."""
        reduced: Tensor = tensor if self.vocabulary is None else self.vocabulary.all_reduce(tensor, op)
        return reduced


def _run(head: Head, count: Tensor | None, x: Tensor, labels: Tensor, class_weight: Tensor | None, weight: Tensor,
         bias: Tensor | None) -> Tensor:  # fmt: skip
    if not torch.is_grad_enabled():
        x, weight, bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
    loss: Tensor = _Chunked.apply(x, weight, bias, labels, class_weight, count, head)
    return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None,
                count: Tensor | None, head: Head) -> Tensor:  # fmt: skip
        sums = _Gradients(x, weight, bias, ctx.needs_input_grad[:3], head)
        own = weight.t() if head.input_first else weight
        out_type = x.dtype if head.dtype is None else head.dtype
        total = x.new_zeros((), dtype=_wide(out_type))
        for first, last in _chunks(x.shape[0], head.num_chunks):
            logits = torch.nn.functional.linear(x[first:last], own, bias).to(total.dtype)
            terms = _Terms(labels[first:last], class_weight, head, logits)
            total += terms.loss(logits)
            if sums.any:
                sums.add(first, last, terms.gradient(logits, count))
            del logits, terms
        ctx.save_for_backward(*sums.taken())
        return (total if count is None else total / count).to(out_type)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own = iter(ctx.saved_tensors)
        scaled = [next(own) * grads[0] if needed else None for needed in ctx.needs_input_grad[:3]]
        return *scaled, None, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(num_rows: int, num_chunks: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each chunk of rows.

    >>> list(_chunks(5, 2)), list(_chunks(0, 2))
    ([(0, 3), (3, 5)], [])
    """
    size = max(1, -(-num_rows // num_chunks))
    for first in range(0, num_rows, size):
        yield first, min(num_rows, first + size)


class _Terms:
    """One chunk's labels, and what its loss and the gradient of its logits take of them. `logits` is the rank's part."""

    def __init__(self, labels: Tensor, class_weight: Tensor | None, head: Head, logits: Tensor) -> None:
        self.head, self.class_weight = head, None if class_weight is None else class_weight.to(logits.dtype)
        self.valid = labels != head.ignore_index
        inside = self.valid & (labels >= head.start) & (labels < head.start + logits.shape[1])
        self.rows = (labels - head.start).masked_fill_(~inside, 0).unsqueeze(-1)
        self.hit = inside.to(logits.dtype)
        share = self.valid.to(logits.dtype)
        if self.class_weight is not None:
            share = share * self.class_weight[labels.masked_fill(~self.valid, 0)]
        self.share = share * (1.0 - head.smoothing)
        """(1 - ε) w_y, zero for rows without a label."""
        self.each = self.valid.to(logits.dtype) * (head.smoothing / head.num_classes)
        """ε/V, zero for rows without a label."""

    def loss(self, logits: Tensor) -> Tensor:
        """Return the sum over the chunk; `logits` become exp(z - max z), and `total` their sum over all classes."""
        head, some = self.head, logits.shape[1] > 0
        peak = logits.amax(-1) if some else logits.new_full(logits.shape[:1], float("-inf"))
        peak = head.over_ranks(peak, "max")
        logits.sub_(peak.unsqueeze(-1))
        chosen = logits.gather(-1, self.rows).squeeze(-1) if some else torch.zeros_like(peak)
        parts = [chosen.masked_fill(self.hit == 0, 0.0)]
        if head.smoothing:
            parts.append(logits.sum(-1) if self.class_weight is None else logits @ self.class_weight)
        found = head.over_ranks(torch.stack([*parts, logits.exp_().sum(-1)]))
        self.total = found[-1]
        loss = self.total.log().mul_(self._all()).addcmul_(self.share, found[0], value=-1)
        return (loss.addcmul_(self.each, found[1], value=-1) if head.smoothing else loss).sum()

    def gradient(self, exponentials: Tensor, count: Tensor | None) -> Tensor:
        """Return the gradient of the loss, divided by `count`, of the chunk's logits; it takes the place of what `loss` left."""
        by = 1.0 if count is None else 1.0 / count.to(exponentials.dtype)
        grad = exponentials.mul_((self._all() / self.total * by).unsqueeze(-1))
        if grad.shape[1]:
            grad.scatter_add_(-1, self.rows, (self.share * self.hit * -by).unsqueeze(-1))
        if self.head.smoothing:
            each = self.each.unsqueeze(-1) * by
            grad.sub_(each if self.class_weight is None else each * self.class_weight)
        return grad

    def _all(self) -> Tensor:
        """What log Σ exp z counts: a_t."""
        if not self.head.smoothing:
            return self.share
        whole = self.head.num_classes if self.class_weight is None else self.class_weight.sum()
        return self.share + self.each * whole


class _Gradients:
    """The gradients of the three operands that need one, added up chunk by chunk."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, needed: tuple[bool, ...], head: Head) -> None:
        self.x, self.weight, self.input_first = x, weight, head.input_first
        wide = _wide(weight.dtype)
        self.of_x = torch.empty_like(x) if needed[0] else None
        self.of_weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        self.of_bias = torch.zeros_like(bias, dtype=wide) if needed[2] and bias is not None else None
        self.bias = bias

    @property
    def any(self) -> bool:
        return any(found is not None for found in (self.of_x, self.of_weight, self.of_bias))

    def add(self, first: int, last: int, grad: Tensor) -> None:
        """Add what rows first:last contribute, of whose logits `grad` is the gradient."""
        if self.of_bias is not None:
            self.of_bias += grad.sum(0)
        grad, rows = grad.to(self.x.dtype), self.x[first:last]
        if self.of_x is not None:
            torch.mm(grad, self.weight.t() if self.input_first else self.weight, out=self.of_x[first:last])
        if self.of_weight is not None:
            left, right = (rows.t(), grad) if self.input_first else (grad.t(), rows)
            if self.of_weight.dtype == grad.dtype:
                self.of_weight.addmm_(left, right)
            else:
                self.of_weight += torch.mm(left, right)

    def taken(self) -> list[Tensor]:
        """Return what was added up, in the operands' types; what is wide is let go of as it is converted."""
        found = []
        if self.of_x is not None:
            found.append(self.of_x)
        if self.of_weight is not None:
            found.append(self.of_weight.to(self.weight.dtype))
            self.of_weight = None
        if self.of_bias is not None and self.bias is not None:
            found.append(self.of_bias.to(self.bias.dtype))
        return found


def _localize(ctx: LocalContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not ctx.split("t", "v"):
        return target, args, kwargs
    x, labels, class_weight, weight, bias, reduction, ignore_index, smoothing, input_first, dtype, num_chunks = args
    num_classes = ctx.global_shape(1 + (class_weight is not None) + 1)[1 if input_first else 0]
    head = Head(num_classes, ignore_index, smoothing, input_first, dtype, num_chunks)
    if ctx.split("v"):
        head = replace(head, start=ctx.range_of("v")[0], vocabulary=ctx.group_of("v"))
    operands = x, labels, class_weight, weight, bias

    def own_sum(*tensors: Any) -> Any:
        return _run(head, None, *tensors)

    def share_of_mean(count: Any, *tensors: Any) -> Any:
        return _run(head, count, *tensors)

    def weight_of(own_labels: Any, own_weight: Any) -> Any:
        return partial.label_weight(own_labels, own_weight, ignore_index)

    if reduction != MEAN:
        return own_sum, operands, {}
    if not ctx.split("t"):
        return (lambda *tensors: share_of_mean(weight_of(*tensors[1:3]), *tensors)), operands, {}
    return WithSum(share_of_mean, weight_of, (1, 2), ctx.group_of("t")), operands, {}


def _weight(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return partial.label_weight(args[1], args[2], args[6])


def _summed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (*args[:5], SUM, *args[6:]), kwargs


@rule(NAME, localize=_localize, weight=WeightRule(_weight, _summed))
def signature(call: Call) -> Signature:
    """`t i, t, v, v i, v -> `: rows are a reduced loop, classes are split with care, features stay whole."""
    x, _, class_weight, weight, bias, reduction = call.args[:6]
    input_first = call.args[8]
    b = SignatureBuilder()
    t, i = b.loop("t", x.shape[0]), b.loop("i", x.shape[1], whole=True)
    v = b.loop("v", weight.shape[1 if input_first else 0], whole=class_weight is not None)
    of_weight: Dims = (i, v) if input_first else (v, i)
    ins = [(t, i), (t,), *[(v,)] * (class_weight is not None), of_weight, *[(v,)] * (bias is not None)]
    return b.build(ins, [()], ["t"], averaged=reduction == MEAN, joint=["v"])


describe(NAME, by_running=True)
