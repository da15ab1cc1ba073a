"""Calls on fakes, each kind of which is really followed once: a call like an earlier one is answered from that.

A model repeats itself (80 layers, 700 parameters to update), and what a call makes on fakes depends on nothing but the
op, its arguments' shapes, strides and types, and its numbers: the call's `signature`. What comes back is, output by
output, an argument itself, a view of one, or memory of its own; so a repetition needs neither the op's shape function
nor torch's own checks. Autograd, which works above, sees no difference. Where in its memory an argument begins makes no
difference either but to where a view of it begins, so the parts of one buffer are alike; cutting them off it, each at
another place, is worked out here, and so are views of what lies row by row, whose sizes differ from layout to layout.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.functional import linear_io
from .fakes import FakeMode
from .private import FakeMaker, FakeTensor

Key = tuple[Any, ...]
_META = torch.device("meta")
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_BEYOND_SHAPES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
_MOST_RECIPES = 100_000
"""A process that plans for very many models forgets the first ones'."""
_SLICE = torch.ops.aten.slice.Tensor
_VIEW = torch.ops.aten.view.default
_EXCEPTIONS = ("as_strided", "lift", "set_", "resize")


class RepeatedCalls:
    """Runs calls on fakes of `mode` through `run(func, args, kwargs)`, every signature once.

    recipes: what earlier ones with the same `run`, on other modes, learned of results; added to.

    >>> from trainwright.torch_internals.fakes import new_mode
    >>> add, mode, followed = torch.ops.aten.add.Tensor, new_mode(), []
    >>> def run(func, args, kwargs):
    ...     followed.append(func)
    ...     with mode:
    ...         return func(*args, **kwargs)
    >>> with mode:
    ...     x = torch.empty(3, 5)
    >>> calls = RepeatedCalls(mode, run)
    >>> [calls(add, (x, x), {}).shape for _ in range(4)] == [x.shape] * 4, len(followed)
    (True, 1)
    """

    def __init__(
        self,
        mode: FakeMode,
        run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
        recipes: dict[Key, Recipe | None] | None = None,
    ) -> None:
        self._make = FakeMaker(mode)
        self._run = run
        self._recipes: dict[Key, Recipe | None] = {} if recipes is None else recipes
        if len(self._recipes) > _MOST_RECIPES:
            self._recipes.clear()

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _SLICE and not kwargs:
            part = self._slice(*args)
            if part is not None:
                return part
        if func is _VIEW and not kwargs:
            view = self._view(*args)
            if view is not None:
                return view
        key = signature(func, args, kwargs)
        if key is None:
            return self._run(func, args, kwargs)
        recipe = self._recipes.get(key)
        if recipe is not None:
            return recipe.build(self._make, args)
        out = self._run(func, args, kwargs)
        if key not in self._recipes:
            self._recipes[key] = _recipe(args, out)
        return out

    def _slice(self, source: Any, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1) -> Tensor | None:
        """Return the part of `source` that `aten.slice` gives; None where more than plain numbers decide it."""
        numbers = (0 if start is None else start, sys.maxsize if end is None else end, step)
        if type(dim) is not int or any(type(number) is not int for number in numbers) or _parts((source,)) is None:
            return None
        if not -source.dim() <= dim < source.dim() or step < 1 or source.is_neg():
            return None  # an error, for torch to raise
        dim %= source.dim()
        first, last, step = slice(*numbers).indices(source.shape[dim])
        shape, stride = list(source.shape), list(source.stride())
        offset = first * stride[dim]
        shape[dim], stride[dim] = max(0, -(-(last - first) // step)), stride[dim] * step
        output = _Output(0, False, torch.Size(shape), tuple(stride), offset, source.dtype, source.fake_device)
        return output.build(self._make, [source])

    def _view(self, source: Any, sizes: Any) -> Tensor | None:
        """Return the view that `aten.view` gives of a tensor that lies row by row; None where that takes more than its size."""
        if any(type(size) is not int for size in sizes) or _parts((source,)) is None or source.is_neg():
            return None
        num, shape = source.numel(), list(sizes)
        if -1 in shape:
            shape[shape.index(-1)] = num // max(1, -math.prod(shape))
        if min(shape, default=1) < 1 or math.prod(shape) != num or source.stride() != _by_rows(source.shape):
            return None
        output = _Output(0, False, torch.Size(shape), _by_rows(shape), 0, source.dtype, source.fake_device)
        return output.build(self._make, [source])


def _by_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor that lies row by row.

    >>> _by_rows((2, 1, 3))
    (3, 3, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def signature(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key | None:
    """Return what decides how the result of a call on fakes looks; None where that takes more than shapes.

    It also decides the call's FLOPs and bytes. Equal numbers of different type (1, 1.0, True) are told apart.

    >>> x = torch.empty(3)
    >>> signature(torch.ops.aten.add.Tensor, (x, x), {}) is None  # not a fake: its values may count
    True
    """
    known = _REPEATABLE.get(func)
    if known is None:
        known = _REPEATABLE[func] = _is_repeatable(func)
    if not known:
        return None
    parts = _parts(args)
    if parts is None:
        return None
    if not kwargs:
        return (func, torch.get_default_dtype(), parts)
    named = _parts(tuple(kwargs.values()))
    return None if named is None else (func, torch.get_default_dtype(), parts, tuple(kwargs), named)


_REPEATABLE: dict[Any, bool] = {linear_io: True}


def _is_repeatable(func: Any) -> bool:
    if getattr(func, "namespace", "") not in ("aten", "prims"):
        return False  # the fake form of a user's op is the user's code
    name = func._schema.name.rpartition("::")[2]
    return not name.startswith(_EXCEPTIONS) and not any(tag in func.tags for tag in _BEYOND_SHAPES)


def _parts(values: tuple[Any, ...] | list[Any]) -> Key | None:
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
                return None
            found.append((value.dtype, value.shape, value.stride(), value.fake_device))
            found.append(value.requires_grad)
            found.append(value.is_neg())
        elif kind in _PLAIN:
            found.append(kind)
            found.append(value)
        elif kind is tuple or isinstance(value, list):
            inner = _parts(value)
            if inner is None:
                return None
            found.append(inner)
        else:
            return None
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Output:
    """One output: a tensor with memory of its own, an earlier one itself, or a view of an earlier one.

    Earlier are the arguments, in their order, and the outputs before this one.
    """

    source: int | None
    is_source: bool
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    """Of a view: how many elements after the beginning of what it is a view of."""
    dtype: torch.dtype
    device: torch.device

    def build(self, make: FakeMaker, earlier: list[Tensor]) -> Tensor:
        if self.source is None:
            plain = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=_META)
        elif self.is_source:
            return earlier[self.source]
        else:
            source = earlier[self.source]
            plain = torch.empty(0, dtype=self.dtype, device=_META)
            plain.set_(source.untyped_storage(), source.storage_offset() + self.offset, self.shape, self.stride)
        return make(plain, self.device)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the result of a call is made again."""

    outputs: tuple[_Output | None, ...]
    container: type | None
    """list or tuple; None for a single tensor."""

    def build(self, make: FakeMaker, args: tuple[Any, ...]) -> Any:
        earlier = _tensors(args)
        made: list[Tensor | None] = []
        for output in self.outputs:
            made.append(None if output is None else output.build(make, earlier))
            if made[-1] is not None:
                earlier.append(made[-1])
        return made[0] if self.container is None else self.container(made)


def _recipe(args: tuple[Any, ...], out: Any) -> Recipe | None:
    """Return how `out` came from `args`; None where that cannot be said from shapes alone."""
    container = type(out) if type(out) in (list, tuple) else None
    earlier = _tensors(args)
    sources = [id(tensor.untyped_storage()) for tensor in earlier]
    outputs: list[_Output | None] = []
    for result in [out] if container is None else out:
        if result is None and container is not None:
            outputs.append(None)
            continue
        output = None if type(result) is not FakeTensor else _output(result, earlier, sources)
        if output is None or _is_odd(result, output):
            return None
        if output.source is not None and sources.count(sources[output.source]) > 1:
            return None  # which of two arguments alike would it be?
        if output.source is not None and output.dtype is not earlier[output.source].dtype:
            return None  # its beginning is counted in elements of another size
        outputs.append(output)
        earlier.append(result)
        sources.append(id(result.untyped_storage()))
    return Recipe(tuple(outputs), container)


def _output(result: Any, earlier: list[Tensor], sources: list[int]) -> _Output:
    key = id(result.untyped_storage())
    source = next((place for place, tensor in enumerate(earlier) if tensor is result), None)
    is_source = source is not None
    if source is None and key in sources:
        source = sources.index(key)
    offset = result.storage_offset() - (0 if source is None else earlier[source].storage_offset())
    return _Output(source, is_source, result.shape, result.stride(), offset, result.dtype, result.fake_device)


def _is_odd(result: Any, output: _Output) -> bool:
    """Whether a result is more than its shape, strides and type say, or holds more memory."""
    if result.constant is not None or result.layout is not torch.strided or result.is_conj() or result.is_neg():
        return True
    if output.source is not None:
        return False
    usual = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device=_META)
    return result.requires_grad or result.untyped_storage().nbytes() != usual.untyped_storage().nbytes()


def _tensors(args: tuple[Any, ...] | list[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif type(arg) is tuple or isinstance(arg, list):
            found.extend(_tensors(arg))
    return found
