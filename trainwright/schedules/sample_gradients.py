"""The gradient of each sample of a batch, a chunk of samples at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from ..artifacts import UserError

SampleLoss = Callable[[Callable[..., Any], Any], Tensor]


def sample_gradients(model: nn.Module, loss_fn: SampleLoss, batch: Any, chunk_size: int = 32) -> Iterator[Tensor]:
    """Yield the gradients of single samples as matrices [chunk_size, num_params], all parameters as one vector.

    They are computed by `torch.func.vmap` of the gradient, so a chunk holds chunk_size times the gradients' memory,
    and costs about 2–4 times its batch gradient.

    model: in the mode to measure in; its parameters that require gradients are taken. Layers whose result for a sample
        depends on the others (BatchNorm in training mode) are refused.
    loss_fn: of (model, sample), the loss of one sample without a batch dimension; it calls the model it is given.
    batch: a tensor, or a tuple, list or dict (nested) of tensors [num_samples, ...].
    chunk_size: samples at a time.

    Raises `UserError` for such layers, an empty batch, and tensors of unequal first dimension.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> loss = lambda model, sample: model(sample).sum()
    >>> [rows.tolist() for rows in sample_gradients(model, loss, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))]
    [[[1.0, 2.0], [3.0, 4.0]]]
    """
    _check_modules(model)
    if chunk_size < 1:
        raise UserError(f"a chunk_size of at least 1 is needed; got {chunk_size}; change it")
    params = {name: param.detach() for name, param in model.named_parameters() if param.requires_grad}
    fixed = {name: param.detach() for name, param in model.named_parameters() if not param.requires_grad}
    fixed |= dict(model.named_buffers())

    def loss(params: dict[str, Tensor], sample: Any) -> Tensor:
        return loss_fn(functools.partial(_call, model, {**fixed, **params}), sample)

    gradients = vmap(grad(loss), in_dims=(None, 0), randomness="different")
    num_samples = _num_samples(batch)
    for start in range(0, num_samples, chunk_size):
        found = gradients(params, _part(batch, start, start + chunk_size))
        yield torch.cat([found[name].flatten(1) for name in params], dim=1)


def _call(model: nn.Module, weights: dict[str, Tensor], *args: Any, **kwargs: Any) -> Any:
    return functional_call(model, weights, args, kwargs)


def _check_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)) and module.training:
            raise UserError(
                f"layers that treat samples apart are needed; {name or 'the model'} is {type(module).__name__} in training mode; "
                "use GroupNorm, or put that layer in eval mode"
            )


def _part(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, dict):
        return {key: _part(value, start, stop) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_part(value, start, stop) for value in batch)
    return batch[start:stop]


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (tuple, list, dict)):
        for value in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(value)
    else:
        raise UserError(
            f"a batch of tensors is needed; found {type(batch).__name__} in it; leave it out, or wrap loss_fn"
        )


def _num_samples(batch: Any) -> int:
    sizes = {tensor.shape[0] if tensor.ndim else 0 for tensor in _tensors(batch)}
    if len(sizes) != 1 or 0 in sizes:
        raise UserError(
            f"tensors of one first dimension, the samples, are needed; got {sorted(sizes)}; give each its samples"
        )
    return sizes.pop()
