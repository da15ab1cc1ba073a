"""Functions that torch writes in Python out of others: their own text runs on fused tensors."""

from __future__ import annotations

import types
from typing import Any

from torch.nn import functional as F

from .array import rules


def _never(*args: Any) -> bool:
    return False


def own_text(func: Any) -> Any:
    """Return a function of `torch.nn.functional` that does not hand itself to `__torch_function__` as a whole.

    The functions that it calls still do, so that each meets its rule.
    """
    names = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never)
    return types.FunctionType(
        func.__code__, {**func.__globals__, **names}, func.__name__, func.__defaults__, func.__closure__
    )


for _func in (F.multi_head_attention_forward,):
    _own = own_text(_func)
    _own.__kwdefaults__ = _func.__kwdefaults__
    rules[_func] = _own
