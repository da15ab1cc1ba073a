"""Fake execution that still knows small integer values, so that a model takes the branches it takes in earnest.

Models look at positions, masks, lengths and random numbers (`if mask.all():`, `lengths.max().item()`,
`if torch.rand([]) < layerdrop:`). On tensors without values such code fails, or takes another way than on real ones
(Hugging Face models build explicit attention masks there). What is computed from integers, single numbers and small
constants (`torch.ones(batch, length)`) alone is cheap, so it is computed; everything else stays without memory. A value
is forgotten once an unknown one is written into it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..capture.dtypes import WrongTypes, refused
from ..torch_internals.fakes import FakeMode
from ..torch_internals.private import VALUE_NEEDED, PlainDispatchMode, arguments, mutated_arguments
from ..torch_internals.repeats import Key, Recipe, RepeatedCalls
from .kernels.fake_kernels import run_fake_kernel
from .kernels.layouts import lay_out

DEVICE_OF = torch.ops.prim.device.default
"""What `tensor.device` becomes under a mode: asked of fakes several times a call, answered without running anything."""
_CPU = torch.device("cpu")
_ITEM = torch.ops.aten._local_scalar_dense.default
_INDEXED = {
    getattr(torch.ops.aten, name).default if name != "index" else torch.ops.aten.index.Tensor
    for name in ("index", "index_put", "index_put_", "_index_put_impl_")
}
_UNWRITTEN = ("aten::empty", "aten::new_empty")
_READERS = ("tolist", "numpy")
_RECIPES: dict[Key, Recipe | None] = {}
"""What calls on fakes make, for all simulations and profiles of the process: it depends on the calls' signatures alone."""
LIMIT_BYTES = 16 * 2**20
"""Larger results than this (a mask of 4096 × 4096 booleans) have no values."""
_LIMIT_OF_FLOATS_BYTES = 2**20
"""The same for floating-point results of known values: masks and tables that a forward makes."""


class KnownValues(PlainDispatchMode):
    """Runs each call on fakes of `fake_mode`, but on values where all its tensors are real and the result may be.

    Enter it in place of `fake_mode`. What `keeps_values` accepts may enter as a real tensor; all else enters as fakes.
    The caller's generator stays as it is: single random numbers come from one of its own, `num_drawn` of them.

    fills_memory: whether memory allocated without values is filled by the code that runs here, as a model's own code
    does before it reads it. False where the data would come from elsewhere (another rank, the host): it is unknown.
    """

    def __init__(self, fake_mode: FakeMode, fills_memory: bool = True) -> None:
        super().__init__()
        self._fills_memory = fills_memory
        self.num_drawn = self.num_stood_in = 0
        self._stands_in = False
        self._random_state = torch.Generator().manual_seed(0).get_state()
        self._fake_mode = fake_mode
        self._fake_type = type(_any_fake(fake_mode))
        self._forgotten: set[int] = set()
        # its own memory of calls forgets which outputs share storage (an LSTM's two gradients of its biases)
        fake_mode.cache_enabled = False
        self._on_fakes = RepeatedCalls(fake_mode, self._follow, _RECIPES)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is DEVICE_OF:
            return getattr(args[0], "fake_device", _CPU)
        kwargs = kwargs or {}
        if func is _ITEM and self._stands_in and self._fake_type in types:
            self.num_stood_in += 1
            return _one(args[0].dtype)
        if self._fake_type in types:
            self._forget_written(func, args)
            return self._on_fakes(func, args, kwargs)
        if not self._fills_memory and _leaves_unwritten(func):
            return self._on_fakes(func, args, kwargs)
        if not all(self._knows(tensor) for tensor in _tensors((args, kwargs))):
            return self._on_fakes(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._drawn(func, args, kwargs)
        if _has_small_result(func):
            return func(*args, **kwargs)
        try:
            shapes = self._on_fakes(func, args, kwargs)
        except (RuntimeError, NotImplementedError):
            return func(*args, **kwargs)  # what depends on values (`item`, `nonzero`) has no shape without them
        return func(*args, **kwargs) if all(_is_small(tensor) for tensor in _tensors(shapes)) else shapes

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Answer 1 for single numbers that nobody knows, `num_stood_in` of them (an optimizer scales by a norm)."""
        before, self._stands_in = self._stands_in, True
        try:
            yield
        finally:
            self._stands_in = before

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw a random number on which the model may branch; more than one at a time are shapes only."""
        shapes = self._on_fakes(func, args, kwargs)
        if not isinstance(shapes, Tensor) or shapes.numel() > 1:
            return shapes
        self.num_drawn += 1
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self._random_state)
        try:
            return func(*args, **kwargs)
        finally:
            self._random_state = torch.default_generator.get_state()
            torch.default_generator.set_state(before)

    def __enter__(self):
        self._readers = {name: getattr(Tensor, name) for name in _READERS}
        for name, reader in self._readers.items():
            setattr(Tensor, name, self._guarded(reader))
        return super().__enter__()

    def __exit__(self, *exc_info):
        for name, reader in self._readers.items():
            setattr(Tensor, name, reader)
        return super().__exit__(*exc_info)

    def _guarded(self, reader: Callable[..., Any]) -> Callable[..., Any]:
        """`tolist` reads memory past all modes: of values that were forgotten, it would find the old ones."""

        @functools.wraps(reader)
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if id(tensor.untyped_storage()) in self._forgotten:
                raise VALUE_NEEDED[0](torch.ops.aten._local_scalar_dense.default)
            return reader(tensor, *args, **kwargs)

        return read

    def _knows(self, tensor: Tensor) -> bool:
        return _is_small(tensor) and id(tensor.untyped_storage()) not in self._forgotten

    def _forget_written(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note that values are no longer known where a call with fakes among its arguments writes to a real tensor."""
        for place in _writes(func):
            for tensor in _tensors(args[place : place + 1]):
                if not isinstance(tensor, self._fake_type):
                    storage = tensor.untyped_storage()
                    self._forgotten.add(id(storage))
                    weakref.finalize(storage, self._forgotten.discard, id(storage))

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = refused(func, args, kwargs)
        if found is not None:
            raise WrongTypes(func, found)
        if func in _INDEXED:
            args = (args[0], self._without_masks(args[1]), *args[2:])
        out = run_fake_kernel(func, args, kwargs)
        if out is not NotImplemented:
            return out
        with self._fake_mode:
            return lay_out(func, args, func(*args, **kwargs))

    def _without_masks(self, indices: list[Tensor | None]) -> list[Tensor | None]:
        """Replace each known boolean mask by the positions that it selects, so that their number is known."""
        found: list[Tensor | None] = []
        for index in indices:
            is_mask = index is not None and index.dtype is torch.bool and not isinstance(index, self._fake_type)
            if index is not None and is_mask and self._knows(index):
                found.extend(index.nonzero().unbind(1))
            else:
                found.append(index)
        return found


@functools.cache
def _has_small_result(func: Any) -> bool:
    """Whether the result of known values needs no look at its size first: it is one of them, a number, or their places."""
    by_value = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return bool(_writes(func)) or func is torch.ops.aten.lift_fresh.default or any(tag in func.tags for tag in by_value)


@functools.cache
def _leaves_unwritten(func: Any) -> bool:
    """Tell whether the op allocates memory and writes nothing there."""
    return func._schema.name.startswith(_UNWRITTEN)


@functools.cache
def _writes(func: Any) -> tuple[int, ...]:
    """Return the places of the arguments that the op writes."""
    names = [name for name, _, _ in arguments(func)]
    return tuple(names.index(name) for name in mutated_arguments(func))


def keeps_values(tensor: Tensor) -> bool:
    """Tell whether a tensor is a small integer one, or a single number, with values (not on the meta device)."""
    if tensor.device.type != "cpu":
        return False
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return tensor.numel() <= 1
    return tensor.numel() * tensor.element_size() <= LIMIT_BYTES


def _one(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


def _is_small(tensor: Tensor) -> bool:
    """Tell whether a result of known values is computed too."""
    if tensor.device.type != "cpu":
        return False
    is_integer = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return tensor.numel() * tensor.element_size() <= (LIMIT_BYTES if is_integer else _LIMIT_OF_FLOATS_BYTES)


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
