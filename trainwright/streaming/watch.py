"""Detects a read of a parameter outside its part, by a mode that sees every torch call of a forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_ASKS_FOR_NO_VALUES = {
    "__get__", "__set__", "__len__", "__repr__", "__format__", "__hash__", "dim", "ndimension", "numel", "nelement", "size",
    "stride", "type", "is_floating_point", "is_complex", "is_contiguous", "element_size", "get_device", "requires_grad_",
    "data_ptr", "storage_offset",
}  # fmt: skip


class ReadElsewhere(Exception):
    """Raised when a parameter is read while its part is not loaded."""

    def __init__(self, param: nn.Parameter) -> None:
        super().__init__("a parameter is read outside the module that holds it")
        self.param = param


class _Knows(Protocol):
    away: set[int]


class Watch(TorchFunctionMode):
    """Function mode that raises `ReadElsewhere` for a call with a parameter that is not loaded."""

    def __init__(self, streamed: _Knows) -> None:
        super().__init__()
        self._away = streamed.away

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _ASKS_FOR_NO_VALUES:
            for value in _tensors(args, kwargs):
                if isinstance(value, nn.Parameter) and id(value) in self._away:
                    raise ReadElsewhere(value)
        return func(*args, **(kwargs or {}))


def _tensors(args: Iterable[Any], kwargs: dict[str, Any] | None) -> Iterable[torch.Tensor]:
    for value in [*args, *(kwargs or {}).values()]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (each for each in value if isinstance(each, torch.Tensor))
