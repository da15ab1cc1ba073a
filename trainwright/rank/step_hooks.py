"""Calls a method before each step of any optimizer, for as long as its owner lives."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

_ownerless: list[RemovableHandle] = []
"""Hooks whose owners are gone. An owner may go while torch goes through all hooks, which then must not change."""


def before_each_step(method: Any) -> RemovableHandle:
    """Call the bound `method(optimizer, args, kwargs)` before each step of any optimizer; it holds its owner weakly.

    >>> class Counter:
    ...     num = 0
    ...     def count(self, *_):
    ...         self.num += 1
    >>> import torch
    >>> counter, optimizer = Counter(), torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    >>> hook = before_each_step(counter.count)
    >>> optimizer.step()
    >>> hook.remove()
    >>> optimizer.step()
    >>> counter.num
    1
    """
    while _ownerless:
        _ownerless.pop().remove()
    found = weakref.WeakMethod(method)

    def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        bound = found()
        return None if bound is None else bound(optimizer, args, kwargs)

    handle = register_optimizer_step_pre_hook(hook)
    weakref.finalize(method.__self__, _ownerless.append, handle)
    return handle
