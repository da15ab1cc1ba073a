"""`capture`, with the answer of an earlier process where nothing that it hangs on has changed.

    key     what there is before a capture: model, batch, loss (description.py); versions, files (surroundings.py)
    entry   the graph (stored.py), and every file of code that was loaded when it had been captured
    name    for the zoo's models a second way to the entry, by which a plan is checked without building its model

An entry is a safetensors file and its digest: the constants' values, and in the header the rest as JSON. Whatever is in
doubt is captured.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from ..artifacts.cache_directory import CacheDirectory, cache_directory
from ..torch_internals import private
from .description import digest_of
from .experts import know_gates
from .export import Captured, as_batch, capture
from .stored import NotStorable, as_data, from_data
from .surroundings import is_own_file, loaded_files, surroundings, unchanged

__all__ = ["cached_capture", "capture_named", "name_on", "naming", "step_name"]

_HEADER = "capture"
_DIGEST_BYTES = 20
_named: ContextVar[tuple[str, Any] | None] = ContextVar("named", default=None)
"""A name, and the batch on which it stands for a model's step."""


def cached_capture(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    *,
    autocast: Any = None,
    name: str | None = None,
) -> Captured:
    """Return what `capture` returns, from the cache where it has it; see there for the arguments and errors.

    name: what `step_name` gave; the capture is then found by it as well.
    """
    cache = cache_directory()
    key = None if cache is None else _key(model, batch, loss_fn, autocast)
    if cache is None or key is None:
        return capture(model, batch, loss_fn, autocast=autocast)
    know_gates(model)
    found = _read(cache, key)
    if found is None:
        found = capture(model, batch, loss_fn, autocast=autocast)
        if not _write(cache, key, found):
            return found
    if name is not None:
        cache.write(_name_file(name, autocast), key.encode())
    return found


def capture_named(name: str, autocast: Any) -> Captured | None:
    """Return the stored capture of `name`, without its model; `None` where there is none."""
    cache = cache_directory()
    try:
        key = None if cache is None else cache.read(_name_file(name, autocast))
    except NotStorable:
        return None
    return None if cache is None or key is None else _read(cache, key.decode("ascii", "replace"))


@contextmanager
def naming(name: str | None, batch: Any) -> Iterator[None]:
    """Say that the model captured inside on `batch` is what `name` always builds, and on that batch."""
    token = _named.set(None if name is None else (name, batch))
    try:
        yield
    finally:
        _named.reset(token)


def name_on(batch: Any) -> str | None:
    """Return the name that `naming` gave to steps on `batch`, if it did."""
    said = _named.get()
    return said[0] if said is not None and said[1] is batch else None


def step_name(name: str | None, num: int) -> str | None:
    """Return the name of a step on one of `num` micro-batches of what is called `name`."""
    return None if name is None else f"{name} / {num}"


def _key(model: nn.Module, batch: Any, loss_fn: Any, autocast: Any) -> str | None:
    """The name of the entry, `None` where something cannot be looked into to the end."""
    try:
        if (
            len({tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type != "meta"})
            > 1
        ):
            return None  # to be refused
        around = json.dumps(surroundings())
        return _file_name(around, digest_of(model, _form(batch), loss_fn, autocast, is_own_file=is_own_file))
    except (NotStorable, OSError):
        return None


def _name_file(name: str, autocast: Any) -> str:
    return "name-" + _file_name(json.dumps(surroundings()), json.dumps([name, str(autocast)]))


def _file_name(*texts: str) -> str:
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=20).hexdigest()


def _form(batch: Any) -> Any:
    """The batch with what a capture sees in place of each tensor; values it does not see."""
    leaves, form = private.flatten(as_batch(batch))
    return private.unflatten([_seen(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)


def _seen(leaf: Tensor) -> Any:
    if leaf.layout is not torch.strided:
        raise NotStorable(f"a batch entry of layout {leaf.layout}")
    return ("tensor", isinstance(leaf, nn.Parameter), tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)


def _write(cache: CacheDirectory, key: str, captured: Captured) -> bool:
    """Store a capture; `False` where it cannot be written down exactly."""
    try:
        data, values = as_data(captured)
        text = json.dumps({"capture": data, "files": loaded_files()})
        content = save(values, {_HEADER: text})
    except (NotStorable, OSError):
        return False
    cache.write(key, content + _digest(content))
    return True


def _read(cache: CacheDirectory, key: str) -> Captured | None:
    """Return a stored capture; one that is damaged, or whose code has changed since, is removed."""
    content = cache.read(key)
    if content is None:
        return None
    try:
        if _digest(content[:-_DIGEST_BYTES]) != content[-_DIGEST_BYTES:]:
            raise ValueError("damaged")
        content = content[:-_DIGEST_BYTES]
        length = int.from_bytes(content[:8], "little")
        stored = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_HEADER])
        if unchanged(stored["files"]):
            return from_data(stored["capture"], load(content))
    except NotStorable:
        return None  # it is right, and this process lacks code that it calls
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError):
        pass  # not what this release writes
    cache.remove(key)
    return None


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
