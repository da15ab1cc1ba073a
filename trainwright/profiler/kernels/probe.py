"""Measures a kernel's workspace: runs the call once, on zeros, and reads the allocator's records.

oneDNN chooses blockings, layouts and copies by its own rules, which differ between processors. The workspace of such a
call depends on its shapes, strides and dtypes and on the number of threads, so each such combination is run once and
cached. Large calls are not run: their workspace grows no faster than their tensors, and a formula estimates it.
"""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.flops import flops
from ...torch_internals.private import is_profiled
from ...torch_internals.trees import tensors_in
from .allocator import measure, memory_session

LIMIT_BYTES = 64 * 2**20
"""The most bytes that the tensors of a call that is run may have together."""
LIMIT_FLOPS = 2 * 10**9
"""The most FLOPs of a call that is run: some forty milliseconds on one core."""
aten = torch.ops.aten
Arguments = tuple[Any, ...]


class Probe(NamedTuple):
    """The memory that one call was measured to take."""

    workspace_bytes: int
    """The peak bytes inside the call, beyond its results."""
    output_bytes: tuple[int, ...]
    """The size of each result's storage."""


def probe(func: Any, args: Arguments, kwargs: dict[str, Any], out: Any) -> Probe | None:
    """Return the measured workspace and outputs of the CPU kernel of `func`; None for a call that is too large to run.

    None too while the caller has a `torch.profiler` session open, which a measurement would end.

    args, kwargs, out: those of one call, fake or real; only shapes, strides and dtypes are read. `func` must not draw random
    numbers.

    >>> x = torch.empty(4, 16, 28, 28)
    >>> probe(torch.ops.aten.relu.default, (x,), {}, x)
    Probe(workspace_bytes=0, output_bytes=(200704,))
    """
    if not is_small(func, args, out, kwargs) or is_profiled():
        return None
    key = (func, torch.get_num_threads(), torch.is_grad_enabled(), _described((args, kwargs), {}))
    if key not in _FOUND:
        _FOUND[key] = _make_call(func, args, kwargs)
    return _FOUND[key]


_FOUND: dict[tuple[Any, ...], Probe | None] = {}


def is_small(func: Any, args: Arguments, out: Any, kwargs: dict[str, Any] | None = None, *, part: float = 1.0) -> bool:
    """Tell whether a call is within `part` of the limits on calls that are run."""
    size = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in((args, kwargs, out)))
    return size <= LIMIT_BYTES * part and flops(func, args, kwargs or {}, out)[0] <= LIMIT_FLOPS * part


def _make_call(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Probe | None:
    """Run the call in a new thread, in which the caller's dispatch modes and autocast are not active."""
    _start_profiler()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(_make_call_here, func, args, kwargs, torch.get_num_threads(), torch.is_grad_enabled())
        return job.result()


@functools.cache
def _start_profiler() -> None:
    """Start torch's profiler once in the caller's thread; a first start in another thread prints a warning."""
    with memory_session():
        pass


def _make_call_here(
    func: Any, args: Arguments, kwargs: dict[str, Any], num_threads: int, has_grad: bool
) -> Probe | None:
    torch.set_num_threads(num_threads)
    try:
        call, named = _zeros((args, kwargs), {})
        call = _with_kept_state(func, call)
        results: list[Any] = []
        with torch.set_grad_enabled(has_grad):
            record = measure(lambda: results.append(func(*call, **named)), num_steps=1)
    except (RuntimeError, NotImplementedError, ValueError):
        return None  # a formula has to do
    sizes = tuple(tensor.untyped_storage().nbytes() for tensor in tensors_in(results))
    return Probe(record.peak_delta_bytes - record.end_delta_bytes, sizes)


def _with_kept_state(func: Any, args: Any) -> Any:
    """Return the arguments; an LSTM's backward gets the state that its forward saves, whose size no shape function knows."""
    if func is not aten.mkldnn_rnn_layer_backward.default:
        return args
    reverse, mode, hidden_size, num_layers, has_biases, train, bidirectional, batch_sizes, batch_first = args[13:22]
    sizes = (batch_sizes, mode, hidden_size, num_layers, has_biases, bidirectional, batch_first, train)
    kept = aten.mkldnn_rnn_layer.default(*args[:7], reverse, *sizes)[3]
    return (*args[:22], kept)


def _zeros(value: Any, storages: dict[int, Tensor]) -> Any:
    """Return `value` with real tensors of zeros in place of its tensors: same shapes, strides, and shared memory.

    storages: id of a storage → the zeros that stand for its elements.
    """
    if isinstance(value, Tensor):
        whole = value.untyped_storage()
        zeros = storages.setdefault(id(whole), torch.zeros(whole.nbytes(), dtype=torch.uint8))
        return zeros.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, dict):
        return {name: _zeros(item, storages) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([_zeros(item, storages) for item in value])
    return value


def _described(value: Any, storages: dict[int, int]) -> Any:
    """Return a hashable description of a call's arguments; storages: id of a storage → its index within the call."""
    if isinstance(value, Tensor):
        place = storages.setdefault(id(value.untyped_storage()), len(storages))
        return place, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((name, _described(item, storages)) for name, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_described(item, storages) for item in value)
    return type(value), value
