"""Fake execution that still knows small integer values, so that a model takes the branches it takes in earnest.

Models look at positions, masks and lengths (`if mask.all():`, `lengths.max().item()`). On tensors without values such
code fails, or takes another way than on real ones (Hugging Face models build explicit attention masks there). What is
computed from integers alone is cheap, so it is computed; everything else stays without memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..capture._torch_private import TorchDispatchMode
from ..capture.fakes import FakeMode
from .layouts import lay_out

_DEVICE_OF = torch.ops.prim.device.default
_CPU = torch.device("cpu")
_INDEXED = {
    getattr(torch.ops.aten, name).default if name != "index" else torch.ops.aten.index.Tensor
    for name in ("index", "index_put", "index_put_", "_index_put_impl_")
}
LIMIT_BYTES = 16 * 2**20
"""Larger results than this (a mask of 4096 × 4096 booleans) have no values."""


class KnownValues(TorchDispatchMode):
    """Runs each call on fakes of `fake_mode`, but on values where all its tensors are real and the result is integer.

    Enter it in place of `fake_mode`. Random numbers are never drawn: the caller's generator stays as it is. What
    `keeps_values` accepts may enter as a real tensor; all floating-point tensors enter as fakes.
    """

    def __init__(self, fake_mode: FakeMode) -> None:
        super().__init__()
        self._fake_mode = fake_mode
        self._fake_type = type(_any_fake(fake_mode))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _DEVICE_OF:  # asked of fakes several times a call: answered without running anything
            return getattr(args[0], "fake_device", _CPU)
        kwargs = kwargs or {}
        if self._fake_type in types or torch.Tag.nondeterministic_seeded in func.tags:
            return self._on_fakes(func, args, kwargs)
        if not all(keeps_values(tensor) for tensor in _tensors((args, kwargs))):
            return self._on_fakes(func, args, kwargs)
        try:
            shapes = self._on_fakes(func, args, kwargs)
        except (RuntimeError, NotImplementedError):
            return func(*args, **kwargs)  # what depends on values (`item`, `nonzero`) has no shape without them
        return func(*args, **kwargs) if all(keeps_values(tensor) for tensor in _tensors(shapes)) else shapes

    def _on_fakes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _INDEXED:
            args = (args[0], _without_masks(args[1], self._fake_type), *args[2:])
        with self._fake_mode:
            return lay_out(func, args, func(*args, **kwargs))


def _without_masks(indices: list[Tensor | None], fake_type: type) -> list[Tensor | None]:
    """Replace each known boolean mask by the positions that it selects, so that their number is known."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype is torch.bool and not isinstance(index, fake_type):
            found.extend(index.nonzero().unbind(1))
        else:
            found.append(index)
    return found


def keeps_values(tensor: Tensor) -> bool:
    """Tell whether a tensor is an integer one, small, with values (not on the meta device)."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.device.type != "cpu":
        return False
    return tensor.numel() * tensor.element_size() <= LIMIT_BYTES


def _any_fake(fake_mode: FakeMode) -> Tensor:
    with fake_mode:
        return torch.empty(0)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
