"""Pruning of a model by M-FAC: one-shot or in stages, over the weights of its layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts import UserError
from .base import check_range
from .mfac_inverse import MFACInverse, pruning_stages

Masks = dict[str, Tensor]
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class Pruned:
    """What `prune_model` did."""

    masks: Masks
    """By parameter name: true for weights that are left, in the parameter's shape."""
    sparsity: float
    """The share of the pruned layers' weights that is zero."""
    predicted_rise: float
    """Of the loss, to second order: the sum of the removed weights' scores over all stages, interactions left out."""

    @torch.no_grad()
    def apply(self, model: nn.Module) -> None:
        """Set the removed weights of `model` to zero again: call it after each optimizer step of further training."""
        params = dict(model.named_parameters())
        for name, mask in self.masks.items():
            params[name].mul_(mask)


def prune_model(
    model: nn.Module,
    gradients: Callable[[], Iterable[Any]],
    sparsity: float,
    *,
    num_stages: int = 1,
    names: Sequence[str] | None = None,
    damping: float = 1e-5,
    block_size: int | None = 128,
    after_stage: Callable[[Pruned], None] | None = None,
) -> Pruned:
    r"""Set the least needed weights of a model to zero and let the others make up for them, by M-FAC's inverse Fisher.

    Each stage takes fresh gradients g_i of the loss, F = λI + (1/m) Σ g_i g_iᵀ of each layer, scores every weight by
    w² / (2 [F⁻¹]_kk), removes those of the lowest score over all layers together, and moves the rest by the sum of
    their optimal corrections.

    gradients: called once a stage; returns or yields losses, one a row of F: of single samples or of small batches, each
        with its graph (m of 64 is usual; a layer holds m · its weights twice for a moment).
    sparsity: the share of the chosen weights to end at zero, in (0, 1). num_stages: 1 is one-shot; more remove the same share of
        what is left each (`pruning_stages`), which is better: interactions among weights removed at once are left out.
    names: of the parameters to prune; `None`: the weights of linear and convolutional layers.
    damping: λ. block_size: consecutive weights that are inverted together; `None`: a whole layer, m · layer numbers still.
    after_stage: called with the result so far, to train on between stages (call `result.apply(model)` after each step).

    The model stays in its mode: eval, to score what will be used. Raises `UserError`, with nothing changed by that stage,
    for unknown names, a sparsity that is reached already, no losses, and gradients that are not finite.

    >>> _ = torch.manual_seed(0)
    >>> model, inputs = nn.Linear(6, 2), torch.randn(32, 6)
    >>> found = prune_model(model, lambda: [model(x).square().sum() for x in inputs], 0.5, num_stages=3)
    >>> int((model.weight == 0).sum()), found.sparsity
    (6, 0.5)

    Source: Frantar, Kurtic & Alistarh 2021, M-FAC. Scores of all layers are compared, as in the authors' global pruning.
    """
    check_range("prune_model", sparsity=(sparsity, "in (0, 1)", lambda value: 0.0 < value < 1.0))
    params = _chosen(model, names)
    masks = {name: param.detach() != 0 for name, param in params.items()}
    stages, rise = pruning_stages(_sparsity(masks), sparsity, num_stages), 0.0
    result = Pruned(masks, _sparsity(masks), rise)
    for stage in stages:
        rows = _rows(params, gradients())
        inverses = {
            name: MFACInverse(rows[name], damping, block_size, masks[name].flatten().to(rows[name].dtype))
            for name in params
        }
        removed, cost = _lowest(params, inverses, masks, stage)
        _remove(params, inverses, masks, removed)
        rise += cost
        result = Pruned(masks, _sparsity(masks), rise)
        if after_stage is not None:
            after_stage(result)
            result.apply(model)
    return result


def _chosen(model: nn.Module, names: Sequence[str] | None) -> dict[str, nn.Parameter]:
    """Return the parameters to prune, by name; a shared one once."""
    known = dict(model.named_parameters())
    if names is None:
        layers = {id(module.weight) for module in model.modules() if _is_layer(module)}
        found = {name: param for name, param in known.items() if id(param) in layers and param.requires_grad}
        if not found:
            raise UserError("linear or convolutional layers are needed; found none; name the parameters to prune")
        return found
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"names of parameters are needed; got {', '.join(unknown)}; see model.named_parameters()")
    return {name: known[name] for name in names}


def _is_layer(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.ndim > 1 and not isinstance(module, _EMBEDDINGS)


def _sparsity(masks: Masks) -> float:
    return 1.0 - sum(int(mask.sum()) for mask in masks.values()) / sum(mask.numel() for mask in masks.values())


def _rows(params: dict[str, nn.Parameter], losses: Iterable[Any]) -> dict[str, Tensor]:
    """Return each parameter's gradients as rows [m, size], in fp32 at least."""
    weights, rows = list(params.values()), []
    for loss in losses:
        found = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        rows.append([torch.zeros_like(w) if g is None else g.detach() for w, g in zip(weights, found, strict=True)])
    if not rows:
        raise UserError("losses to take gradients of are needed; got none; return one a sample or batch")
    columns = zip(*rows, strict=True)
    return {name: torch.stack([g.flatten() for g in own]).to(_wide(own[0])) for name, own in zip(params, columns)}


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _lowest(
    params: dict[str, nn.Parameter], inverses: dict[str, MFACInverse], masks: Masks, stage: float
) -> tuple[dict[str, Tensor], float]:
    """Return which weights to remove so that `stage` of all are zero, and the sum of their scores."""
    scores = {
        name: inverses[name].scores(param.detach().flatten().to(_wide(param))).double().cpu()
        for name, param in params.items()
    }
    for name, mask in masks.items():
        scores[name][~mask.flatten().cpu()] = math.inf  # removed before
    together = torch.cat(list(scores.values()))
    num_left, num_all = int(together.isfinite().sum()), together.numel()
    num_removed = max(0, round(stage * num_all) - (num_all - num_left))
    chosen = torch.zeros(num_all, dtype=torch.bool)
    places = together.topk(num_removed, largest=False).indices
    chosen[places] = True
    parts = chosen.split([score.numel() for score in scores.values()])
    return dict(zip(scores, parts, strict=True)), float(together[places].sum())


@torch.no_grad()
def _remove(
    params: dict[str, nn.Parameter], inverses: dict[str, MFACInverse], masks: Masks, removed: dict[str, Tensor]
) -> None:
    for name, param in params.items():
        inverse, weights = inverses[name], param.detach().flatten().to(_wide(param))
        gone = removed[name].to(param.device)
        change = torch.where(gone, -weights / inverse.diagonal().to(weights.dtype), 0.0)
        left = masks[name] & ~gone.view_as(param)
        moved = (weights + inverse.product(change).to(weights.dtype)).view_as(param)
        param.copy_(torch.where(left, moved, 0.0))
        masks[name] = left
