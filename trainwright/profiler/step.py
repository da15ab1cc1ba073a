"""Defines the reference training step, which every measurement of this project runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..artifacts import UserError
from ..capture.call import LossFn, call_model, loss_of
from ..capture.export import as_batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


class Observer(Protocol):
    """Protocol of an object that is told of a step's phases, such as `MemoryTracker`."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...

    def mark_forward_end(self) -> Any: ...


def reference_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    loss_fn: LossFn | None = None,
    *,
    autocast: str | None = None,
    accumulate: int = 1,
    keep_grads: bool = False,
    clip_norm: float | None = None,
    clips_lists: bool = False,
    observer: Observer | None = None,
) -> Tensor:
    """Run one training step as an ordinary script would, and return the loss (its graph is spent).

    The gradients of the step before are dropped first (`set_to_none=True`), or zeroed with `keep_grads`; the model's
    output and the loss live until the optimizer is done, as they do in a script. `batch` is a dict (`model(**batch)`) or a
    tuple (`model(*batch)`); the loss is `loss_fn` of the output and what the forward does not take of the batch, or of the
    output and the whole batch where it takes all; without `loss_fn` it is `output.loss`, `output["loss"]`, or a scalar
    returned.

    With `clip_norm`, gradients are clipped to that norm before the update, as `clip_grad_norm_` does: in one pass over lists of
    them with `clips_lists`, its default on a GPU.

    With `accumulate` above 1, `batch` is one micro-batch, run that many times before the update, its loss divided by
    their number; what one of them put out lives until the next one's takes its name.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> reference_step(model, optimizer, (torch.ones(3, 2),), lambda out, batch: out.sum()).shape
    torch.Size([])
    """
    if accumulate < 1:
        raise UserError(f"a number of micro-batches of 1 or more is needed; got {accumulate}; leave it out for one")
    whole = as_batch(batch)
    optimizer.zero_grad(set_to_none=not keep_grads)
    for _ in range(accumulate):
        with _phase(observer, "forward"):
            with _autocast(autocast):
                out = call_model(model, whole, loss_fn)
                loss = _scalar(loss_of(model, whole, loss_fn, out))
                loss = loss if accumulate == 1 else loss / accumulate
            if observer is not None:
                observer.mark_forward_end()
        with _phase(observer, "backward"):
            loss.backward()
    if clip_norm is not None:
        with _phase(observer, "update"):
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm, foreach=clips_lists)
    with _phase(observer, "update"):
        optimizer.step()
    return loss


def _scalar(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise UserError(f"a scalar loss is needed; got {found}; reduce it to a mean or a sum, or give loss_fn")


def _phase(observer: Observer | None, name: str) -> AbstractContextManager[None]:
    return nullcontext() if observer is None else observer.phase(name)


def _autocast(dtype: str | None) -> AbstractContextManager[Any]:
    if dtype is None:
        return nullcontext()
    if dtype not in DTYPES:
        raise UserError(f"autocast must be one of {', '.join(DTYPES)}; got {dtype!r}; choose one of these")
    return torch.autocast("cpu", dtype=DTYPES[dtype])
