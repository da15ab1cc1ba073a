"""Tells whether the first step is already a steady-state one, so that no second one need be run.

The first step of a training differs from the second in two ways: the optimizer makes its state, and a model may cache
something for later (a table that it computes once, a counter). State needs gradients and nothing else: `rehearse_update`
makes it from empty gradients. What a model caches shows in its attributes (`plain_state`) or as memory that outlives the
step. A change of a Python global, a counter say, is not noticed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

Gradients = dict[str, tuple[Any, ...] | None]
_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_SIZED = (list, dict, set, tuple)


def rehearse_update(
    optimizer: torch.optim.Optimizer, model: nn.Module, unseen: AbstractContextManager[Any] | None = None
) -> Gradients | None:
    """Run one update of `optimizer` with an empty gradient for every trainable parameter of `model`, then drop the gradients.

    The optimizer has its state afterwards. The gradients are made in the context `unseen`: no step has them at that time.
    Returns their layouts, to compare with `gradients_of` after a real backward; None when the optimizer rejects such gradients
    (it wants sparse ones, say), possibly half-way through its update.

    >>> layer = nn.Linear(2, 3)
    >>> optimizer = torch.optim.AdamW(layer.parameters())
    >>> rehearsed = rehearse_update(optimizer, layer)
    >>> len(optimizer.state), layer.weight.grad is None
    (2, True)
    >>> layer(torch.ones(1, 2)).sum().backward()
    >>> gradients_of(layer) == rehearsed
    True
    """
    with unseen or nullcontext():
        for param in model.parameters():
            if param.requires_grad:
                param.grad = torch.empty_like(param, requires_grad=False)
    found = gradients_of(model)
    try:
        optimizer.step()
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return None
    finally:
        for param in model.parameters():
            param.grad = None
    return found


def gradients_of(model: nn.Module) -> Gradients:
    """Return the layout, dtype, shape and strides of each parameter's gradient, by name; None where there is no gradient."""
    return {name: _layout(param.grad) for name, param in model.named_parameters()}


def plain_state(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return fingerprints of the attributes of `model`'s modules other than parameters, buffers and submodules.

    An attribute that changes has another fingerprint.

    >>> layer = nn.ReLU()
    >>> before = plain_state(layer)
    >>> layer.num_calls = 1
    >>> plain_state(layer) == before
    False
    """
    return {
        (path, name): _fingerprint(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_TORCH
    }


def _layout(grad: Tensor | None) -> tuple[Any, ...] | None:
    if grad is None:
        return None
    strides = grad.stride() if grad.layout is torch.strided else None
    return grad.layout, grad.dtype, grad.shape, strides


def _fingerprint(value: Any) -> Any:
    """Return a fingerprint that changes when `value` does, without a reference to any tensor, which would delay its release."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, _SIZED):
        return id(value), len(value)
    return id(value)
