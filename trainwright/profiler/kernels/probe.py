"""Scratch that only the kernel itself knows: the call is made once, on zeros, and the allocator's records are read.

oneDNN chooses blockings, layouts and copies by rules of its own that differ from processor to processor. What such a
call takes inside depends on its shapes, strides and types and on the number of threads, so each kind of call is made
once and remembered. Large calls are not made: what they take grows no faster than their tensors, and a formula serves.
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
"""Of a call's tensors together."""
LIMIT_FLOPS = 2 * 10**9
"""Some forty milliseconds of one core."""
aten = torch.ops.aten
Arguments = tuple[Any, ...]


class Probe(NamedTuple):
    """What one call took."""

    workspace_bytes: int
    """Beside its results, at its own peak."""
    output_bytes: tuple[int, ...]
    """The memory under each result."""


def probe(func: Any, args: Arguments, kwargs: dict[str, Any], out: Any) -> Probe | None:
    """Return what the CPU kernel of `func` takes inside and leaves; None for a call too large to be made.

    None too while a `torch.profiler` session of the caller's is on, which looking at the records would end.

    args, kwargs, out: of one call, fakes or not; only shapes, strides and types are read. No op that draws random
    numbers may be asked for.

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
    """Tell whether a call is within `part` of the limits of what is made."""
    size = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in((args, kwargs, out)))
    return size <= LIMIT_BYTES * part and flops(func, args, kwargs or {}, out)[0] <= LIMIT_FLOPS * part


def _make_call(func: Any, args: Arguments, kwargs: dict[str, Any]) -> Probe | None:
    """Make the call in a thread of its own: dispatch modes and autocast belong to the thread that entered them."""
    _start_profiler()
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(_make_call_here, func, args, kwargs, torch.get_num_threads(), torch.is_grad_enabled())
        return job.result()


@functools.cache
def _start_profiler() -> None:
    """Its first start belongs in the caller's thread: in another one it complains."""
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
    """Give an LSTM's backward what the forward keeps for it, whose size no shape function knows."""
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
    """Return what tells calls apart; storages: id of a storage → which one it is in the call."""
    if isinstance(value, Tensor):
        place = storages.setdefault(id(value.untyped_storage()), len(storages))
        return place, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((name, _described(item, storages)) for name, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_described(item, storages) for item in value)
    return type(value), value
