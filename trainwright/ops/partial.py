"""The arithmetic of ops whose loops are split: each rank computes a part, and the parts add up to what one process gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .local import AxisGroup

Map = Callable[[Tensor], Tensor]


class _Pair(torch.autograd.Function):
    """A linear map between the ranks' parts, and what maps gradients back, itself a map whose gradients the first one takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.pair = back, there
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Pair.apply(grads[0], *ctx.pair), None, None


def once(value: Tensor, is_owner: bool) -> Tensor:
    """Return `value` on the owner and zeros elsewhere, so that a sum over the ranks counts it once."""
    # The output is a partial sum, so every rank already holds its whole gradient.
    return _Pair.apply(value, _same if is_owner else torch.zeros_like, _same)


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum_for_parts(group: AxisGroup, part: Tensor) -> Tensor:
    """Return the sum over the ranks, as an operand of ops of which each rank runs a part."""
    summed = lambda x: group.all_reduce(x.clone())  # noqa: E731 - both directions are the same
    return _Pair.apply(part, summed, summed)


def _for_parts(group: AxisGroup, whole: Tensor) -> Tensor:
    """Return what every rank holds, as an operand of ops of which each rank runs a part."""
    return _Pair.apply(whole, _same, lambda x: group.all_reduce(x.clone()))


def mean_of_whole(x: Tensor, axes: tuple[int, ...], keepdim: bool, count: int, dtype: torch.dtype | None) -> Tensor:
    """Return the rank's share of a mean over `count` entries of the whole tensor."""
    return x.sum(dim=axes, keepdim=keepdim, dtype=dtype) / count


def convolution_without_channels(shape: Sequence[int], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the share of a rank that has none of the input channels: zeros of `shape`, to which the bias is added.

    torch's convolutions of no channels have no output channels either.
    """
    share = x.new_zeros(shape) + (x.sum() + weight.sum())
    return share if bias is None else share + bias.view(-1, *[1] * (len(shape) - 2))


def embedding_of_range(weight: Tensor, indices: Tensor, start: int, stop: int, padding_idx: int = -1) -> Tensor:
    """Look up the rows `start:stop` that `weight` holds; other indices give zeros."""
    if stop == start:
        return weight.new_zeros((*indices.shape, weight.shape[1])) + weight.sum()
    outside = (indices < start) | (indices >= stop)
    padding = padding_idx - start if start <= padding_idx < stop else None
    rows = F.embedding((indices - start).masked_fill_(outside, 0), weight, padding)
    return rows.masked_fill(outside.unsqueeze(-1), 0.0)


def cross_entropy_over(
    vocabulary: AxisGroup | None,
    vocab_range: tuple[int, int, int],
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """Return the cross-entropy of the rank's samples, or their sum where it is to be a mean.

    `logits` is the rank's part (samples × classes, then space), `vocab_range` the start and stop of its classes. With
    `vocabulary` the ranks of that group hold different classes and all get the same result.
    """
    if vocabulary is not None:
        loss, _ = _VocabCrossEntropy.apply(logits, labels, vocabulary, vocab_range[0], vocab_range[1], ignore_index)
        return loss.sum() if reduction else loss
    name = "sum" if reduction else "none"
    return F.cross_entropy(logits, labels, weight, None, ignore_index, None, name, label_smoothing)


def mean_of(loss: Tensor, count: Tensor) -> Tensor:
    """Return a sum over the rank's labels as its share of the mean over `count` of them."""
    return (loss / count).to(loss.dtype)


def label_weight(labels: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return what a mean over `labels` is divided by: how many count, or the sum of their classes' weights.

    In float64, as a number of labels may have more digits than the losses.
    """
    valid = labels != ignore_index
    if weight is None:
        return valid.sum().double()
    return weight.detach()[labels.masked_fill(~valid, 0)].masked_fill(~valid, 0.0).sum(dtype=torch.float64)


class _VocabCrossEntropy(torch.autograd.Function):
    """Per-sample cross-entropy of logits whose classes are split: three small reductions, no gather.

    It returns the probabilities p too, though nobody reads them: a gradient that is differentiated again does.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, group: AxisGroup, start: int, stop: int, ignore: int
    ) -> tuple[Tensor, Tensor]:
        if stop > start:
            peak = logits.amax(dim=-1)
        else:
            peak = logits.new_full(logits.shape[:-1], float("-inf"))
        peak = group.all_reduce(peak, "max")
        probabilities = (logits - peak.unsqueeze(-1)).exp_()
        total = group.all_reduce(probabilities.sum(dim=-1))
        probabilities.div_(total.unsqueeze(-1))
        inside = (labels >= start) & (labels < stop)
        rows = (labels - start).masked_fill_(~inside, 0)
        if stop > start:
            chosen = logits.gather(-1, rows.unsqueeze(-1)).squeeze(-1).masked_fill(~inside, 0.0)
        else:
            chosen = torch.zeros_like(peak)
        chosen = group.all_reduce(chosen)
        ignored = labels == ignore
        ctx.save_for_backward(probabilities, rows, inside, ignored)
        ctx.group = group
        ctx.set_materialize_grads(False)
        return (total.log() + peak - chosen).masked_fill_(ignored, 0.0), probabilities

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """∂/∂logits = (p - e) ∂loss + p ∘ (∂p - Σ p ∂p), e the label's unit vector; the sum is over all ranks' classes."""
        probabilities, rows, inside, ignored = ctx.saved_tensors
        grad = None
        if grads[0] is not None:
            given = _for_parts(ctx.group, grads[0]) if torch.is_grad_enabled() else grads[0]
            scale = given.masked_fill(ignored, 0.0).unsqueeze(-1)
            grad = probabilities * scale
            if grad.shape[-1]:
                grad = grad.scatter_add_(-1, rows.unsqueeze(-1), -(scale * inside.unsqueeze(-1)))
        if grads[1] is not None:
            inner = _sum_for_parts(ctx.group, (probabilities * grads[1]).sum(-1, keepdim=True))
            own = probabilities * (grads[1] - inner)
            grad = own if grad is None else grad + own
        return grad, None, None, None, None, None


def batch_norm_over(
    group: AxisGroup,
    count: int,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Batch normalisation with the statistics of the whole batch (`count` entries a channel), as one process takes them."""
    return _BatchNorm.apply(x, weight, bias, group, count, running_mean, running_var, momentum, eps)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, group: AxisGroup, count: int, mean_buffer: Any, var_buffer: Any,
                momentum: float, eps: float) -> Tensor:  # fmt: skip
        axes, shape = _channel_layout(x)
        mean = group.all_reduce(x.sum(axes)) / count
        centred = x - mean.view(shape)
        var = group.all_reduce((centred * centred).sum(axes)) / count
        inverse = (var + eps).rsqrt()
        if mean_buffer is not None:
            mean_buffer.mul_(1 - momentum).add_(mean, alpha=momentum)
            var_buffer.mul_(1 - momentum).add_(var, alpha=momentum * count / max(1, count - 1))
        out = centred.mul_(inverse.view(shape))
        if weight is not None:
            out = out * weight.view(shape)
        if bias is not None:
            out = out.add_(bias.view(shape)) if weight is not None else out + bias.view(shape)
        ctx.save_for_backward(x, weight, mean, inverse)
        ctx.group, ctx.count, ctx.has_bias, ctx.eps = group, count, bias is not None, eps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_batch_norm_gradients(ctx, x, weight, grads[0]), None, None, None, None, None, None
        axes, shape = _channel_layout(x)
        grad = grads[0]
        normal = (x - mean.view(shape)).mul_(inverse.view(shape))
        own = torch.stack([grad.sum(axes), (grad * normal).sum(axes)])
        # The rank's own sums are the partial gradients of bias and weight; the input needs those of the whole batch.
        whole = ctx.group.all_reduce(own.clone()) / ctx.count
        scale = inverse if weight is None else inverse * weight
        grad_x = normal.mul_(whole[1].view(shape)).add_(whole[0].view(shape)).neg_().add_(grad).mul_(scale.view(shape))
        grad_weight = own[1].clone() if weight is not None else None
        return grad_x, grad_weight, own[0].clone() if ctx.has_bias else None, None, None, None, None, None, None


def _batch_norm_gradients(ctx: Any, x: Tensor, weight: Tensor | None, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradients, out of place and with the statistics as functions of `x`: they are differentiated again."""
    axes, shape = _channel_layout(x)
    mean = _sum_for_parts(ctx.group, x.sum(axes)) / ctx.count
    centred = x - mean.view(shape)
    inverse = (_sum_for_parts(ctx.group, (centred * centred).sum(axes)) / ctx.count + ctx.eps).rsqrt()
    normal = centred * inverse.view(shape)
    own = torch.stack([grad.sum(axes), (grad * normal).sum(axes)])
    whole = _sum_for_parts(ctx.group, own) / ctx.count
    scale = inverse if weight is None else inverse * weight
    grad_x = (grad - whole[0].view(shape) - normal * whole[1].view(shape)) * scale.view(shape)
    return grad_x, own[1] if weight is not None else None, own[0] if ctx.has_bias else None


def _channel_layout(x: Tensor) -> tuple[list[int], list[int]]:
    """The axes over which a channel's statistics run, and the shape in which per-channel values broadcast."""
    return [axis for axis in range(x.dim()) if axis != 1], [1, -1] + [1] * (x.dim() - 2)
