"""An update of lists of one as one compiled pass over memory."""

from __future__ import annotations

import functools
import types
from typing import Any, Protocol

import torch
from torch import Tensor

from .batch import Lists, turned, working_dtype


class Update(Protocol):
    """One in-place update of lists of tensors; see `trainwright.optim.base.Method`."""

    def __call__(
        self, params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None: ...


def taking_any(update: Update) -> Update:
    """Return `update`, which works in fp32 at least and descends, for what its caller holds.

    Parameters and gradients may be bf16 or fp16: the update is then of copies, rounded back (compiled, of registers).
    `options["maximize"]` turns the gradients around.
    """

    def run(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        wide = [param.to(working_dtype(param.dtype)) for param in params]
        used = [turned(grad, own.dtype, options["maximize"]) for grad, own in zip(grads, wide)]
        update(wide, used, states, step, lr, options)
        for param, own in zip(params, wide):
            if own is not param:
                param.copy_(own)

    return run


@functools.cache
def compiled(update: Update) -> Update:
    """Return `update` compiled for one parameter at a time; single elements and odd strides are updated uncompiled.

    Takes what `taking_any` does.
    """
    general = taking_any(update)
    program = torch.compile(_with_own_code(general), dynamic=True)

    def run(
        params: list[Tensor], grads: list[Tensor], states: Lists, step: Any, lr: Any, options: dict[str, Any]
    ) -> None:
        flat = _flat(params, grads, states)
        if flat is None:
            general(params, grads, states, step, lr, options)
        else:
            program(*flat, step, lr, options)

    return run


def _with_own_code(function: Any) -> Any:
    """Return the same function: torch counts and limits what it compiles by code, and one method's is not another's."""
    code = function.__code__.replace()
    return types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


def flat_views(tensors: list[Tensor]) -> list[Tensor] | None:
    """Return views with one dim in the order of memory; `None` where the tensors' orders differ, or leave gaps.

    A tensor without dimensions goes with any.
    """
    first = tensors[0]
    if not all(tensor.stride() == first.stride() or tensor.dim() == 0 for tensor in tensors) or not _is_dense(first):
        return None
    return [tensor.detach().as_strided((tensor.numel(),), (1,)) for tensor in tensors]


def _flat(params: list[Tensor], grads: list[Tensor], states: Lists) -> tuple[list[Tensor], list[Tensor], Lists] | None:
    found = flat_views([*params, *grads, *(tensor for own in states.values() for tensor in own)])
    if found is None or params[0].numel() < 2:
        return None
    views = iter(found)
    return [next(views)], [next(views)], {name: [next(views) for _ in own] for name, own in states.items()}


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory, in whatever order of dims."""
    order = sorted(range(tensor.dim()), key=tensor.stride)
    return tensor.permute(order[::-1]).is_contiguous()
