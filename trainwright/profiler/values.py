"""Executes a model on fake tensors but keeps the values of small integer tensors, so that it takes the branches of a real run.

Models look at positions, masks, lengths and random numbers (`if mask.all():`, `lengths.max().item()`,
`if torch.rand([]) < layerdrop:`). On tensors without values such code fails, or takes another way than on real ones
(Hugging Face models build explicit attention masks there). Calls on integers, single numbers and small constants
(`torch.ones(batch, length)`) alone are cheap, so they are executed; all other tensors stay fake. A real tensor's values are
forgotten once a fake one is written into it.
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
"""The op that `tensor.device` becomes under a mode; fakes get it several times a call, so it is answered at once."""
_CPU = torch.device("cpu")
_ITEM = torch.ops.aten._local_scalar_dense.default
_INDEXED = {
    getattr(torch.ops.aten, name).default if name != "index" else torch.ops.aten.index.Tensor
    for name in ("index", "index_put", "index_put_", "_index_put_impl_")
}
_UNWRITTEN = ("aten::empty", "aten::new_empty")
_READERS = ("tolist", "numpy")
_RECIPES: dict[Key, Recipe | None] = {}
"""Cached results of calls on fakes, shared by all simulations and profiles of the process; the signature decides them."""
LIMIT_BYTES = 16 * 2**20
"""The size above which results (a mask of more than 4096 × 4096 booleans) stay fake."""
_LIMIT_OF_FLOATS_BYTES = 2**20
"""The same for floating-point results: masks and tables that a forward computes from known values."""


class KnownValues(PlainDispatchMode):
    """Dispatch mode that runs each call on fakes of `fake_mode`, but for real if all its tensors are real and its result is small.

    Enter it in place of `fake_mode`. What `keeps_values` accepts may enter as a real tensor; all else enters as fakes.
    The caller's generator stays unchanged: single random numbers, `num_drawn` of them, come from a generator of the mode.

    fills_memory: whether the code that runs here fills what it allocates with `torch.empty` before it reads it, as a model's own
    code does. False where the data would come from elsewhere (another rank, the host), so that its values are unknown.
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
        """Answer `item()` on fakes with 1 while the context lasts (an optimizer scales by a norm); `num_stood_in` counts them."""
        before, self._stands_in = self._stands_in, True
        try:
            yield
        finally:
            self._stands_in = before

    def _drawn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a real random number if the call draws a single one, on which the model may branch; else a fake tensor."""
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
        """Return `reader` with a check: `tolist` and `numpy` bypass all modes and would read a forgotten tensor's old values."""

        @functools.wraps(reader)
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if id(tensor.untyped_storage()) in self._forgotten:
                raise VALUE_NEEDED[0](torch.ops.aten._local_scalar_dense.default)
            return reader(tensor, *args, **kwargs)

        return read

    def _knows(self, tensor: Tensor) -> bool:
        return _is_small(tensor) and id(tensor.untyped_storage()) not in self._forgotten

    def _forget_written(self, func: Any, args: tuple[Any, ...]) -> None:
        """Mark the values of every real tensor as forgotten to which a call with fakes among its arguments writes."""
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
    """Tell whether the op may run on known values without a look at its result's size first.

    It may where it writes in place, copies a constant, returns a number, or has a result whose shape depends on values.
    """
    by_value = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return bool(_writes(func)) or func is torch.ops.aten.lift_fresh.default or any(tag in func.tags for tag in by_value)


@functools.cache
def _leaves_unwritten(func: Any) -> bool:
    """Tell whether the op allocates memory without initialising it."""
    return func._schema.name.startswith(_UNWRITTEN)


@functools.cache
def _writes(func: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that the op mutates."""
    names = [name for name, _, _ in arguments(func)]
    return tuple(names.index(name) for name in mutated_arguments(func))


def keeps_values(tensor: Tensor) -> bool:
    """Tell whether a tensor may stay real: it is on the CPU, and a small integer tensor or a single number."""
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
    """Tell whether a tensor is small enough to be computed for real."""
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
