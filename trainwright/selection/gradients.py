"""Gradient proxies of a classifier: each example's loss gradient at the last layer, without a backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..artifacts import UserError


def last_layer_gradients(
    model: nn.Module, batches: Iterable[Any], *, last_layer: nn.Module | None = None
) -> tuple[Tensor, Tensor]:
    r"""Return each example's cross-entropy gradient at the logits, softmax - one-hot [n, C], and its label [n].

    With `last_layer`, a module of the model whose first input is the embedding [batch, e], the result is the outer product
    (softmax - one-hot) ⊗ embedding [n, C · e]: the gradient at that linear layer's weight. `batches` yield (x, y, …)
    in the dataset's order, y class numbers; `model(x)` is the logits. The model is put in eval mode for the pass and
    back; nothing is written to. Results are on the CPU.

    Raises `UserError` where batches are no (x, y), logits are no [batch, C], or labels do not fit them. Near convergence
    all rows are almost zero, and say little: stop selecting then. Memory is O(n C e): leave `last_layer` out where C e is large.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> last_layer_gradients(model, [(torch.ones(1, 2), torch.tensor([1]))])
    (tensor([[ 0.5000, -0.5000]]), tensor([1]))

    Source: Katharopoulos & Fleuret 2018 (arXiv:1803.00942), used so by Mirzasoleiman, Bilmes & Leskovec 2020
    (arXiv:1906.01827).
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    rows, labels = [], []
    with _evaluating(model), _inputs_of(last_layer) as embeddings, torch.no_grad():
        for batch in batches:
            x, y = _pair(batch, device)
            difference = logit_gradients(model(x), y)
            if last_layer is not None:
                difference = _outer(difference, embeddings)
            rows.append(difference.cpu())
            labels.append(y.cpu())
    if not rows:
        raise UserError("at least one batch is needed; got none; give a loader over the examples")
    return torch.cat(rows), torch.cat(labels)


def _pair(batch: Any, device: torch.device) -> tuple[Any, Tensor]:
    if not isinstance(batch, (tuple, list)) or len(batch) < 2 or not isinstance(batch[1], Tensor):
        raise UserError(f"batches (x, y) are needed; got {type(batch).__name__}; yield inputs and labels")
    x = batch[0].to(device) if isinstance(batch[0], Tensor) else batch[0]
    return x, batch[1].to(device)


def logit_gradients(logits: Tensor, y: Tensor) -> Tensor:
    """Return softmax(logits) - one-hot(y) [n, C]: each example's cross-entropy gradient at its logits [n, C]; y [n] class numbers.

    Raises `UserError` where the shapes do not match or a label is no class. The gradient at a bias of the last layer;
    for that at its weight see `last_layer_gradients`.

    >>> logit_gradients(torch.zeros(1, 2), torch.tensor([1]))
    tensor([[ 0.5000, -0.5000]])

    Source: Katharopoulos & Fleuret 2018 (arXiv:1803.00942).
    """
    if not isinstance(logits, Tensor) or logits.dim() != 2 or y.shape != logits.shape[:1]:
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(f"logits [{len(y)}, C] are needed; the model returned {found}; wrap it to return them")
    if y.is_floating_point() or not (int(y.min()) >= 0 and int(y.max()) < logits.shape[1]):
        raise UserError(f"labels from 0 to {logits.shape[1] - 1} are needed; got others; number the classes so")
    difference = logits.softmax(1)
    difference[torch.arange(len(y), device=y.device), y] -= 1.0
    return difference


def _outer(difference: Tensor, embeddings: list[Tensor]) -> Tensor:
    if len(embeddings) != 1 or embeddings[0].dim() != 2:
        raise UserError(
            f"one embedding [batch, e] a pass is needed; last_layer saw {[list(e.shape) for e in embeddings]}; "
            "give the final linear layer"
        )
    return (difference[:, :, None] * embeddings.pop()[:, None, :]).flatten(1)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, then each module as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _inputs_of(layer: nn.Module | None) -> Iterator[list[Tensor]]:
    """What the layer is called with, a tensor a call."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])) if layer is not None else None
    try:
        yield seen
    finally:
        if handle is not None:
            handle.remove()
